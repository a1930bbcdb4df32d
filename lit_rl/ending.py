"""How the ``lit-rl`` command ends: one last line and one exit status for each way.

======================  ======  =======================================================
it did its work            0
an error of lit_rl         1    its message, without a traceback
any other exception        1    Python's traceback
Ctrl-C                   130    where it was stopped
SIGTERM                  143    where it was stopped
======================  ======  =======================================================
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from lit_rl.errors import LitRLError

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
PATIENCE = 3
"""Signals upon which the process leaves at once, in case the first one was lost. What it started ends by itself then; a
server in the middle of a weight sync stays paused until the next run."""


def without_traceback() -> Callable[[], None]:
    """Lets Ctrl-C end the process as it ends any other program, until the returned function is called."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)

    def put_back() -> None:
        signal.signal(signal.SIGINT, before)

    return put_back


class Ending:
    """Wraps the whole command.

    The first Ctrl-C or SIGTERM becomes an exception, upon which everything that the run started is ended. A second one
    would only cut that short, so it does nothing but say so.

    Attributes:
        step: Tells the optimizer steps done, once there is a trainer.
    """

    def __init__(self) -> None:
        self.step: Callable[[], int] | None = None
        self._first: int | None = None
        self._count = 0
        self._is_said = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.step, self._first, self._count, self._is_said = None, None, 0, False
        for number in NAMES:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._first is None:  # else the process ends, and nobody may disturb that either
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if error is not None:
            self._last_words(error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= PATIENCE:
            os._exit(128 + number)
        if self._count > 1:
            if not self._is_said:  # the last line stays the last one
                os.write(2, b"\nlit-rl: still stopping\n")  # not by print: this may interrupt one
            return
        self._first = number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _last_words(self, error: BaseException) -> None:
        """Prints them and exits; returns where Python's own are right."""
        if isinstance(error, LitRLError):
            print(f"\nlit-rl: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        elif self._first is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            traceback.print_exception(error)
        if self._first is not None:
            # Lightning makes status 1 of a Ctrl-C
            line = (
                f"\nlit-rl: stopped by {NAMES[signal.Signals(self._first)]} {self._where()}; nothing was left running"
            )
            self._is_said = True
            print(line, file=sys.stderr, flush=True)
            sys.exit(128 + self._first)
        if isinstance(error, LitRLError):
            sys.exit(1)

    def _where(self) -> str:
        steps = self.step() if self.step is not None else 0
        return f"after {steps} step{'s'[: steps != 1]}" if steps else "before the first step was done"
