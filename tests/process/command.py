"""The ``lit-rl`` command as a user runs it: a process with its own words, exit code and descendants."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "LIT_RL_TEST_RUN"
"""Set in a run's environment, so that whatever it leaves behind is found."""

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["lit_rl.cli", "lit_rl.policy.build", "datasets", "tests.fakes.engine"])


@dataclass
class Ended:
    """A run that is over.

    Attributes:
        code: Its exit code; None where it had to be killed.
        seconds: From start to end.
        out: What it said to stdout.
        err: And to stderr.
        left: Processes of the run that outlived it, as command lines.
    """

    code: int | None
    seconds: float
    out: str
    err: str
    left: list[str]

    @property
    def message(self) -> list[str]:
        """The lines from the last one that ``lit-rl`` began with its name to the end."""
        lines = self.err.rstrip().splitlines()
        starts = [place for place, line in enumerate(lines) if line.startswith("lit-rl: ")]
        return lines[starts[-1] :] if starts else []


def run(args: list[str], folder: Path, *, seconds: float = 60.0) -> Ended:
    """``python -m lit_rl`` with these arguments, from the start."""

    def start(mark: str, out: Path, err: Path) -> Callable[[float], int | None]:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            command = [sys.executable, "-m", "lit_rl", *args]
            process = subprocess.Popen(command, env=os.environ | {MARK: mark}, stdout=stdout, stderr=stderr)

        def wait(limit: float) -> int | None:
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None

        return wait

    return _run(start, folder, seconds)


def run_forked(args: list[str], folder: Path, *, seconds: float = 60.0) -> Ended:
    """The same without the eight seconds of imports: the process is forked from one that has done them."""

    def start(mark: str, out: Path, err: Path) -> Callable[[float], int | None]:
        process = FORKING.Process(target=_main, args=(args, mark, out, err))
        process.start()

        def wait(limit: float) -> int | None:
            process.join(limit)
            if process.is_alive():
                process.kill()
                process.join()
                return None
            return process.exitcode

        return wait

    return _run(start, folder, seconds)


def _main(args: list[str], mark: str, out: Path, err: Path) -> None:
    os.environ[MARK] = mark
    speak_into(out, err)
    sys.argv = ["lit-rl", *args]
    from lit_rl.cli import main

    main()


def speak_into(out: Path, err: Path) -> None:
    """Sends what this process says on stdout and stderr into files."""
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def _run(start: Callable[[str, Path, Path], Callable[[float], int | None]], folder: Path, limit: float) -> Ended:
    mark, began = uuid.uuid4().hex, time.monotonic()
    out, err = folder / "stdout", folder / "stderr"
    code = start(mark, out, err)(limit)
    seconds = time.monotonic() - began
    return Ended(code, seconds, out.read_text(), err.read_text(), left_behind(mark))


def left_behind(mark: str, within: float = 5.0) -> list[str]:
    """Command lines of the processes that carry the mark and are still there after some seconds."""
    deadline = time.monotonic() + within
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(found.values())


def marked(mark: str) -> dict[int, str]:
    """The processes that carry the mark: their command lines by pid."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if process.name.isdigit() and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(process.name)] = line
    return found
