"""Stop 6: rewards of a group become advantages. numpy, float64, pure."""

from __future__ import annotations

import numpy as np

STD_EPSILON = 1e-8
"""Added to the standard deviation (the asynchronous document's value)."""

_EQUAL_WITHIN = 1e-12


def count_scored(rewards: np.ndarray) -> int:
    """How many of [G] rewards are not NaN."""
    return int(np.count_nonzero(~np.isnan(rewards)))


def all_equal(rewards: np.ndarray) -> bool:
    """Whether the scored ones of [G] rewards are equal; True where none is scored.

    Equal means within a few float64 roundings of each other: 0.1 + 0.2 and 0.3 are equal. The rewards themselves are
    compared, not their standard deviation: the mean of eight times 0.1 is not 0.1, so the deviation is not 0.
    """
    scored = rewards[~np.isnan(rewards)]
    if scored.size == 0:
        return True
    return bool(np.ptp(scored) <= _EQUAL_WITHIN * np.abs(scored).max())


def group_standardised(rewards: np.ndarray) -> np.ndarray:
    """Rewards standardised within their group.

    ``(r - mean) / (std + 1e-8)`` with the population standard deviation, both over the scored rewards::

        [1, 0, 0, NaN]  ->  [1.414, -0.707, -0.707, 0]
        [0.1] * 8       ->  [0] * 8, exactly

    Args:
        rewards: [G] float64, NaN where a rollout could not be scored.

    Returns:
        [G] float64; 0 where the reward is NaN, and 0 everywhere where all scored rewards are equal.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(rewards)
    if all_equal(rewards):
        return advantages
    scored = ~np.isnan(rewards)
    values = rewards[scored]
    advantages[scored] = (values - values.mean()) / (values.std() + STD_EPSILON)
    return advantages


def population_std(rewards: np.ndarray) -> float:
    """Population standard deviation of the scored ones of [G] rewards; exactly 0 where they are equal or none is."""
    return 0.0 if all_equal(rewards) else float(np.nanstd(rewards))
