"""The rollout process, really spawned, against a fake server: its way home, and every way it can end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_rl import metrics
from lit_rl.errors import (
    DataError,
    ProducerDied,
    ProducerError,
    ProducerSilent,
    RewardError,
    ServerError,
    SettingsError,
)
from lit_rl.rollout.handle import RolloutHandle
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.settings import EndpointSpec, Reward, RolloutSettings
from lit_rl.types import DroppedGroup, Position, RolloutReport, SampleGroup
from tests.fakes.server import GENERATE, Answer, FakeServer
from tests.process import rollout_examples as examples

ROWS = [{"prompt": f"question {i}?", "letter": "a"} for i in range(40)]
EOS = 1
START_S = 60.0
"""A child imports for some seconds, and longer on a busy machine."""


def answer(call):
    return Answer([10 + call.number % 5, *([11] * (call.number % 3)), EOS])


def handle_of(url, tokenizer, *rewards, rows=ROWS, evals=None, timeout=60.0, start=None, loop=None, **settings):
    options = {"num_generations": 4, "max_completion_length": 8, "max_retries": 0, "heartbeat_s": 0.1, **settings}
    return RolloutHandle(
        RolloutSettings(**options),
        EndpointSpec((url,), "fake-model", 10.0, generate_route=True),
        train=rows,
        evals=evals,
        rewards=[Reward(fn) for fn in rewards],
        tokenizer=tokenizer,
        eos_token_ids=[EOS],
        loop=loop,
        start=start,
        worker_timeout=timeout,
    )


def next_of(handle, kinds, timeout=START_S):
    """The next message of these kinds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        message = handle.get(0.5)
        if isinstance(message, kinds):
            return message
    raise TimeoutError(f"no {kinds} within {timeout} s")


def ends_with(handle, error, timeout=START_S):
    """The error that ``get`` raises; afterwards the child must be gone."""
    pid = handle.pid
    with pytest.raises(error) as raised:
        next_of(handle, (), timeout)
    handle.stop()
    assert is_gone(pid)
    return raised.value


def is_gone(pid, within=5.0):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
            return True
        time.sleep(0.05)
    return False


# --- a child that does well; the tests of this part share it and run in order


@pytest.fixture(scope="module")
def running(tiny_model):
    before = os.environ.get("RANK")
    os.environ["RANK"] = "0"
    with FakeServer(answer) as server:
        handle = handle_of(
            server.url,
            tiny_model,
            examples.by_length,
            f"{examples.__name__}.surroundings",
            evals={"held_out": ROWS[:3]},
            loop=f"{examples.__name__}:Bonus",
            loop_options={"bonus": 0.5},
            num_generations_eval=2,
            queue_maxsize=8,
            start=LedgerStart(0, 5, [Position(0, 2)]),
        )
        handle.start()
        assert os.environ.pop("RANK") == "0"
        assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        yield handle, server
        handle.stop()
    if before is not None:
        os.environ["RANK"] = before


def test_the_child_samples_nothing_before_the_first_weights(running):
    handle, server = running
    assert handle.get(1.0) is None
    assert server.generations == []
    assert handle.queue_size == 0
    handle.set_policy_version(1)
    first = next_of(handle, (SampleGroup, DroppedGroup))
    assert first.position == Position(0, 2)  # what was open comes first


def test_groups_come_whole_scored_and_stamped(running):
    handle, _ = running
    group = next_of(handle, SampleGroup)
    assert group.position.index >= 5
    assert group.version_first == 1
    assert len(group.samples) == 4
    # surroundings gives 1, the loop's bonus 0.5, by_length the length and thousandths for the rollout's place
    for place, sample in enumerate(group.samples):
        generated = int(sample.sequence.completion_mask.sum()) - 1
        assert sample.reward == pytest.approx(1.5 + generated + 0.001 * place)
    assert 0 <= time.time() - group.queued_at < 60
    assert metrics.values(group.stats)["rewards/surroundings/mean"] == 1.0
    assert metrics.values(group.stats)["rewards/rollout_reward/mean"] == 0.5


