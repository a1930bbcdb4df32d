"""Rewards are summed, groups are judged by their rewards, and figures never count a reward that nobody gave."""

import asyncio
import math

import numpy as np
import pytest

from lit_rl import metrics
from lit_rl.errors import RewardError
from lit_rl.maths.advantages import group_standardised
from lit_rl.rollout.reward_functions import RewardFunction
from lit_rl.rollout.scoring import Scorer, reward_arguments, total_rewards
from lit_rl.types import DroppedGroup, DropReason, Position, RolloutGroup, SampleGroup, Sequence

NAN = float("nan")


def sequence(*token_ids):
    n = len(token_ids)
    mask = np.array([False, *[True] * (n - 1)])
    return Sequence(np.array(token_ids), mask, np.full(n, -0.5, dtype=np.float32))


def group_of(count, *, rollout_rewards=None, sequences=None):
    return RolloutGroup(
        prompts=["p"] * count,
        reward_kwargs={"answer": ["A"] * count},
        completions=[f"c{i}" for i in range(count)],
        completions_ids=[[i] for i in range(count)],
        completions_sequences=sequences or [[sequence(1, 10 + i)] for i in range(count)],
        tool_call_counts=[0] * count,
        tool_failure_counts=[0] * count,
        model_version=3,
        group_id=5,
        row_index=2,
        env_rewards=[None] * count,
        rollout_rewards=rollout_rewards or [None] * count,
        position=Position(0, 2),
        rollout_ids=[f"r{i}" for i in range(count)],
        truncated=[False] * count,
    )


def run(*returns, weights=None, drop_equal=True, compute=None, group=None, names="fgh"):
    """Scores and judges a group with functions that return these values; the group and its outcome."""
    weights = weights or [1.0] * len(returns)
    functions = [
        RewardFunction(name, lambda values=values, **_: values, weight, 5.0)
        for name, values, weight in zip(names, returns, weights, strict=False)
    ]
    group = group or group_of(len(returns[0]))
    scorer = Scorer(functions, drop_equal)
    asyncio.run(scorer.score(group))
    outcome = scorer.judge(group, compute or (lambda g: group_standardised(g.rewards)), {})
    metrics.merge_into({}, outcome.stats)
    return group, outcome


def values(outcome):
    return metrics.values(outcome.stats)


def test_a_rollout_that_nobody_scored_trains_nothing_and_counts_in_no_mean():
    group, outcome = run([1, None, 0, None], [None, None, 1, 0.5])
    assert group.rewards.tolist()[0] == 1 and math.isnan(group.rewards[1])
    assert group.rewards[[0, 2, 3]].tolist() == [1.0, 1.0, 0.5]
    assert [sample.rollout_id for sample in outcome.samples] == ["r0", "r2", "r3"]
    assert [sample.advantage for sample in outcome.samples] == pytest.approx([0.7071, 0.7071, -1.4142], abs=1e-3)
    assert values(outcome)["reward"] == pytest.approx(2.5 / 3)
    assert values(outcome)["rewards/f/mean"] == 0.5
    assert values(outcome)["rewards/g/mean"] == 0.75


def test_one_function_alone_scores_half_of_the_group():
    _, outcome = run([1, None, 0, None])
    assert values(outcome)["reward"] == 0.5
    assert [sample.advantage for sample in outcome.samples] == pytest.approx([1.0, -1.0], abs=1e-6)


def test_a_group_that_nobody_could_score_is_dropped_and_leaves_no_nan_in_any_mean():
    _, outcome = run([None] * 4, [None] * 4)
    assert isinstance(outcome, DroppedGroup) and outcome.reason is DropReason.UNSCORABLE
    assert values(outcome) == {"frac_reward_zero_std": 1.0}


@pytest.mark.parametrize("scores", [[1.0, None, None], [NAN, NAN, 0.5]])
def test_a_group_with_fewer_than_two_scored_rollouts_is_dropped(scores):
    assert run(scores)[1].reason is DropReason.UNSCORABLE
    assert run(scores, drop_equal=False)[1].reason is DropReason.UNSCORABLE


@pytest.mark.parametrize(("reward", "count"), [(0.1, 8), (0.3, 6), (0.9, 3)])
def test_a_group_with_equal_rewards_is_dropped_and_counted_however_its_mean_is_rounded(reward, count):
    _, outcome = run([reward] * count)
    assert (outcome.reason, outcome.position, outcome.row_index) == (DropReason.EQUAL_REWARDS, Position(0, 2), 2)
    assert values(outcome)["frac_reward_zero_std"] == 1.0
    assert values(outcome)["reward"] == pytest.approx(reward)
    assert "reward_kept" not in outcome.stats


