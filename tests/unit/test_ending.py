"""How the command ends: its last line and its exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

COMMAND = """
import time
from lit_rl.ending import Ending
from lit_rl.errors import ServerError

with Ending() as ending:
    ending.step = lambda: {steps}
    {work}
"""
WAIT = 'print("ready", flush=True); time.sleep(60)'
STUBBORN = f"""try:
        {WAIT}
    finally:
        print("cleaning up", flush=True)
        time.sleep({{seconds}})"""


def command(work: str, steps: int = 0) -> subprocess.Popen[str]:
    code = COMMAND.format(work=work, steps=steps)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(running: subprocess.Popen[str], line: str) -> None:
    assert running.stdout is not None
    assert running.stdout.readline() == f"{line}\n"


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_says_where_and_has_a_shells_status(number: signal.Signals, code: int, name: str) -> None:
    running = command(WAIT, steps=3)
    said(running, "ready")
    running.send_signal(number)

    _, err = running.communicate(timeout=20)

    assert running.returncode == code
    assert err.splitlines()[-1] == f"lit-rl: stopped by {name} after 3 steps; nothing was left running"
    assert "Traceback" not in err


def test_a_second_signal_cuts_no_clean_up_short() -> None:
    running = command(STUBBORN.format(seconds=1))
    said(running, "ready")
    running.send_signal(signal.SIGINT)
    said(running, "cleaning up")
    began = time.monotonic()
    running.send_signal(signal.SIGTERM)

    _, err = running.communicate(timeout=20)

    assert time.monotonic() - began > 0.8
    assert running.returncode == 130
    assert err.splitlines()[-3:-1] == ["lit-rl: still stopping", ""]


def test_a_signal_after_the_last_line_says_nothing_more() -> None:
    slow_end = "import atexit; atexit.register(time.sleep, 1)\n    "
    running = command(slow_end + WAIT)
    said(running, "ready")
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    last = [running.stderr.readline(), running.stderr.readline()][-1]
    running.send_signal(signal.SIGINT)

    _, rest = running.communicate(timeout=20)

    assert last == "lit-rl: stopped by Ctrl-C before the first step was done; nothing was left running\n"
    assert (running.returncode, rest) == (130, "")


def test_the_third_signal_ends_a_run_that_cannot_be_stopped() -> None:
    running = command(STUBBORN.format(seconds=60))
    said(running, "ready")
    running.send_signal(signal.SIGINT)
    said(running, "cleaning up")
    running.send_signal(signal.SIGINT)
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)

    assert running.wait(10) == 130


def test_an_error_of_lit_rl_is_its_message_and_anything_else_a_traceback() -> None:
    ours, other = command("raise ServerError('no server there')"), command("raise ValueError('my own')")

    assert ours.communicate(timeout=20)[1] == "\nlit-rl: ServerError: no server there\n"
    assert ours.returncode == 1
    err = other.communicate(timeout=20)[1]
    assert err.startswith("Traceback") and err.splitlines()[-1] == "ValueError: my own"
    assert other.returncode == 1


def test_an_error_during_the_clean_up_is_told_too() -> None:
    running = command(f"try:\n        {WAIT}\n    finally:\n        raise ServerError('not so fast')")
    said(running, "ready")
    running.send_signal(signal.SIGINT)

    _, err = running.communicate(timeout=20)

    lines = [line for line in err.splitlines() if line]
    assert lines[0] == "lit-rl: ServerError: not so fast"
    assert lines[-1] == "lit-rl: stopped by Ctrl-C before the first step was done; nothing was left running"
    assert running.returncode == 130
