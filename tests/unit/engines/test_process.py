"""A launched server: how it starts, what is said when it does not, and that it never outlives the trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_rl.engines.plan import ServerPlan
from lit_rl.engines.process import ServerProcess, free_port
from lit_rl.errors import ServerError, SettingsError

# A server that ignores SIGTERM, with a child and an orphan in sessions of their own; each writes its process id.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); print(os.getpid(), flush=True); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", sleep])
subprocess.Popen([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}])"])
print(os.getpid(), flush=True)
time.sleep(300)
"""  # noqa: E501

# A trainer that starts it and then sleeps.
TRAINER = """
import sys, time
from pathlib import Path
from lit_rl.engines.plan import ServerPlan
from lit_rl.engines.process import ServerProcess
plan = ServerPlan("http://127.0.0.1:{port}", "m", (sys.executable, "-c", {script!r}), {{}})
ServerProcess(plan, Path({log!r}), grace=0.5).start()
time.sleep(300)
"""


def serving(script: str, log: Path, grace: float = 0.5) -> ServerProcess:
    plan = ServerPlan(f"http://127.0.0.1:{free_port()}", "m", (sys.executable, "-c", script), {"FROM_THE_PLAN": "yes"})
    return ServerProcess(plan, log, grace)


def process_ids(log: Path, count: int = 3) -> list[int]:
    """The ids that the stubborn server's processes wrote."""
    deadline = time.monotonic() + 20
    while len(found := log.read_text().split() if log.exists() else []) < count:
        assert time.monotonic() < deadline, f"{log} has {found}"
        time.sleep(0.05)
    return [int(word) for word in found]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.05)


def test_stop_ends_the_server_its_children_and_orphans_even_when_they_ignore_sigterm(tmp_path: Path) -> None:
    server = serving(STUBBORN, tmp_path / "log")
    server.start()
    pids = process_ids(tmp_path / "log")

    server.stop()
    server.stop()

    assert not any(alive(pid) for pid in pids)


def test_a_trainer_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    code = TRAINER.format(port=free_port(), script=STUBBORN, log=str(tmp_path / "log"))
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        pids = process_ids(tmp_path / "log")
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()

    wait_until_gone(pids, 10)


def test_the_server_dies_with_its_guard(tmp_path: Path) -> None:
    server = serving("import os, time; print(os.getpid(), flush=True); time.sleep(300)", tmp_path / "log")
    server.start()
    pids = process_ids(tmp_path / "log", count=1)

    assert server._guard is not None
    server._guard.kill()

    wait_until_gone(pids, 10)


def test_a_server_that_fails_to_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "print('loading'); raise ValueError('head_dim 16 is not supported')"
    server = serving(script, tmp_path / "log")
    server.start()

    with pytest.raises(ServerError, match="exit code 1") as caught:
        server.wait_ready(20)

    assert "head_dim 16 is not supported" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)


def test_the_cause_is_shown_though_twenty_lines_of_shutdown_follow_it(tmp_path: Path) -> None:
    script = "print('ValueError: no room for the cache'); [print('shutting down', n) for n in range(40)]; exit(3)"
    server = serving(script, tmp_path / "log")
    server.start()

    with pytest.raises(ServerError) as caught:
        server.wait_ready(20)

    lines = str(caught.value).splitlines()
    assert "  ValueError: no room for the cache" in lines
    assert len(lines) < 30


def test_a_server_that_is_not_ready_in_time_is_an_error_with_the_key(tmp_path: Path) -> None:
    server = serving("import time; print('still loading', flush=True); time.sleep(300)", tmp_path / "log")
    server.start()
    try:
        with pytest.raises(ServerError, match=r"not ready within 1 s \(data\.engine\.timeout\)"):
            server.wait_ready(1)
    finally:
        server.stop()


def test_waiting_is_visible(tmp_path: Path) -> None:
    server = serving("import time; print('loading weights', flush=True); time.sleep(300)", tmp_path / "log")
    server.start()
    seen: list[str] = []
    try:
        with pytest.raises(ServerError):
            server.wait_ready(1.5, progress=lambda waited, line: seen.append(line))
    finally:
        server.stop()

    assert seen[-1] == "loading weights"


def test_the_server_has_the_plans_environment_and_no_terminal(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['FROM_THE_PLAN'], repr(sys.stdin.read()), flush=True)"
    server = serving(script, tmp_path / "log")
    server.start()
    with pytest.raises(ServerError):
        server.wait_ready(20)

    assert (tmp_path / "log").read_text().split() == ["yes", "''"]


def test_how_vllm_uses_the_cpu_may_be_set_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    script = "import os; print(os.environ['VLLM_CPU_KVCACHE_SPACE'], os.environ['OMP_NUM_THREADS'], flush=True)"
    plan = ServerPlan(f"http://127.0.0.1:{free_port()}", "m", (sys.executable, "-c", script), env)
    server = ServerProcess(plan, tmp_path / "log")
    server.start()
    with pytest.raises(ServerError):
        server.wait_ready(20)

    assert (tmp_path / "log").read_text().split() == ["7", "2"]


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        server = ServerProcess(ServerPlan(url, "m", ("true",), {}), tmp_path / "log")

        with pytest.raises(SettingsError, match=rf"data\.engine\.url = '{url}'.*in use"):
            server.start()
    assert not (tmp_path / "log").exists()


def test_a_server_killed_by_a_signal_has_a_shells_exit_code(tmp_path: Path) -> None:
    server = serving(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", tmp_path / "log")
    server.start()

    with pytest.raises(ServerError, match="exit code 137"):
        server.wait_ready(20)


def test_ctrl_c_reaches_the_trainer_only(tmp_path: Path) -> None:
    server = serving("import os, time; print(os.getpid(), flush=True); time.sleep(300)", tmp_path / "log")
    server.start()
    pid = process_ids(tmp_path / "log", count=1)[0]

    assert os.getpgid(pid) != os.getpgid(0)
    server.stop()
