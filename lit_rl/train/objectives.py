"""Stop 12: what YAML names under ``model.objective``: small frozen classes that choose among the pure functions.

An objective turns the scores of one row into the row's share of the step's loss and its metric contributions. It also
states what it asks of the rest: whether groups of equal rewards are dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_rl.errors import NonFiniteError
from lit_rl.maths.losses import Clipped, clipped_surrogate
from lit_rl.maths.normalize import LossAverage, row_loss, row_scale
from lit_rl.maths.ratios import log_ratio, sampler_kl
from lit_rl.metrics import Max, Mean, Min, Stats
from lit_rl.settings import require
from lit_rl.tensors import PackedRow, StepTotals, TokenScores


class Objective(ABC):
    """What is minimised. Subclasses are frozen dataclasses whose fields are the YAML options."""

    drop_equal_rewards: ClassVar[bool] = True
    """Whether a group whose rewards are all equal is dropped instead of trained."""

    @abstractmethod
    def row_loss(
        self, scores: TokenScores, row: PackedRow, totals: StepTotals, *, micro_batch: int, world_size: int
    ) -> tuple[Tensor, Stats]:
        """The row's share of the step's loss (a scalar with gradient) and its metric contributions.

        Raises:
            NonFiniteError: a log-prob under the loss is NaN or infinite; names the sample.
        """


def check_finite(scores: TokenScores, row: PackedRow) -> None:
    """Raises NonFiniteError naming the first sample with a log-prob that is NaN or infinite on either side."""
    bad = ~(torch.isfinite(scores.logprobs.detach()) & torch.isfinite(row.terms.sampler_logprobs))
    if not bool(bad.any()):
        return
    term = int(bad.nonzero()[0])
    sample = row.sample_ids[int(row.terms.sample_index[term])]
    policy, sampler = float(scores.logprobs.detach()[term]), float(row.terms.sampler_logprobs[term])
    raise NonFiniteError(
        f"a trained token of rollout {sample} has policy log-prob {policy} and sampler log-prob {sampler} "
        f"(token id {int(row.terms.target_ids[term])}); nothing was trained "
        "on it. Look for a diverged policy (lower model.optimizer's lr) or a sampler that reports no log-prob."
    )


@dataclass(frozen=True)
class GRPO(Objective):
    """Group relative policy optimization (Shao et al. 2024) with the clipped surrogate against the sampler.

    The old policy is the sampler: its processed log-probs are the denominator of the ratio, so staleness and the
    difference between the two engines are both corrected by it.

    Args:
        epsilon: Lower clip of the importance ratio.
        epsilon_high: Upper clip; ``epsilon`` where not given.
        loss_average: ``step`` is the exact mean over the step's terms; ``micro_batch`` the mean of micro-batch means.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_average: LossAverage = "step"

    def __post_init__(self) -> None:
        require("model.objective.epsilon", self.epsilon, 0 <= self.epsilon < 1, "give a clip in [0, 1)")
        high_ok = self.epsilon_high is None or self.epsilon_high >= 0
        require("model.objective.epsilon_high", self.epsilon_high, high_ok, "give a clip of 0 or more")

    def row_loss(
        self, scores: TokenScores, row: PackedRow, totals: StepTotals, *, micro_batch: int, world_size: int
    ) -> tuple[Tensor, Stats]:
        check_finite(scores, row)
        ratios = log_ratio(scores.logprobs, row.terms.sampler_logprobs)
        clipped = clipped_surrogate(
            ratios,
            row.terms.advantages,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
        )
        scale = row_scale(totals, micro_batch, self.loss_average, world_size)
        loss = row_loss(clipped.loss, scale)
        return loss, {**ratio_stats(scores, row, ratios.detach()), **clip_stats(clipped, row)}


def ratio_stats(scores: TokenScores, row: PackedRow, log_ratios: Tensor) -> Stats:
    """Entropy and the distance from the sampler over the row's terms [M], before any clip."""
    count = len(row.terms)
    if count == 0:
        return {}
    ratio = log_ratios.exp()
    difference = (scores.logprobs.detach() - row.terms.sampler_logprobs).abs()
    sums = torch.stack([scores.entropy.sum(), ratio.sum(), difference.sum(), sampler_kl(log_ratios).sum()])
    extremes = torch.stack([ratio.min(), ratio.max(), difference.max()])
    (entropy, ratio_sum, difference_sum, kl), (low, high, furthest) = sums.tolist(), extremes.tolist()
    return {
        "entropy": Mean(entropy, count),
        "sampling/importance_sampling_ratio/mean": Mean(ratio_sum, count),
        "sampling/importance_sampling_ratio/min": Min(low),
        "sampling/importance_sampling_ratio/max": Max(high),
        "sampling/sampling_logp_difference/mean": Mean(difference_sum, count),
        "sampling/sampling_logp_difference/max": Max(furthest),
        "sampling/kl": Mean(kl, count),
    }


def clip_stats(clipped: Clipped, row: PackedRow) -> Stats:
    """Shares of clipped terms: over all terms, and the extremes over the row's samples."""
    count = len(row.terms)
    if count == 0:
        return {}
    low, high = clipped.low.float(), clipped.high.float()
    samples = len(row.sample_ids)
    per_sample = torch.zeros(3, samples, device=low.device)
    per_sample[0].index_add_(0, row.terms.sample_index, torch.ones_like(low))
    per_sample[1].index_add_(0, row.terms.sample_index, low)
    per_sample[2].index_add_(0, row.terms.sample_index, high)
    terms, lows, highs = per_sample[:, per_sample[0] > 0]
    return {
        "clip_ratio/low_mean": Mean(float(low.sum()), count),
        "clip_ratio/low_min": Min(float((lows / terms).min())),
        "clip_ratio/high_mean": Mean(float(high.sum()), count),
        "clip_ratio/high_max": Max(float((highs / terms).max())),
        "clip_ratio/region_mean": Mean(float(low.sum() + high.sum()), count),
    }
