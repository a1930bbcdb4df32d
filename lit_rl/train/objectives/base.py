"""Stop 12: what every objective is, and the figures that all of them report."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_rl.errors import NonFiniteError
from lit_rl.maths.ratios import sampler_kl
from lit_rl.metrics import Max, Mean, Min, Stats
from lit_rl.tensors import PackedRow, StepTotals, TokenScores


class Objective(ABC):
    """What is minimised. Subclasses are frozen dataclasses whose fields are the YAML options."""

    @property
    def drop_equal_rewards(self) -> bool:
        """Whether a group whose rewards are all equal is dropped: with advantages of 0 it would move nothing."""
        return True

    @property
    def candidates(self) -> int:
        """How many of the sampler's most likely tokens each loss term needs; 0 = none."""
        return 0

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
