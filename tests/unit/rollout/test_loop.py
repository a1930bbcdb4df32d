"""The rollout loop against a fake server: hooks, groups, epochs, failures, evaluation."""

import asyncio

import numpy as np
import pytest

from lit_rl import metrics
from lit_rl.errors import DataError, ProducerError, RewardError, ServerError
from lit_rl.rollout import loop as loop_module
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.rollout.loop import RolloutLoop
from lit_rl.rollout.wires import Evaluate, Redispatch
from lit_rl.types import DropReason, EvalResult, Position, Rollout
from tests.fakes.server import GENERATE, Answer, FakeServer
from tests.unit.rollout.driving import EOS, TOKENIZER, Drive, text_ids

ROWS = [{"prompt": "first?", "answer": "A"}, {"prompt": "second?", "answer": "B"}]
CHAT_ROWS = [{"prompt": [{"role": "user", "content": "first?"}], "answer": "A"}]


def numbered(call):
    """Answers that differ from request to request: the number's last digit, and the end token."""
    return Answer([*text_ids(str(call.number % 10)), EOS])


def digit(completions, **columns):
    return [float(text) for text in completions]


def settled(count):
    return lambda drive: len(drive.home.outcomes) >= count


def test_a_prompt_becomes_a_group_of_samples():
    with FakeServer(numbered) as server:
        home = Drive(server, ROWS[:1], [digit], version=3, settings={"max_epochs": 1}).run(settled(1))
    (group,) = home.groups
    assert (group.position, group.row_index, group.version_first, group.group_id) == (Position(0, 0), 0, 3, 0)
    prompt = text_ids("first?")
    assert [s.sequence.token_ids.tolist()[: len(prompt)] for s in group.samples] == [prompt] * 4
    assert sorted(s.reward for s in group.samples) == [0.0, 1.0, 2.0, 3.0]
    for sample in group.samples:
        assert sample.sequence.token_ids.tolist()[len(prompt) :] == [*text_ids(str(int(sample.reward))), EOS]
        assert sample.sequence.completion_mask.tolist() == [False] * len(prompt) + [True, True]
        assert sample.advantage == pytest.approx((sample.reward - 1.5) / 1.25**0.5, abs=1e-6)
    assert len({s.rollout_id for s in group.samples}) == 4


def test_text_prompts_skip_the_template_and_give_rewards_strings():
    seen = []

    def look(prompts, completions, completion_ids, answer):
        seen.append((prompts[0], completions[0], len(completion_ids[0]), answer))
        return [0.0, 1.0, 2.0, 3.0]

    with FakeServer(lambda call: Answer([*text_ids("ok"), EOS])) as server:
        Drive(server, ROWS[:1], [look], settings={"max_epochs": 1}).run(settled(1))
        assert server.generations[0].prompt_ids == text_ids("first?")
    assert seen == [("first?", "ok", 3, ["A"] * 4)]


def test_message_prompts_go_through_the_template_and_give_rewards_message_lists():
    seen = []

    def look(prompts, completions, **_):
        seen.append((prompts[0], completions[0]))
        return [0.0, 1.0, 2.0, 3.0]

    with FakeServer(lambda call: Answer([*text_ids("ok"), EOS])) as server:
        Drive(server, CHAT_ROWS, [look], settings={"max_epochs": 1}).run(settled(1))
        assert TOKENIZER.decode(server.generations[0].prompt_ids) == "user\nfirst?</s>\nassistant\n"
    assert seen == [([{"role": "user", "content": "first?"}], [{"role": "assistant", "content": "ok"}])]


def test_nothing_is_sampled_before_the_first_weights_have_arrived():
    drive_time = {"ticks": 0}

    def later(drive):
        drive_time["ticks"] += 1
        if drive_time["ticks"] == 20:
            assert drive.server.generations == []
            drive.version = 1
        return bool(drive.home.outcomes)

    with FakeServer(numbered) as server:
        home = Drive(server, ROWS, [digit], version=0, settings={"max_epochs": 1}).run(later)
    assert home.groups[0].version_first == 1


