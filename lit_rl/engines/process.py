"""A server process that is started, watched and ended by the trainer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from lit_rl.engines import guard, http
from lit_rl.engines.plan import ServerPlan
from lit_rl.errors import ServerError, ServerRefused, ServerUnreachable, SettingsError

GRACE_S = 10.0
POLL_S = 0.25
LAST_LINES = 20
NOISE = re.compile(
    r"^\s+\[-|nanobind|leaked (instance|type|function)|skipped remainder|resource_tracker|^\s*warnings\.warn|Route: /"
)
"""Lines at the end of every log that say nothing about why a server ended."""

Progress = Callable[[float, str], None]
"""Called with seconds waited and the last line of the log."""


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def why_taken(host: str, port: int) -> str | None:
    """Why nobody can listen there, in the system's words; None where somebody can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a server that just ended is free
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as cause:
            return cause.strerror or str(cause)
    return None


def require_free(url: str, otherwise: str = "") -> None:
    """Raises SettingsError where no server can listen at ``url``; ``otherwise`` is one more remedy."""
    parts = urlsplit(url)
    reason = why_taken(parts.hostname or "", parts.port or 80)
    if reason is not None:
        remedy = ", ".join(filter(None, ["stop what runs on that port", "give another port", otherwise]))
        raise SettingsError("data.engine.url", url, f"the server cannot be started there ({reason}); {remedy}")


class ServerProcess:
    """Starts a plan's command under a guard process, which ends it with the trainer, however the trainer ends.

    Args:
        plan: What to start.
        log_file: Where its output goes.
        grace: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, plan: ServerPlan, log_file: Path, grace: float = GRACE_S) -> None:
        self.plan, self.log_file, self.grace = plan, Path(log_file), grace
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.plan.url

    def start(self) -> None:
        """Returns at once.

        Raises:
            SettingsError: the port is taken.
        """
        require_free(self.plan.url, "or leave the url out and a free port is taken")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-S", "-E", guard.__file__, str(os.getpid()), str(self.grace), *self.plan.command]
        with open(self.log_file, "wb") as log:
            self._guard = subprocess.Popen(
                command,
                env=self.plan.environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the trainer, which then stops the server
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or before it was started."""
        return self._guard.poll() if self._guard is not None else None

    def wait_ready(self, deadline_s: float, progress: Progress | None = None) -> None:
        """Until the server answers ``/health``; the guard and this loop's clock wake it.

        Raises:
            ServerError: it ended, or was not ready in time; shows the last lines of its log.
        """
        started = time.monotonic()
        while not self._healthy():
            waited = time.monotonic() - started
            if self.exit_code is not None:
                raise ServerError(
                    f"the server ended with exit code {self.exit_code} before it was ready.\n{self.words()}"
                )
            if waited > deadline_s:
                raise ServerError(
                    f"the server was not ready within {deadline_s:g} s (data.engine.timeout).\n{self.words()}"
                )
            if progress is not None:
                progress(waited, self._last_line())
            time.sleep(POLL_S)

    def check_alive(self, patience: float = 0.0) -> None:
        """Raises ServerError with the last lines of the log when the server has ended, or does within ``patience``."""
        end = time.monotonic() + patience
        while self.exit_code is None and time.monotonic() < end:
            time.sleep(POLL_S)
        if self.exit_code is not None:
            raise ServerError(f"the server ended with exit code {self.exit_code}.\n{self.words()}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, for the server and all that came from it; safe to call twice."""
        running, self._guard = self._guard, None
        if running is None:
            return
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(self.grace + 5.0)
        except subprocess.TimeoutExpired:
            guard.end_descendants(running.pid, 0.0)
            running.kill()
            running.wait()

    def words(self) -> str:
        """What the log says about the end: its last error lines, then its last lines."""
        lines = [line for line in _tail(self.log_file) if line.strip() and not NOISE.search(line)]
        causes = list(dict.fromkeys(_bare(line) for line in lines[:-LAST_LINES] if _names_an_error(line)))[-3:]
        shown = [*causes, "...", *lines[-LAST_LINES:]] if causes else lines[-LAST_LINES:]
        return "\n".join([f"The end of {self.log_file}:", *(f"  {line[:400]}" for line in shown)])

    def _last_line(self) -> str:
        lines = [line for line in _tail(self.log_file) if line.strip() and not NOISE.search(line)]
        return _bare(lines[-1]) if lines else ""

    def _healthy(self) -> bool:
        if self.exit_code is not None:
            return False
        try:
            http.get(self.plan.url, "/health", timeout=5.0)
        except (ServerUnreachable, ServerRefused):
            return False
        return True


def _tail(path: Path, size: int = 65536) -> list[str]:
    """The last lines of a file that may still grow; none where it does not exist."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size))
        return file.read().decode(errors="replace").splitlines()


def _bare(line: str) -> str:
    """A line of vLLM's log without its process, level, time and place."""
    return re.sub(r"^(\(\S+ pid=\d+\) )?((INFO|WARNING|ERROR) \S+ \S+ \[\S+\] )?", "", line).strip()


def _names_an_error(line: str) -> bool:
    """``ValueError: ...``, as the last line of a traceback."""
    return re.match(r"[\w.]*(Error|Exception): ", _bare(line)) is not None
