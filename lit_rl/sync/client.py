"""Stop 14: the weight-update routes of vLLM servers, each call with a deadline and an error in the server's words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from lit_rl.engines.http import Background, Deadline, get, post
from lit_rl.errors import ServerRefused, ServerUnreachable

T = TypeVar("T")

POLL_S = 0.001
"""How often a wait looks whether its answer is there."""


class WeightSyncClient:
    """One server. Its four update methods are those that vLLM's own trainer-side engines ask of a client.

    Args:
        url: The server's base URL.
        timeout: Seconds that one call may take.

    Raises:
        ServerRefused: the server said no; quotes route, status and reply.
        ServerUnreachable: it did not answer; names the route and the timeout.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout

    def _post(self, route: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        return post(self.url, route, body, timeout=self.timeout if timeout is None else timeout)

    def world_size(self) -> int:
        """Workers of the server, over all its parallel dimensions."""
        return int(get(self.url, "/get_world_size", timeout=self.timeout)["world_size"])

    def is_paused(self) -> bool:
        return bool(get(self.url, "/is_paused", timeout=self.timeout)["is_paused"])

    def pause(self) -> None:
        """Freezes generation where it stands; running requests go on after ``resume``.

        Their cached keys and values are dropped and computed anew by the new weights, as are cached prefixes.
        """
        self._post("/pause?mode=keep&clear_cache=true")

    def resume(self, timeout: float | None = None) -> None:
        self._post("/resume", timeout=timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self, timeout: float | None = None) -> None:
        self._post("/shutdown_weight_transfer_engine", timeout=timeout)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def abort_weight_update(self, timeout: float) -> None:
        """Ends an update that was started: the gloo engine answers it with a refusal and puts the old weights back."""
        try:
            self._post("/update_weights", {"update_info": {"abort": True}}, timeout=timeout)
        except ServerRefused:
            return

    def close_weight_update(self, timeout: float) -> None:
        """Ends an update that one of vLLM's own engines began, so that every layer has weights again.

        After a refused update some layers are without memory, and the next request on them would end the engine.
        Finishing gives those their old weights back. vLLM takes a finish only of an update that it holds for open, and
        a refusal closed it: then a new one is begun and finished, with nothing in it.
        """
        finish = {"weight_version": None}  # the label stays
        try:
            self._post("/finish_weight_update", finish, timeout=timeout)
        except ServerRefused:
            self._post("/start_weight_update", timeout=timeout)
            self._post("/finish_weight_update", finish, timeout=timeout)


class Answers(Generic[T]):
    """One call made to all servers at once, and what became of it.

    Args:
        clients: The servers.
        what: The route, for messages.
        action: The call.
    """

    def __init__(self, clients: Sequence[WeightSyncClient], what: str, action: Callable[[WeightSyncClient], T]) -> None:
        self._clients, self._what = clients, what
        self._calls = [Background(partial(action, client), f"{what} {client.url}") for client in clients]

    @property
    def done(self) -> bool:
        return all(call.done for call in self._calls)

    def check(self, deadline: Deadline) -> None:
        """Raises what the first failed call raised, or ServerUnreachable when the deadline has passed."""
        raise_failure(self._calls)
        if deadline.passed:
            waiting = [c.url for c, call in zip(self._clients, self._calls, strict=True) if not call.done]
            names = ", ".join(f"{url}/{self._what}" for url in waiting) or self._what
            raise ServerUnreachable(f"{names} gave no answer within {deadline.seconds:g} s")

    def wait_for_words(self, seconds: float) -> None:
        """Raises what the first failed call raised; returns when none failed within so many seconds."""
        deadline = Deadline(seconds)
        while not deadline.passed and not any(call.failure for call in self._calls):
            time.sleep(POLL_S)
        raise_failure(self._calls)

    def let_end(self, seconds: float) -> None:
        """Waits for calls that are on their way, well or not, at most so many seconds."""
        deadline = Deadline(seconds)
        while not self.done and not deadline.passed:
            time.sleep(POLL_S)

    def wait(self, deadline: Deadline, beside: Sequence[Background[Any]] = ()) -> list[T]:
        """The answers, in the order of the servers, once all are there; raises as ``check``.

        Args:
            deadline: Of the answers.
            beside: Calls of our own that belong to it: they are waited for too, and their failures raised.
        """
        calls = [*beside, *self._calls]
        while not all(call.done for call in calls):
            raise_failure(beside)
            self.check(deadline)
            time.sleep(POLL_S)
        raise_failure(calls)
        return [call.result(0.0) for call in self._calls]


def raise_failure(calls: Sequence[Background[Any]]) -> None:
    """Raises what the first failed call raised, if one did."""
    for call in calls:
        if call.failure is not None:
            raise call.failure