def test_epochs_end_and_a_redispatch_is_still_served():
    def asks_again(drive):
        if len(drive.home.outcomes) == 4 and not getattr(drive, "asked", False):
            drive.asked = True
            drive.loop.obey(Redispatch(Position(0, 1)))
        return len(drive.home.outcomes) >= 5

    with FakeServer(numbered) as server:
        home = Drive(server, ROWS, [digit], settings={"max_epochs": 2}).run(asks_again)
        assert len(server.generations) == 20
    positions = [outcome.position for outcome in home.outcomes]
    assert sorted(positions[:4]) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert positions[4] == (0, 1)


def test_a_resumed_run_asks_only_for_what_is_open():
    start = LedgerStart(1, 1, [Position(0, 1)])
    with FakeServer(numbered) as server:
        home = Drive(server, ROWS, [digit], start=start, settings={"max_epochs": 2}).run(settled(2))
        assert len(server.generations) == 8
    assert [outcome.position for outcome in home.outcomes] == [(0, 1), (1, 1)]


def test_a_finished_run_asks_for_nothing():
    with FakeServer(numbered) as server:
        ticks = iter(range(30))
        drive = Drive(server, ROWS, [digit], start=LedgerStart(1, 0), settings={"max_epochs": 1})
        drive.run(lambda _: next(ticks, None) is None)
        assert server.generations == []


def test_no_more_rollouts_are_in_flight_than_the_cap():
    with FakeServer(numbered, latency=0.01) as server:
        Drive(server, ROWS, [digit], settings={"max_concurrent_rollouts": 3, "max_epochs": 2}).run(settled(4))
        assert server.max_running == 3


def test_a_full_score_queue_stops_generation():
    release = asyncio.Event()

    async def slow(completions, **_):
        await release.wait()
        return [0.0, 1.0]

    ticks = {"calm": 0, "seen": -1}

    def calm(drive):
        now = len(drive.server.generations)
        ticks["calm"] = ticks["calm"] + 1 if now == ticks["seen"] else 0
        ticks["seen"] = now
        return ticks["calm"] > 60

    settings = {"num_generations": 2, "max_concurrent_rollouts": 2, "score_queue_maxsize": 1}
    with FakeServer(numbered) as server:
        Drive(server, ROWS, [slow], settings=settings).run(calm)
        # four groups are being scored, one waits, one is held by the rollout that wants to queue it, half of one more
        assert 12 <= len(server.generations) <= 14


class Curriculum(RolloutLoop):
    """The document's example: prompts that are solved are not sampled again."""

    def filter_prompt(self, row_index, row, epoch):
        self.calls.append((row_index, row["answer"], epoch))
        return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    async def setup(self):
        self.pass_rates, self.calls, self.closed = {}, [], False

    async def close(self):
        self.closed = True

    def compute_advantages(self, group):
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
        return super().compute_advantages(group)


def test_a_curriculum_can_be_written_with_the_hooks():
    def solved(completions, answer):
        return [float(wanted == "A") for wanted in answer]  # row 0 is solved by everybody: equal rewards, dropped

    settings = {"max_epochs": 2, "loop_options": {"pass_rate_cap": 0.9}, "max_concurrent_rollouts": 4}
    with FakeServer(numbered, latency=0.4) as server:  # time to score one group while the other is sampled
        drive = Drive(server, ROWS, [solved], loop_class=Curriculum, settings=settings)
        home = drive.run(settled(4))
    assert drive.loop.pass_rates == {0: 1.0, 1: 0.0}
    assert drive.loop.calls[:2] == [(0, "A", 0), (1, "B", 0)]
    rejected = [outcome.position for outcome in home.dropped if outcome.reason is DropReason.REJECTED]
    assert rejected == [(1, 0)]
    assert drive.loop.closed


