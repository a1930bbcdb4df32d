"""JSON over HTTP with a deadline, on the standard library: the control calls that a trainer makes to its servers.

Each call opens a connection of its own: vLLM closes idle ones after a few seconds, and the next request on such a one
would be reset.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from lit_rl.errors import ServerRefused, ServerUnreachable

T = TypeVar("T")


def get(url: str, route: str, *, timeout: float) -> Any:
    """``request`` with GET."""
    return request(url, "GET", route, None, timeout=timeout)


def post(url: str, route: str, body: dict[str, Any] | None = None, *, timeout: float) -> Any:
    """``request`` with POST."""
    return request(url, "POST", route, body, timeout=timeout)


def request(url: str, method: str, route: str, body: dict[str, Any] | None, *, timeout: float) -> Any:
    """One call.

    Args:
        url: The server's base URL.
        method: GET or POST.
        route: The path, with its query.
        body: Sent as JSON; None sends none.
        timeout: Seconds for connecting and for each part of the answer.

    Returns:
        The answer's JSON; None for an empty answer.

    Raises:
        ServerRefused: a status of 300 or more; carries what the server said.
        ServerUnreachable: no connection, no answer in time, or a connection closed without one.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    secure = parts.scheme == "https"
    connection_type = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connection_type(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout)
    headers = {"Connection": "close"} | ({"Content-Type": "application/json"} if body is not None else {})
    try:
        connection.request(
            method, parts.path.rstrip("/") + route, json.dumps(body) if body is not None else None, headers
        )
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError as cause:
        raise ServerUnreachable(f"{url}{route} gave no answer within {timeout:g} s") from cause
    except ConnectionRefusedError as cause:
        raise ServerUnreachable(f"nothing listens at {url} (asked for {route})") from cause
    except (OSError, http.client.HTTPException) as cause:
        raise ServerUnreachable(f"{url}{route} ended without an answer: {cause or type(cause).__name__}") from cause
    finally:
        connection.close()
    if response.status >= 300:
        raise ServerRefused.answered(f"{url}{route}", response.status, text)
    return _parsed(url, route, text)


def _parsed(url: str, route: str, text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as cause:
        raise ServerUnreachable(f"{url}{route} did not answer with JSON (is this vLLM?): {text[:200]!r}") from cause


class Background(Generic[T]):
    """A call in a daemon thread: it can be watched, and given up without holding up the end of the process.

    Args:
        work: What to do.
        name: Of the thread, for stack dumps.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._ended = threading.Event()
        self._value: T | None = None
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as failure:  # noqa: BLE001  handed to whoever asks for the result
            self._failure = failure
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def failure(self) -> BaseException | None:
        """What it raised; None while it runs and when it went well."""
        return self._failure if self.done else None

    def wait(self, timeout: float) -> bool:
        """Whether it ended within ``timeout`` seconds."""
        return self._ended.wait(max(timeout, 0.0))

    def result(self, timeout: float) -> T:
        """Its value. Raises what it raised; TimeoutError when it still runs after ``timeout`` seconds."""
        if not self.wait(timeout):
            raise TimeoutError
        if self._failure is not None:
            raise self._failure
        return self._value  # type: ignore[return-value]


class Deadline:
    """A point in time that several waits share.

    Args:
        seconds: From now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end
