"""Stands between a trainer and its server, so that the server never outlives the trainer.

Run as a script, on the standard library alone: ``python guard.py PARENT_PID GRACE_S COMMAND...``. It starts the command
in a session of its own and ends with its exit code. When the trainer is gone (``kill -9`` included) or the guard gets
SIGTERM, it ends the command and everything that came from it: SIGTERM, and SIGKILL after the grace period. Processes
that leave the command's process group are found too, because they become children of the guard.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

POLL_S = 0.2
ORPHAN_GRACE_S = 2.0
"""Seconds for a clean end when the trainer is gone: nobody waits for one any more."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Guard:
    """One guarded command.

    Args:
        parent: Process id of the trainer.
        grace: Seconds between SIGTERM and SIGKILL.
        command: What to run.
    """

    def __init__(self, parent: int, grace: float, command: list[str]) -> None:
        self.parent, self.grace, self.command = parent, grace, command
        self.told_to_end = False

    def run(self) -> int:
        """Returns the command's exit code; 128 plus the signal's number when a signal ended it, as a shell does."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        adopt_orphans = ctypes.CDLL(None, use_errno=True).prctl
        adopt_orphans(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        server = subprocess.Popen(self.command, start_new_session=True, preexec_fn=_die_with_guard)
        while server.poll() is None and not self.told_to_end and os.getppid() == self.parent:
            time.sleep(POLL_S)
        grace = self.grace if os.getppid() == self.parent else min(self.grace, ORPHAN_GRACE_S)
        if server.poll() is None:
            server.terminate()
            _wait(lambda: server.poll() is not None, grace)
        end_descendants(os.getpid(), grace)
        code = server.wait()
        _wait(_no_child_is_left, 1.0)
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.told_to_end = True


def end_descendants(root: int, grace: float) -> None:
    """Ends every process below ``root``: SIGTERM to those that are left, then SIGKILL until none is."""
    _signal(descendants(root), signal.SIGTERM)
    _wait(lambda: not descendants(root), min(grace, 2.0))
    while left := descendants(root):
        _signal(left, signal.SIGKILL)
        _wait(lambda: not descendants(root), 0.5)


def descendants(root: int) -> list[int]:
    """Process ids below ``root`` that have not ended, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _no_child_is_left() -> bool:
    """Collects children that have ended, adopted ones too, so that none stays behind as a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def _die_with_guard() -> None:
    """In the command, before it begins: the guard itself may be killed by ``kill -9``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(Guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).run())