def test_a_full_queue_stops_generation_until_the_trainer_takes_samples(running):
    handle, server = running
    server.wait_for(lambda _: handle.queue_size == 8, timeout=20)
    time.sleep(0.5)
    asked = len(server.generations)
    time.sleep(0.5)
    assert len(server.generations) == asked
    assert handle.queue_size == 8
    next_of(handle, SampleGroup)
    server.wait_for(lambda s: len(s.generations) > asked, timeout=20)
    report = next_of(handle, RolloutReport)
    merged: metrics.Stats = {}
    while "rollout/backpressure_s" not in merged or metrics.values(merged)["rollout/backpressure_s"] == 0:
        metrics.merge_into(merged, report.stats)
        report = next_of(handle, RolloutReport)


def test_a_redispatched_position_comes_again(running):
    handle, _ = running
    handle.redispatch(Position(0, 3))
    for _ in range(60):
        if next_of(handle, SampleGroup).position == Position(0, 3):
            return
    raise AssertionError("it never came")


def test_an_evaluation_answers_though_the_queue_is_full(running):
    handle, server = running
    server.wait_for(lambda _: handle.queue_size >= 8, timeout=20)
    result = handle.evaluate("held_out", deadline_s=30)
    assert (result.name, result.prompts, result.rollouts, result.policy_version) == ("held_out", 3, 6, 1)
    assert result.func_rewards["surroundings"] == 1.0
    with pytest.raises(KeyError, match="held_out"):
        handle.evaluate("other", deadline_s=1)


def test_an_evaluation_that_takes_too_long_is_an_error_with_the_limit(running):
    handle, server = running
    server.script(GENERATE, delay=3.0)
    with pytest.raises(ProducerError, match=r"evaluation of 'held_out' .* more than 0\.5 s"):
        handle.evaluate("held_out", deadline_s=0.5)
    server.rules.clear()


def test_groups_are_stamped_with_the_version_of_their_start(running):
    handle, _ = running
    handle.set_policy_version(2)
    for _ in range(60):
        if next_of(handle, SampleGroup).version_first == 2:
            return
    raise AssertionError("no group of version 2 came")


def test_stopping_with_a_full_queue_leaves_nobody_behind(running):
    handle, server = running
    server.wait_for(lambda _: handle.queue_size >= 8, timeout=20)
    pid = handle.pid
    began = time.monotonic()
    handle.stop()
    assert is_gone(pid)
    assert time.monotonic() - began < 8
    handle.stop()
    with pytest.raises(ProducerError, match="not running"):
        handle.get(0.1)


# --- every way to end


def test_an_exception_of_a_reward_comes_home_with_its_traceback(tiny_model):
    with FakeServer(answer) as server:
        handle = handle_of(server.url, tiny_model, examples.raises)
        handle.set_policy_version(1)
        handle.start()
        error = ends_with(handle, RewardError)
    assert "'raises' raised ValueError('my reward is broken')" in str(error)
    assert "rollout_examples.py" in str(error)
    assert "Traceback" in str(error.__cause__) and isinstance(error.__cause__, ProducerDied)


def test_a_reward_that_ends_the_process_is_told_by_the_exit_code(tiny_model):
    with FakeServer(answer) as server:
        handle = handle_of(server.url, tiny_model, examples.exits)
        handle.start()
        handle.set_policy_version(1)
        assert "exit code 3" in str(ends_with(handle, ProducerDied))


def test_a_killed_child_is_noticed_at_once(tiny_model):
    handle = handle_of("http://127.0.0.1:9", tiny_model, examples.by_length)
    handle.start()
    time.sleep(0.5)
    os.kill(handle.pid, signal.SIGKILL)
    began = time.monotonic()
    assert "SIGKILL" in str(ends_with(handle, ProducerDied))
    assert time.monotonic() - began < 5


def test_a_blocked_event_loop_is_told_from_a_busy_one(tiny_model):
    with FakeServer(answer) as server:
        handle = handle_of(server.url, tiny_model, examples.blocks_the_event_loop, timeout=6.0)
        handle.start()
        handle.set_policy_version(1)
        error = ends_with(handle, ProducerSilent)
    assert "data.worker_timeout" in str(error)


