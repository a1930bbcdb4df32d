"""Stops 5 and 6: a group gets its rewards and advantages, and becomes samples or is dropped.

The total reward of a rollout is the weighted sum over the functions that scored it, plus ``Rollout.reward``; NaN where
nothing scored it. In the metrics each function's values appear unweighted. ``compute_advantages`` runs for every group;
whether a group is then dropped is decided by its rewards, never by its advantages.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lit_rl.errors import RewardError
from lit_rl.maths.advantages import all_equal, count_scored, population_std
from lit_rl.metrics import Mean, Stats
from lit_rl.rollout.reward_functions import RewardFunction
from lit_rl.types import DroppedGroup, DropReason, RolloutGroup, Sample, SampleGroup

ROLLOUT_REWARD = "rollout_reward"
"""The name under which ``Rollout.reward`` appears among the reward sources."""


@dataclass
class Scorer:
    """Gives groups their rewards and judges them.

    Attributes:
        functions: The reward functions.
        drop_equal_rewards: Whether groups with equal rewards are dropped (GRPO).
    """

    functions: list[RewardFunction]
    drop_equal_rewards: bool

    async def score(self, group: RolloutGroup) -> None:
        """Sets ``group.func_rewards`` and ``group.rewards``; the functions run side by side.

        Raises:
            RewardError: a function failed, or returned something unusable.
        """
        wanted = len(group.completions)
        calls = [function(wanted, reward_arguments(group)) for function in self.functions]
        values = await _all_or_first_error(calls)
        weighted = [(f.name, f.weight, v) for f, v in zip(self.functions, values, strict=True)]
        own = np.array([math.nan if r is None else float(r) for r in group.rollout_rewards])
        if np.isinf(own).any():
            raise RewardError(f"Rollout.reward is infinite in {group.rollout_rewards}; give finite numbers or None")
        if count_scored(own):
            weighted.append((ROLLOUT_REWARD, 1.0, own))
        group.func_rewards = {name: v for name, _, v in weighted}
        group.rewards = total_rewards([(weight, v) for _, weight, v in weighted], wanted)

    def judge(
        self, group: RolloutGroup, compute_advantages: Callable[[RolloutGroup], np.ndarray], stats: Stats
    ) -> SampleGroup | DroppedGroup:
        """Samples of a scored group, or why it is dropped.

        Args:
            group: With its rewards.
            compute_advantages: The loop's hook; called for every group.
            stats: Contributions of the group so far; those of its rewards are added.
        """
        assert group.rewards is not None
        advantages = checked_advantages(compute_advantages(group), group)
        samples = make_samples(group, advantages)
        reason = self._drop_reason(group.rewards, samples)
        stats = stats | reward_stats(group, kept=reason is None)
        if reason is not None:
            detail = f"rewards {[round(float(r), 6) for r in group.rewards]}"
            return DroppedGroup(group.position, group.row_index, reason, detail, dict(stats))
        return SampleGroup(
            position=group.position,
            group_id=group.group_id,
            row_index=group.row_index,
            version_first=group.model_version,
            samples=samples,
            stats=dict(stats),
            reward_group_std=population_std(group.rewards),
            func_group_stats=func_group_stats(group),
        )

    def _drop_reason(self, rewards: np.ndarray, samples: list[Sample]) -> DropReason | None:
        if count_scored(rewards) < 2:
            return DropReason.UNSCORABLE
        if self.drop_equal_rewards and all_equal(rewards):
            return DropReason.EQUAL_REWARDS
        # No rollout of it has a single trained token: there is nothing to score a gradient with.
        return None if samples else DropReason.FAILED


def reward_arguments(group: RolloutGroup) -> dict[str, list]:
    """What reward functions get by name: one entry per rollout in each list, copied so that they may be changed."""
    given: dict[str, list] = {name: list(values) for name, values in group.reward_kwargs.items()}
    given["prompts"], given["completions"] = list(group.prompts), list(group.completions)
    given["completion_ids"] = [list(ids) for ids in group.completions_ids]
    given["truncated"] = list(group.truncated)
    return given


def total_rewards(weighted: list[tuple[float, np.ndarray]], count: int) -> np.ndarray:
    """[count] float64: per rollout the weighted sum over the sources that scored it; NaN where none did.

    ``[(1, [1, None, 0, None]), (1, [None, None, 1, 0.5])]`` (None as NaN) gives ``[1, NaN, 1, 0.5]``.
    """
    total, scored = np.zeros(count), np.zeros(count, dtype=bool)
    for weight, values in weighted:
        here = ~np.isnan(values)
        total[here] += weight * values[here]
        scored |= here
    return np.where(scored, total, math.nan)


def checked_advantages(advantages: np.ndarray, group: RolloutGroup) -> np.ndarray:
    """[G] float64; raises RewardError unless the hook returned one finite number per rollout."""
    values, wanted = np.asarray(advantages, dtype=np.float64), len(group.completions)
    if values.shape != (wanted,):
        raise RewardError(f"compute_advantages returned shape {values.shape}; wanted ({wanted},), one per rollout")
    if not np.isfinite(values).all():
        raise RewardError(
            f"compute_advantages returned {values.tolist()} for rewards {group.rewards}; wanted finite ones"
        )
    return values


def make_samples(group: RolloutGroup, advantages: np.ndarray) -> list[Sample]:
    """One sample per sequence.

    A rollout that nothing scored and that got no advantage is left out: it must not move the policy, not even through
    a divergence term or a denominator.
    """
    assert group.rewards is not None
    samples = []
    for i, sequences in enumerate(group.completions_sequences):
        reward, advantage = float(group.rewards[i]), float(advantages[i])
        if math.isnan(reward) and advantage == 0.0:
            continue
        name, version = group.rollout_ids[i], group.model_version
        samples += [Sample(sequence, advantage, reward, name, group.group_id, version) for sequence in sequences]
    return samples


def reward_stats(group: RolloutGroup, *, kept: bool) -> Stats:
    """Contributions of a group's rewards; functions unweighted, None left out."""
    assert group.rewards is not None
    flat = count_scored(group.rewards) < 2 or all_equal(group.rewards)
    stats: Stats = {"reward": Mean.of(group.rewards), "frac_reward_zero_std": Mean(float(flat))}
    if kept:
        stats["reward_kept"] = Mean.of(group.rewards)
    return stats | {f"rewards/{name}/mean": Mean.of(values) for name, values in group.func_rewards.items()}


def func_group_stats(group: RolloutGroup) -> dict[str, tuple[float, float]]:
    """Per reward source mean and population standard deviation over the rollouts that it scored."""
    scored = {name: v for name, v in group.func_rewards.items() if count_scored(v)}
    return {name: (float(np.nanmean(v)), population_std(v)) for name, v in scored.items()}


def timed_stats(group: RolloutGroup, started: float) -> Stats:
    """How long the group waited for scoring, and how long that took; ``started`` is ``time.monotonic()``."""
    now = time.monotonic()
    return {"rollout/score_wait_s": Mean(started - group.queued_at), "rollout/score_s": Mean(now - started)}


async def _all_or_first_error(calls: list) -> list:
    """All results in order; at the first error the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
