"""Every way in which a run can be ended: killed, interrupted, left alone. ``-s`` prints the table.

Each case is a whole ``lit-rl fit`` with its own server; two of them run at a time, and all of them before the first
test looks at its own.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rl.sync.gloo import GlooTransport
from tests.fakes.server import GENERATE, Call
from tests.fakes.worker import WeightServer
from tests.process.running import ENDS_S, HERE, End, Run, weight_server

Act = Callable[[Run, WeightServer], None]
REWARDS = "tests.process.rewards_of_tests"


@dataclass(frozen=True)
class Moment:
    """When it happens.

    A run that waits in the middle of a step, or fails by itself, says "now".

    Attributes:
        come: Whether the moment has come.
        rules: How the server holds it.
        config: How the run holds it.
        later: So many seconds after it has come.
    """

    come: Callable[[Run, WeightServer], Any]
    rules: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    later: float = 0.0


def asked(route: str, times: int) -> Callable[[Run, WeightServer], bool]:
    return lambda run, server: len(server.calls(route)) >= times


def sampled(times: int) -> Callable[[Run, WeightServer], bool]:
    return lambda run, server: sum(map(asks_for_tokens, server.calls(GENERATE))) >= times


def asks_for_tokens(call: Call) -> bool:
    """The question whether the route is there asks for no token."""
    return call.body.get("sampling_params", {}).get("max_tokens", 0) > 0


SLOW_STEP = {"trainer": {"callbacks": [{"class_path": f"{HERE}.SlowStep"}]}}
LAST_STEP = Moment(lambda run, server: run.said("`Trainer.fit` stopped"))
ITS_OWN = Moment(lambda run, server: run.said("now"))
IMPORTS = Moment(lambda run, server: True, later=2.0)
WAITS = Moment(asked("/health", 2), [{"route": "/health", "status": 503}])
SAMPLES = Moment(sampled(1), [{"route": GENERATE, "when": asks_for_tokens, "never": True}])
STEPS = Moment(lambda run, server: run.said("now"), config=SLOW_STEP)
PAUSES = Moment(asked("/pause", 2), [{"route": "/pause", "nth": {1}, "delay": 1.0}])
SYNCS = Moment(asked("/update_weights", 2), [{"route": "/update_weights", "nth": {1}, "never": True}])
SYNCS_AND_ENDS_SLOWLY = Moment(SYNCS.come, [*SYNCS.rules, {"route": "/resume", "nth": {1}, "delay": 2.0}])
EVALUATES = Moment(sampled(1), SAMPLES.rules, {"data": {"eval": {"fn": f"{HERE}.prompts"}}})
FULL = Moment(
    lambda run, server: run.said("now"),
    [{"route": GENERATE, "when": lambda call: call.number > 40, "never": True}],
    {
        "trainer": {"max_steps": 1, "callbacks": [{"class_path": f"{HERE}.SlowStep", "init_args": {"seconds": 5.0}}]},
        "data": {
            "rewards": [f"{REWARDS}.takes_half_a_second"],
            "queue_maxsize": 8,
            "score_queue_maxsize": 1,
            "max_concurrent_rollouts": 64,
        },
    },
)


def child(run: Run, server: WeightServer) -> None:
    pid = run.pid_of("spawn_main")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def launched_server(run: Run, server: WeightServer) -> None:
    pid = run.pid_of("vllm.entrypoints")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def external_server(run: Run, server: WeightServer) -> None:
    server.stop()


def trainer(run: Run, server: WeightServer) -> None:
    run.kill(signal.SIGKILL)


def ctrl_c(run: Run, server: WeightServer) -> None:
    run.ctrl_c()


def ctrl_c_twice(run: Run, server: WeightServer) -> None:
    """The second while the first is being obeyed: see ``SYNCS_AND_ENDS_SLOWLY``."""
    run.ctrl_c()
    run.wait_for(lambda: asked("/resume", 2)(run, server))
    run.ctrl_c()


def sigterm(run: Run, server: WeightServer) -> None:
    run.kill(signal.SIGTERM)


def nothing(run: Run, server: WeightServer) -> None:
    return


def reward(name: str, **data: Any) -> dict[str, Any]:
    return {"data": {"rewards": [f"{REWARDS}.{name}"]} | data}


def raising(hooks: list[str]) -> dict[str, Any]:
    callback = {"class_path": f"{HERE}.Raises", "init_args": {"hooks": hooks}}
    return {"trainer": {"callbacks": [callback], "max_steps": 1}}


EXPORT = {
    "trainer": {
        "max_steps": 1,
        "callbacks": [{"class_path": "lit_rl.callbacks.Export", "init_args": {"folder": "/dev/null/model"}}],
    }
}


@dataclass(frozen=True)
class Death:
    """One row of the table.

    Attributes:
        what: In words.
        moment: When.
        act: What is done.
        code: The run's exit code.
        says: Its last line, as a regular expression.
        launch: Whether the run launched its server; else it found one, which must be usable afterwards.
        config: What differs.
        rules: How the launched server is held at the moment; it lives in another process.
        forked: Whether imports are skipped.
    """

    what: str
    moment: Moment
    act: Act
    code: int
    says: str
    launch: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    rules: list[dict[str, Any]] = field(default_factory=list)
    forked: bool = True


KILLED_CHILD = r"ProducerDied: the rollout process was ended by signal 9, SIGKILL .* and left no traceback"
KILLED_SERVER = r"the server ended with exit code 137"
STOPPED = r"lit-rl: stopped by {} {}; nothing was left running"
NO_STEP, ONE_STEP = "before the first step was done", "after 1 step"
CTRL_C, SIGTERM = ("Ctrl-C", 130, ctrl_c), ("SIGTERM", 143, sigterm)

DEATHS = [
    Death("rollout process killed during a step", STEPS, child, 1, KILLED_CHILD, config=reward("leaves_a_process")),
    Death("rollout process killed while the trainer waits", SAMPLES, child, 1, KILLED_CHILD),
    Death("rollout process ends itself", ITS_OWN, nothing, 1, "ProducerDied: .* exit code 3", config=reward("exits")),
    Death(
        "rollout process hangs",
        Moment(sampled(8)),
        nothing,
        1,
        r"ProducerSilent: .* no sign of life for \d+ s; .* data\.worker_timeout sets the limit",
        config=reward("blocks_the_event_loop", worker_timeout=8.0),
    ),
    Death("trainer killed in a sync", SYNCS, trainer, -9, ""),
    Death("trainer killed during a step, launched server", STEPS, trainer, -9, "now", launch=True),
    Death("launched server killed during a step", STEPS, launched_server, 1, KILLED_SERVER, launch=True),
    Death(
        "launched server killed in a sync",
        Moment(lambda run, server: run.said("now"), later=2.0),
        launched_server,
        1,
        KILLED_SERVER,
        launch=True,
        rules=[{"route": "/update_weights", "nth": [1], "never": True}],
        config={"trainer": {"callbacks": [{"class_path": f"{HERE}.SlowStep", "init_args": {"seconds": 0.1}}]}},
    ),
    Death(
        "launched server killed while it loads",
        Moment(lambda run, server: run.pid_of("vllm.entrypoints")),
        launched_server,
        1,
        KILLED_SERVER + " before it was ready",
        launch=True,
        rules=[{"route": "/health", "status": 503}],
    ),
    Death("server gone while the trainer waits", SAMPLES, external_server, 1, "ServerError: .* all failed"),
    Death("server gone in a sync", SYNCS, external_server, 1, "SyncError: policy version 2 did not reach the server"),
    Death("Ctrl-C during the imports", IMPORTS, ctrl_c, -signal.SIGINT, "", forked=False),
    Death("Ctrl-C twice in a sync", SYNCS_AND_ENDS_SLOWLY, ctrl_c_twice, 130, STOPPED.format("Ctrl-C", ONE_STEP)),
    *(
        Death(f"{name} {when}", moment, act, code, STOPPED.format(name, steps), config=config)
        for name, code, act in (CTRL_C, SIGTERM)
        for when, moment, steps, config in (
            ("while the server loads", WAITS, NO_STEP, {}),
            ("during an evaluation", EVALUATES, NO_STEP, {}),
            ("during a step", STEPS, NO_STEP, reward("leaves_a_process")),
            ("while a sync pauses the server", PAUSES, ONE_STEP, {}),
            ("in a sync", SYNCS, ONE_STEP, {}),
        )
    ),
    Death("Ctrl-C during a step, launched server", STEPS, ctrl_c, 130, STOPPED.format("Ctrl-C", NO_STEP), launch=True),
    Death("SIGTERM, from the first import on", STEPS, sigterm, 143, STOPPED.format("SIGTERM", NO_STEP), forked=False),
    *(
        Death(
            f"an exception in a callback's {hook}",
            ITS_OWN,
            nothing,
            1,
            f"ZeroDivisionError: my {hook}",
            config=raising([hook]) | {"data": {"eval": {"fn": f"{HERE}.prompts"}}},
        )
        for hook in (
            *("setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end"),
            *("on_validation_end", "on_train_end", "on_fit_end", "teardown"),
        )
    ),
    Death(
        "an exception in a callback's on_exception",
        ITS_OWN,
        nothing,
        1,
        "ZeroDivisionError: my on_exception",
        config=raising(["on_train_start", "on_exception"]),
        launch=True,
        forked=False,
    ),
    Death("a checkpoint that cannot be written", LAST_STEP, nothing, 1, "NotADirectoryError: .*", config=EXPORT),
    Death("the last step, with every queue full", FULL, nothing, 0, ".*"),
]


@dataclass
class Seen:
    """What became of a run, and of its external server."""

    end: End
    trouble: str | None
    before_s: float


def happen(death: Death, model: str, folder: Path) -> Seen:
    with weight_server(model) as server:
        for rule in death.moment.rules:
            server.script(**rule)
        config = {key: death.moment.config.get(key, {}) | death.config.get(key, {}) for key in ("trainer", "data")}
        url = None if death.launch else server.url
        began = time.monotonic()
        with Run(folder, model, url, config, death.rules, death.forked) as run:
            run.wait_for(lambda: death.moment.come(run, server))
            time.sleep(death.moment.later)
            before_s = time.monotonic() - began
            death.act(run, server)
            end = run.end()
        lost = death.launch or death.act is external_server
        trouble = None if lost else trouble_with(server, told=death.act is not trainer)
        return Seen(end, trouble, before_s)


def trouble_with(server: WeightServer, told: bool) -> str | None:
    """What keeps the next run from using the server.

    Args:
        server: It.
        told: Whether the run could say goodbye; one that was killed leaves a pause to the next one.
    """
    server.rules.clear()
    if told and (server.weights.paused or server.weights.updating):
        return f"left as {server.weights}"
    weights = {"a": torch.ones(8)}
    transport = GlooTransport([server.url], timeout=10)
    transport.open([("a", torch.float32, (8,))])
    transport.push(weights.items(), 9)
    transport.close()
    arrived = torch.equal(server.weights_held["a"], weights["a"])
    return None if arrived and not server.weights.paused else "the next sync fails"


@pytest.fixture(scope="module")
def seen(
    tiny_model: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Seen]]]:
    chosen = [item.callspec.params.get("death") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        futures = {
            death.what: pool.submit(happen, death, tiny_model, tmp_path_factory.mktemp("death"))
            for death in DEATHS
            if any(death is other for other in chosen)
        }
        yield futures
    print("\n| death | exit code | seconds | last line |\n|---|---|---|---|")
    for what, future in futures.items():
        if future.exception() is None:
            end = future.result().end
            print(
                f"| {what} | {end.code} | {end.seconds:.1f} ({future.result().before_s:.0f}) | {end.last_line[:150]} |"
            )


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.what)
def test_it_ends_soon_with_clear_words_and_nothing_left(death: Death, seen: dict[str, Future[Seen]]) -> None:
    result = seen[death.what].result()
    end = result.end
    assert end.code == death.code, end.err
    assert end.left == []
    assert end.seconds < ENDS_S
    assert result.trouble is None
    words = "\n".join(end.err.rstrip().splitlines()[-25:])
    assert re.search(death.says, words), end.err
    if death.code in (130, 143):
        assert re.fullmatch(death.says, end.last_line) and "Traceback" not in end.err, end.err