def test_a_server_that_is_not_there_ends_the_run_with_its_address(tiny_model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        handle = handle_of(url, tiny_model, examples.by_length)
        handle.start()
        handle.set_policy_version(1)
        error = ends_with(handle, ServerError)
    assert "all failed" in str(error) and url in str(error)


def test_a_tokenizer_that_is_not_there_is_told_with_the_traceback(tmp_path):
    handle = handle_of("http://127.0.0.1:9", str(tmp_path / "nothing"), examples.by_length)
    handle.start()
    error = ends_with(handle, ProducerDied)
    assert "nothing" in str(error) and "Traceback" in str(error)


def test_a_long_reward_counts_as_busy_and_stopping_meanwhile_takes_seconds(tiny_model):
    with FakeServer(answer) as server:
        handle = handle_of(server.url, tiny_model, examples.hangs, timeout=6.0)
        handle.start()
        handle.set_policy_version(1)
        server.wait_for(lambda s: len(s.generations) >= 4, timeout=START_S)
        deadline = time.monotonic() + 7.0
        while time.monotonic() < deadline:
            assert isinstance(handle.get(0.5), RolloutReport | None)  # and no ProducerSilent
        pid, began = handle.pid, time.monotonic()
        handle.stop()
        assert is_gone(pid)
        assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rows": []}, DataError, "no rows"),
        ({"rows": [{"text": "x"}]}, DataError, "prompt"),
        ({"evals": {"held": []}}, DataError, r"data\.eval\.held"),
        ({"loop": "tests.process.rollout_examples.by_length"}, SettingsError, r"data\.loop"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_is_started(change, error, words):
    with pytest.raises(error, match=words):
        handle_of("http://127.0.0.1:9", "unused", examples.by_length, **change)


def test_a_lambda_is_refused_before_a_process_is_started():
    with pytest.raises(SettingsError, match="lambda"):
        handle_of("http://127.0.0.1:9", "unused", lambda completions, **_: [])


def test_rewards_may_be_missing_only_where_the_loop_gives_them():
    with pytest.raises(SettingsError, match=r"data\.rewards"):
        handle_of("http://127.0.0.1:9", "unused")
    handle_of("http://127.0.0.1:9", "unused", loop=examples.Bonus)


# --- a trainer that is a script


SCRIPT = """
import sys, time
{imports}
from lit_rl.rollout.handle import RolloutHandle
from lit_rl.settings import EndpointSpec, Reward, RolloutSettings
from lit_rl.types import SampleGroup
from tests.process.rollout_examples import surroundings

def mine(completions, **columns):
    return [float(i) for i in range(len(completions))]

if __name__ == "__main__":
    settings = RolloutSettings(num_generations=4, max_completion_length=8)
    handle = RolloutHandle(
        settings, EndpointSpec(({url!r},), "fake-model", generate_route=True), train=[{{"prompt": "a"}}] * 3,
        rewards=[Reward(fn) for fn in {rewards}], tokenizer={tokenizer!r}, eos_token_ids=[1],
    )
    handle.start()
    handle.set_policy_version(1)
    print(handle.pid, flush=True)
    while not {until}:
        pass
    print("a group came", flush=True)
    time.sleep({sleep})
"""


def run_script(tmp_path, url, tokenizer, *, imports, rewards, sleep, until="isinstance(handle.get(1.0), SampleGroup)"):
    (tmp_path / "marker_of_the_main_script.py").write_text("")
    script = tmp_path / "train.py"
    text = SCRIPT.format(url=url, tokenizer=tokenizer, imports=imports, rewards=rewards, sleep=sleep, until=until)
    script.write_text(text)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_child_of_a_killed_trainer_ends_and_never_imported_the_trainers_script(tmp_path, tiny_model):
    with FakeServer(answer) as server:
        trainer = run_script(
            tmp_path,
            server.url,
            tiny_model,
            imports="import marker_of_the_main_script",
            rewards="[surroundings]",
            until="handle.get(1.0) is not None",
            sleep=600,
        )
        try:
            child = int(trainer.stdout.readline())
            assert trainer.stdout.readline() == "a group came\n"  # the reward fails where the marker was imported
            trainer.kill()
            trainer.wait(10)
            assert is_gone(child, within=5)
        finally:
            trainer.kill()


def test_a_script_may_define_its_rewards_itself_and_ends_without_being_told_to_stop(tmp_path, tiny_model):
    with FakeServer(answer) as server:
        trainer = run_script(tmp_path, server.url, tiny_model, imports="", rewards="[mine]", sleep=0)
        try:
            child = int(trainer.stdout.readline())
            assert trainer.stdout.readline() == "a group came\n"
            assert trainer.wait(30) == 0
            assert is_gone(child)
        finally:
            trainer.kill()