class RejectsAll(RolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return False


def test_an_epoch_whose_prompts_are_all_rejected_ends_the_run():
    with FakeServer(numbered) as server, pytest.raises(DataError, match="rejected all 2 prompts of epoch 0"):
        Drive(server, ROWS, [digit], loop_class=RejectsAll).run(lambda _: False)


class TwoTurns(RolloutLoop):
    """Asks, adds a remark to the conversation, asks again; scores itself."""

    async def generate_one(self, prompt, tools, group_id=0):
        prompt.append({"role": "user", "content": "a change of one's own prompt must not reach the others"})
        prompt.pop()
        first = await self.generate_one_turn(self.encode(prompt))
        second = await self.generate_one_turn([*first.prompt_ids, *first.output_ids, 5])
        ids = first.output_ids + second.output_ids
        self.rollouts += 1
        return Rollout(TOKENIZER.decode(ids), ids, [first, second], reward=float(self.rollouts))

    async def setup(self):
        self.rollouts = 0


def test_requests_of_one_rollout_share_its_token_limit():
    settings = {"max_completion_length": 5, "max_epochs": 1}
    with FakeServer(lambda call: Answer(text_ids("abc"), finish_reason="stop")) as server:
        home = Drive(server, CHAT_ROWS, [], loop_class=TwoTurns, settings=settings).run(settled(1))
        assert sorted(call.sampling["max_tokens"] for call in server.generations) == [2] * 4 + [5] * 4
    (group,) = home.groups
    assert len(group.samples) == 4
    assert group.samples[0].sequence.completion_mask.sum() == 5
    assert metrics.values(group.stats)["rollout/turns_mean"] == 2.0
    assert metrics.values(group.stats)["rollout/fork_frac"] == 0.0


class ForgetsToReturn(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        await self.generate_one_turn(self.encode(prompt))


def test_a_hook_that_returns_no_rollout_is_named():
    with FakeServer(numbered) as server, pytest.raises(ProducerError, match="generate_one returned a NoneType"):
        Drive(server, ROWS, [digit], loop_class=ForgetsToReturn).run(lambda _: False)


class Buggy(Curriculum):
    def compute_advantages(self, group):
        raise KeyError("advantages")


def test_an_error_in_a_hook_ends_the_run_and_close_still_runs():
    with FakeServer(numbered) as server:
        drive = Drive(server, ROWS, [digit], loop_class=Buggy, settings={"loop_options": {"pass_rate_cap": 2.0}})
        with pytest.raises(KeyError, match="advantages"):
            drive.run(lambda _: False)
    assert drive.loop.closed


def test_a_failing_reward_ends_the_run():
    def wrong(completions, **_):
        return [1.0]

    with FakeServer(numbered) as server, pytest.raises(RewardError, match="'wrong' returned 1 values; wanted 4"):
        Drive(server, ROWS, [wrong]).run(lambda _: False)


def test_an_answer_that_ended_on_any_end_token_of_the_model_is_not_counted_as_cut():
    answers = [Answer([5, 6, 7]), Answer([5, 6, 2]), Answer([5, 6, 9], finish_reason="length"), Answer([5, 6, 7])]
    answers[3].finish_reason = "length"

    def score(completions, completion_ids, **_):
        return [float(ids[-1]) for ids in completion_ids]

    with FakeServer(lambda call: answers[call.number]) as server:
        drive = Drive(server, ROWS[:1], [score], eos=frozenset({2, 7}), settings={"max_epochs": 1})
        (group,) = drive.run(settled(1)).groups
    assert metrics.values(group.stats)["completions/clipped_ratio"] == 0.25
    assert all(sample.sequence.completion_mask[-1] for sample in group.samples)  # the end token is trained


# --- one failed request (case: survivors keep their columns, the run goes on)


def of_prompt(text):
    ids = text_ids(text)
    return lambda call: call.prompt_ids == ids


def score_first_letter(completions, answer):
    assert len(set(answer)) == 1
    return [float(i) + (10.0 if answer[0] == "B" else 0.0) for i in range(len(completions))]


def failing(when, status=500, body="boom", **settings):
    with FakeServer(numbered) as server:
        server.script(GENERATE, when=when, status=status, body=body)
        drive = Drive(server, ROWS, [score_first_letter], settings={"max_epochs": 1, **settings})
        return drive.run(settled(2)), server


def test_survivors_of_a_group_are_scored_with_the_matching_columns():
    hit = []

    def third_of_the_first_prompt(call):
        if not of_prompt("first?")(call):
            return False
        hit.append(call)
        return len(hit) in (3, 4, 5) and len(hit) < 5  # the third request of the prompt, and its second try

    home, _ = failing(third_of_the_first_prompt, max_concurrent_rollouts=1)
    by_row = {group.row_index: group for group in home.groups}
    assert [s.reward for s in by_row[0].samples] == [0.0, 1.0, 2.0]
    assert [s.reward for s in by_row[1].samples] == [10.0, 11.0, 12.0, 13.0]
    assert metrics.values(by_row[0].stats)["rollout/failed_total"] == 1


def test_a_group_of_which_nothing_is_left_is_dropped_and_the_other_is_untouched():
    home, server = failing(of_prompt("first?"), max_retries=2)
    (dropped,), (kept,) = home.dropped, home.groups
    assert (dropped.row_index, dropped.reason) == (0, DropReason.FAILED) and "boom" in dropped.detail
    assert (kept.row_index, len(kept.samples)) == (1, 4)
    assert sum(of_prompt("first?")(call) for call in server.generations) == 4 * 3


def test_a_prompt_that_the_server_refuses_is_not_tried_again():
    home, server = failing(of_prompt("first?"), status=400, body="prompt too long", max_retries=5)
    assert "prompt too long" in home.dropped[0].detail
    assert sum(of_prompt("first?")(call) for call in server.generations) == 4


def test_when_all_rollouts_fail_the_run_ends_with_the_servers_text():
    with pytest.raises(ServerError, match=r"all failed.*engine is dead"):
        failing(lambda call: True, body="engine is dead")


# --- evaluation


def evaluates(drive):
    if not getattr(drive, "asked", False):
        drive.asked = True
        drive.loop.obey(Evaluate("held_out"))
    return bool(drive.home.of(EvalResult))


HELD_OUT = [{"prompt": f"question {i}", "answer": str(i)} for i in range(5)]


def test_an_evaluation_scores_every_prompt_of_its_set():
    def right(completions, answer):
        return [float(answer[i] in "123") if i == 0 else None for i in range(len(completions))]

    def short(completions, **_):
        return [0.5] * len(completions)

    with FakeServer(numbered) as server:
        settings = {"max_epochs": 1, "num_generations_eval": 2}
        drive = Drive(
            server,
            ROWS,
            [right, short],
            evals={"held_out": HELD_OUT},
            version=7,
            start=LedgerStart(1, 0),
            settings=settings,
        )
        (result,) = drive.run(evaluates).of(EvalResult)
        assert len(server.generations) == 10
    assert (result.name, result.policy_version, result.prompts, result.rollouts) == ("held_out", 7, 5, 10)
    assert result.func_rewards == {"right": pytest.approx(0.6), "short": 0.5}
    assert result.reward == pytest.approx((3 + 5) / 10)
    metrics.merge_into({}, result.stats)
    assert metrics.values(result.stats)["eval/held_out/right"] == pytest.approx(0.6)


def test_no_training_rollout_starts_during_an_evaluation():
    with FakeServer(numbered, latency=0.02) as server:
        settings = {"num_generations": 2, "max_concurrent_rollouts": 2}
        drive = Drive(server, ROWS, [digit], evals={"held_out": HELD_OUT}, settings=settings)

        def first_some_training(drive):
            return len(drive.home.outcomes) >= 2 and evaluates(drive)

        drive.run(first_some_training)
        asked = [TOKENIZER.decode(call.prompt_ids).startswith("question") for call in server.generations]
    first, last = asked.index(True), len(asked) - 1 - asked[::-1].index(True)
    assert asked[first : last + 1].count(False) <= 2  # at most those that had been let in already


def test_an_evaluation_without_a_single_answer_is_an_error():
    with FakeServer(numbered) as server:
        server.script(GENERATE, status=400, body="no such luck")
        start, settings = LedgerStart(1, 0), {"max_epochs": 1}
        drive = Drive(server, ROWS, [digit], evals={"held_out": HELD_OUT}, start=start, settings=settings)
        with pytest.raises(ServerError, match=r"evaluation 'held_out' failed.*no such luck"):
            drive.run(evaluates)


def test_figures_that_belong_to_no_group_are_reported(monkeypatch):
    monkeypatch.setattr(loop_module, "REPORT_S", 0.05)
    with FakeServer(numbered, latency=0.01) as server:
        server.script(GENERATE, nth={0}, status=500)
        home = Drive(server, ROWS, [digit]).run(lambda drive: len(drive.home.reports) >= 4)
    merged: metrics.Stats = {}
    for report in home.reports:
        metrics.merge_into(merged, report.stats)
    found = metrics.values(merged)
    assert found["rollout/generated_tok_s"] > 0
    assert 0 < found["rollout/concurrency"] <= 8
    assert found["rollout/concurrency_cap"] == 8
    assert found["rollout/vllm_retry_total"] == 1
