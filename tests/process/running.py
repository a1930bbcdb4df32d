"""A fit that runs in processes of its own, to be killed and interrupted at a moment that the test chooses."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
import yaml

from tests.fakes.server import Answer, Call
from tests.fakes.worker import WeightServer
from tests.process.command import FORKING, MARK, left_behind, marked, speak_into

HERE = "tests.process.running"
START_S = 120.0
"""Until the moment has come; a busy machine imports slowly."""
ENDS_S = 30.0
"""From a death to the end of the run."""

# ---- the run's own parts, named in its configuration ----------------------------------------------------------------


def prompts() -> list[dict[str, str]]:
    return [{"prompt": f"say {word}.", "letter": word[0]} for word in ("abc", "bcd", "cde", "def", "efg", "fgh")] * 4


class SlowStep(pl.Callback):
    """Computes for so many seconds at the beginning of a step, and says so.

    Args:
        step: Which one, counted from 1.
        seconds: For how long.
    """

    def __init__(self, step: int = 1, seconds: float = 3.0) -> None:
        self.step, self.seconds = step, seconds

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.step:
            print("now", file=sys.stderr, flush=True)
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                torch.ones(300, 300) @ torch.ones(300, 300)


class Raises(pl.Callback):
    """A user's callback with a mistake; it says when it makes it.

    Args:
        hooks: The hooks that raise.
    """

    def __init__(self, hooks: list[str]) -> None:
        for hook in hooks:
            setattr(self, hook, partial(self._raise, hook))

    def _raise(self, hook: str, *_: Any, **__: Any) -> None:
        print("now", file=sys.stderr, flush=True)
        raise ZeroDivisionError(f"my {hook}")


# ---- its server -----------------------------------------------------------------------------------------------------


def tokens(call: Call) -> Answer:
    """Letters, as many as it takes for the rewards of a group to differ, and the end token."""
    return Answer([3 + call.number % 5] * (1 + call.number % 4) + [1])


def weight_server(model: str, port: int = 0) -> WeightServer:
    return WeightServer(answer=tokens, model_name=model, max_model_len=512, port=port)


STAND_IN = f"""
from {HERE} import serve

serve()
"""
"""``vllm.entrypoints.openai.api_server``, where a run launches its server itself."""

RULES = "LIT_RL_TEST_RULES"
"""The stand-in's scripted misbehaviour, as JSON: the arguments of ``FakeServer.script``."""


def serve() -> None:
    """The stand-in: a fake server, with a process below it in a session of its own, as vLLM's engine core."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with weight_server(options.model, options.port) as server:
        for rule in json.loads(os.environ.get(RULES, "[]")):
            server.script(**rule)
        print("serving", flush=True)
        time.sleep(600)


# ---- the run --------------------------------------------------------------------------------------------------------


@dataclass
class End:
    """How a run ended.

    Attributes:
        code: Its exit code; minus the number of the signal that killed it; None where it had to be killed.
        seconds: From the death to the end.
        err: What it said on stderr.
        left: Processes that outlived it, as command lines.
    """

    code: int | None
    seconds: float
    err: str
    left: list[str]

    @property
    def last_line(self) -> str:
        """The last one that ``lit-rl`` says in its own name (lines of a server's log may follow), or of all."""
        lines = self.err.rstrip().splitlines() or [""]
        return next((line for line in reversed(lines) if line.startswith("lit-rl: ")), lines[-1]).strip()


class Run:
    """One ``lit-rl fit``, as a terminal starts it: in a process group of its own.

    Args:
        folder: Of its configuration and output.
        model: The checkpoint.
        url: Of its server; None launches the stand-in.
        config: What differs from the configuration below, by top-level key.
        rules: Of the stand-in.
        forked: From a process that has imported everything already; else ``python -m lit_rl`` from the start.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        url: str | None,
        config: dict[str, Any] | None = None,
        rules: list[dict[str, Any]] | None = None,
        forked: bool = True,
    ) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        engine = {"timeout": 60.0, "transfer_port": 0} | ({"url": url} if url else {"launch": True})
        full: dict[str, dict[str, Any]] = {
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "max_steps": 3,
                "default_root_dir": str(folder / "runs"),
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            },
            "model": {"pretrained": model, "gradient_checkpointing": False},
            "data": {
                "train": {"fn": f"{HERE}.prompts"},
                "rewards": ["tests.process.rewards_of_tests.share_of_letter"],
                "engine": {"class_path": "lit_rl.VLLMServer", "init_args": engine},
                "num_generations": 4,
                "samples_per_rank": 8,
                "token_budget": 0,
                "max_completion_length": 6,
            },
            "weight_sync": {"receipt": False},  # the fake server's answers come from no weights
        }
        for key, values in (config or {}).items():
            full[key] |= values
        (folder / "config.yaml").write_text(yaml.safe_dump(full))
        for package in (folder / "vllm", folder / "vllm" / "entrypoints", folder / "vllm" / "entrypoints" / "openai"):
            package.mkdir()
            (package / "__init__.py").touch()
        (package / "api_server.py").write_text(STAND_IN)
        self._err = folder / "stderr"
        self._rules = json.dumps(rules or [])
        self._start(["fit", "--config", str(folder / "config.yaml")], forked)

    def _start(self, args: list[str], forked: bool) -> None:
        path = os.pathsep.join([str(self.folder), str(Path(__file__).parents[2])])
        environment = {MARK: self.mark, RULES: self._rules, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if forked:
            process = FORKING.Process(target=_main, args=(args, environment, self.folder))
            process.start()
            assert process.pid is not None
            self._join: Callable[[float], object] = process.join
            self._code: Callable[[], int | None] = partial(getattr, process, "exitcode")
            self.pid = process.pid
        else:
            with self._err.open("wb") as err, (self.folder / "stdout").open("wb") as out:
                popen = subprocess.Popen(
                    [sys.executable, "-m", "lit_rl", *args],
                    env=os.environ | environment,
                    start_new_session=True,
                    stdout=out,
                    stderr=err,
                )
            self._join, self._code = partial(_wait, popen), popen.poll
            self.pid = popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._join(10.0)

    def said(self, words: str) -> bool:
        return self._err.exists() and words in self._err.read_text()

    def wait_for(self, condition: Callable[[], Any], seconds: float = START_S) -> None:
        """Until the moment has come; fails with what the run said when it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            text = self._err.read_text() if self._err.exists() else ""
            assert self._code() is None, f"it ended with {self._code()}:\n{text}"
            assert time.monotonic() < deadline, f"the moment never came:\n{text}"
            time.sleep(0.02)

    def ctrl_c(self) -> None:
        """What a terminal does: the whole foreground process group gets it."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def pid_of(self, words: str) -> int | None:
        """The process of this run whose command line has these words."""
        ours = marked(self.mark).items()
        return next((pid for pid, line in ours if words in line and "guard.py" not in line), None)

    def end(self) -> End:
        """Waits for it."""
        began = time.monotonic()
        self._join(ENDS_S + 10.0)
        seconds = time.monotonic() - began
        code = self._code()
        return End(code, seconds, self._err.read_text(), left_behind(self.mark))


def _wait(process: subprocess.Popen[bytes], limit: float) -> None:
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return


def _main(args: list[str], environment: dict[str, str], folder: Path) -> None:
    os.setsid()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    speak_into(folder / "stdout", folder / "stderr")
    from lit_rl.cli import main

    main(args)
