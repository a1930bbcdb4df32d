"""Groups of rollouts: assembled from survivors, with matching columns; a streak of failures ends the run."""

import pytest

from lit_rl import metrics
from lit_rl.errors import ServerError, ServerRefused
from lit_rl.rollout.groups import FailureStreak, FinishedRollout, PendingGroup
from lit_rl.types import DropReason, Position, Prompt, Rollout, TurnRecord

EOS = {2}


def finished(text, output_ids, finish_reason="stop"):
    turn = TurnRecord([1], output_ids, [-0.5] * len(output_ids), finish_reason=finish_reason)
    return FinishedRollout.of(Rollout(text, output_ids, [turn], rollout_id=text), EOS, seconds=2.0)


def pending(wanted=4):
    return PendingGroup(Prompt(Position(1, 3), 7, "the prompt", [1], {"answer": "A"}), 9, wanted, version=2)


def test_survivors_keep_the_columns_of_their_row():
    group = pending()
    group.finished |= {3: finished("d", [8, 2]), 0: finished("a", [5, 2]), 1: finished("b", [6, 2])}
    assert not group.complete
    group.failures[2] = ServerRefused("/x", 500, "boom")
    assert group.complete
    assembled = group.assemble()
    assert assembled.completions == ["a", "b", "d"]
    assert assembled.reward_kwargs == {"answer": ["A", "A", "A"]}
    assert assembled.completions_ids == [[5, 2], [6, 2], [8, 2]]
    assert (assembled.model_version, assembled.group_id, assembled.row_index, assembled.position) == (2, 9, 7, (1, 3))
    assert assembled.rollout_ids == ["a", "b", "d"]


def test_figures_count_survivors_and_failures():
    group = pending(3)
    group.finished |= {0: finished("a", [5, 2]), 1: finished("b", [5, 6, 7, 8], "length")}
    group.failures[2] = ServerRefused("/x", 500, "boom")
    stats = group.stats()
    metrics.merge_into({}, stats)
    assert metrics.values(stats) == {
        "rollout/failed_total": 1,
        "completions/mean_length": 3.0,
        "completions/min_length": 2,
        "completions/max_length": 4,
        "completions/clipped_ratio": 0.5,
        "rollout/duration_s": 2.0,
        "rollout/turns_mean": 1.0,
        "rollout/turns_max": 1,
        "rollout/samples_per_rollout": 1.0,
    }


def test_a_group_without_survivors_is_dropped_with_the_servers_words():
    group = pending(2)
    group.failures |= {0: ServerRefused("/x", 400, "prompt too long"), 1: ServerRefused("/x", 400, "prompt too long")}
    outcome = group.as_failed()
    assert (outcome.reason, outcome.position, outcome.row_index) == (DropReason.FAILED, Position(1, 3), 7)
    assert outcome.detail.count("prompt too long") == 1
    assert metrics.values(outcome.stats) == {"rollout/failed_total": 2}


def fail(streak, group_id, numbers):
    for number in numbers:
        streak.failed(group_id, number, ServerError("boom"))


def start(streak, group_id, numbers):
    for number in numbers:
        streak.started(group_id, number)


def test_when_everything_fails_the_run_ends_with_the_servers_words():
    streak = FailureStreak(limit=8)
    start(streak, 0, range(4))
    start(streak, 1, range(4))
    fail(streak, 0, range(4))
    with pytest.raises(ServerError, match="last 8 rollouts all failed; the last one: boom"):
        fail(streak, 1, range(4))


def test_one_bad_prompt_with_many_rollouts_does_not_end_the_run():
    streak = FailureStreak(limit=8)
    start(streak, 0, range(12))
    fail(streak, 0, range(12))


def test_a_success_between_ends_the_streak():
    streak = FailureStreak(limit=2)
    for group_id in range(5):
        start(streak, group_id, range(2))
        fail(streak, group_id, [0])
        streak.succeeded(group_id, 1)


def test_a_rollout_that_began_before_the_streak_may_still_prove_the_server_well():
    streak = FailureStreak(limit=4)
    start(streak, 7, [0])
    start(streak, 0, range(4))
    start(streak, 1, range(4))
    fail(streak, 0, range(4))
    fail(streak, 1, range(2))
    streak.succeeded(7, 0)
    fail(streak, 1, range(2, 4))


def test_a_streak_four_times_as_long_ends_the_run_in_any_case():
    streak = FailureStreak(limit=2)
    start(streak, 7, [0])
    start(streak, 0, range(8))
    with pytest.raises(ServerError, match="last 8 rollouts"):
        fail(streak, 0, range(8))
