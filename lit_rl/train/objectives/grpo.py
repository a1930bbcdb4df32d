"""Stop 12: GRPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.errors import ProducerError
from lit_rl.maths.centering import OutOfBand, centered_surrogate
from lit_rl.maths.losses import Clipped, clipped_surrogate
from lit_rl.maths.normalize import LossAverage, row_loss, row_scale
from lit_rl.maths.ratios import log_ratio
from lit_rl.metrics import Max, Mean, Min, Stats
from lit_rl.settings import require
from lit_rl.tensors import PackedRow, StepTotals, TokenScores
from lit_rl.train.objectives.base import Objective, check_finite, ratio_stats


@dataclass(frozen=True)
class GRPO(Objective):
    """Group relative policy optimization (Shao et al. 2024) against the sampler.

    The old policy is the sampler: its processed log-probs are the denominator of the ratio, so staleness and the
    difference between the two engines are both corrected by it.

    Args:
        score_centering: Masked importance sampling less its expectation under the sampler, which takes the drift out
            of off-policy updates; else the clipped surrogate.
        importance_clip_min: Lower end of the band of ratios, with score centering; 0.5 where not given.
        importance_clip_max: Upper end; 5.0 where not given.
        num_sampler_logprobs: Most likely tokens of each position that the sampler is asked for, with score centering; 8
            where not given. More cover more of its probability and cost the server time.
        out_of_band: What becomes of a position whose token is outside the band: ``center`` keeps its expectation, which
            leaves no drift; ``drop`` leaves the position out. ``center`` where not given.
        epsilon: Lower clip of the importance ratio, without score centering; 0.2 where not given.
        epsilon_high: Upper clip; ``epsilon`` where not given.
        loss_average: ``step`` is the exact mean over the step's terms; ``micro_batch`` the mean of micro-batch means.
    """

    score_centering: bool = False
    importance_clip_min: float | None = None
    importance_clip_max: float | None = None
    num_sampler_logprobs: int | None = None
    out_of_band: OutOfBand | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    loss_average: LossAverage = "step"

    def __post_init__(self) -> None:
        centering = ("importance_clip_min", "importance_clip_max", "num_sampler_logprobs", "out_of_band")
        idle = ("epsilon", "epsilon_high") if self.score_centering else centering
        wanted = "false" if self.score_centering else "true"
        for name in idle:
            value = getattr(self, name)
            remedy = f"it would do nothing here; leave it out, or set model.objective.score_centering: {wanted}"
            require(f"model.objective.{name}", value, value is None, remedy)
        low, high = self.band
        require("model.objective.importance_clip_min", low, 0 <= low < 1, "give a bound in [0, 1)")
        require("model.objective.importance_clip_max", high, high > 1, "give a bound above 1")
        asked = self.num_sampler_logprobs
        some = asked is None or asked >= 1
        require("model.objective.num_sampler_logprobs", asked, some, "give a number of tokens, 1 or more")
        known = self.out_of_band in (None, "center", "drop")
        require("model.objective.out_of_band", self.out_of_band, known, "give center or drop")
        require("model.objective.epsilon", self.clip[0], 0 <= self.clip[0] < 1, "give a clip in [0, 1)")
        require("model.objective.epsilon_high", self.clip[1], self.clip[1] >= 0, "give a clip of 0 or more")

    @property
    def band(self) -> tuple[float, float]:
        """Ratios inside are weights, others are masked."""
        low, high = self.importance_clip_min, self.importance_clip_max
        return 0.5 if low is None else low, 5.0 if high is None else high

    @property
    def clip(self) -> tuple[float, float]:
        """Lower and upper clip of the ratio."""
        low = 0.2 if self.epsilon is None else self.epsilon
        return low, low if self.epsilon_high is None else self.epsilon_high

    @property
    def candidates(self) -> int:
        if not self.score_centering:
            return 0
        return 8 if self.num_sampler_logprobs is None else self.num_sampler_logprobs

    def row_loss(
        self, scores: TokenScores, row: PackedRow, totals: StepTotals, *, micro_batch: int, world_size: int
    ) -> tuple[Tensor, Stats]:
        check_finite(scores, row)
        ratios = log_ratio(scores.logprobs, row.terms.sampler_logprobs)
        if self.score_centering:
            per_term, own_stats = self._centered(ratios, scores, row)
        else:
            clipped = clipped_surrogate(ratios, row.terms.advantages, epsilon=self.clip[0], epsilon_high=self.clip[1])
            per_term, own_stats = clipped.loss, clip_stats(clipped, row)
        loss = row_loss(per_term, row_scale(totals, micro_batch, self.loss_average, world_size))
        return loss, {**ratio_stats(scores, row, ratios.detach()), **own_stats}

    def _centered(self, ratios: Tensor, scores: TokenScores, row: PackedRow) -> tuple[Tensor, Stats]:
        sets, of_sets = row.terms.candidates, scores.candidate_logprobs
        if len(row.terms) == 0:
            return scores.logprobs, {}
        if sets is None or sets.logprobs is None or of_sets is None or bool((sets.offsets.diff() == 0).any()):
            raise ProducerError(
                "model.objective.score_centering needs the sampler's most likely tokens, and trained tokens came "
                "without: give each TurnRecord its output_sampler_logprobs, or set it to false"
            )
        low, high = self.band
        centered = centered_surrogate(
            ratios,
            scores.logprobs,
            row.terms.advantages,
            of_sets,
            sets.logprobs,
            sets.terms,
            low=low,
            high=high,
            out_of_band=self.out_of_band or "center",
        )
        count = len(row.terms)
        return centered.loss, {
            "sampling/masked_mean": Mean(float(centered.masked.sum()), count),
            "sampling/sampler_mass": Mean(float(centered.sampler_mass.sum()), count),
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