def test_an_objective_without_that_rule_keeps_a_group_with_equal_rewards():
    _, outcome = run([0.1] * 4, drop_equal=False)
    assert [sample.advantage for sample in outcome.samples] == [0.0] * 4
    assert values(outcome)["frac_reward_zero_std"] == 1.0


def test_the_drop_looks_at_rewards_and_not_at_advantages_which_are_computed_for_every_group():
    seen = []

    def compute(group):
        seen.append(group.rewards.tolist())
        return np.arange(len(group.rewards), dtype=float)

    assert isinstance(run([0.5, 0.5], compute=compute)[1], DroppedGroup)
    assert isinstance(run([0.5, 0.6], compute=lambda g: np.zeros(2))[1], SampleGroup)
    assert seen == [[0.5, 0.5]]


def test_weights_act_in_the_sum_and_not_in_a_functions_own_mean():
    group, outcome = run([1.0, 0.0], [0.5, 0.5], weights=[2.0, -1.0])
    assert group.rewards.tolist() == [1.5, -0.5]
    assert values(outcome)["rewards/f/mean"] == 0.5 and values(outcome)["rewards/g/mean"] == 0.5


def test_a_reward_found_while_generating_is_added():
    group, outcome = run([1.0, 0.0], group=group_of(2, rollout_rewards=[0.25, None]))
    assert group.rewards.tolist() == [1.25, 0.0]
    assert values(outcome)["rewards/rollout_reward/mean"] == 0.25


def test_a_rollouts_own_reward_is_enough():
    group = group_of(2, rollout_rewards=[1.0, 0.0])
    scorer = Scorer([], drop_equal_rewards=True)
    asyncio.run(scorer.score(group))
    assert group.rewards.tolist() == [1.0, 0.0]


def test_each_sequence_of_a_rollout_is_a_sample_with_its_advantage():
    sequences = [[sequence(1, 2), sequence(1, 3)], [sequence(1, 4)]]
    _, outcome = run([1.0, 0.0], group=group_of(2, sequences=sequences))
    assert [(s.rollout_id, int(s.sequence.token_ids[1])) for s in outcome.samples] == [("r0", 2), ("r0", 3), ("r1", 4)]
    assert [s.advantage for s in outcome.samples] == pytest.approx([1.0, 1.0, -1.0], abs=1e-6)
    assert {(s.group_id, s.version_first) for s in outcome.samples} == {(5, 3)}


def test_a_group_without_a_trained_token_is_dropped():
    assert run([1.0, 0.0], group=group_of(2, sequences=[[], []]))[1].reason is DropReason.FAILED


def test_a_kept_group_carries_its_deviations():
    _, outcome = run([1.0, 3.0], [None, 5.0])
    assert outcome.reward_group_std == 3.5
    assert outcome.func_group_stats == {"f": (2.0, 1.0), "g": (5.0, 0.0)}
    assert (outcome.version_first, outcome.group_id, outcome.position) == (3, 5, Position(0, 2))
    assert values(outcome)["reward_kept"] == 4.5


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 1)), np.array([0.0, NAN])])
def test_a_hook_that_returns_other_than_one_finite_advantage_each_is_an_error(wrong):
    with pytest.raises(RewardError, match="compute_advantages"):
        run([1.0, 0.0], compute=lambda group: wrong)


def test_a_failing_function_stops_the_others_and_is_named():
    functions = [RewardFunction("bad", lambda **_: [1.0], 1.0, 5.0), RewardFunction("good", lambda **_: [1, 2], 1, 5)]
    with pytest.raises(RewardError, match="bad"):
        asyncio.run(Scorer(functions, True).score(group_of(2)))


def test_functions_get_lists_of_their_own():
    group = group_of(2)
    given = reward_arguments(group)
    given["completions"].append("x")
    given["completion_ids"][0].append(99)
    assert (group.completions, group.completions_ids) == (["c0", "c1"], [[0], [1]])
    assert sorted(given) == ["answer", "completion_ids", "completions", "prompts", "truncated"]


def test_a_total_is_missing_only_where_every_source_is():
    total = total_rewards([(1.0, np.array([1.0, NAN, 0.0, NAN])), (1.0, np.array([NAN, NAN, 1.0, 0.5]))], 4)
    assert total.tolist()[:1] + total.tolist()[2:] == [1.0, 1.0, 0.5] and math.isnan(total[1])
