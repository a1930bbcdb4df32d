"""The registry of metrics: every name, its unit, how it is reduced, and what it means.

A contribution is a value that knows how to reduce: ``Mean`` keeps numerator and denominator apart, ``Sum`` adds,
``Max``/``Min`` keep the extreme, ``Last`` keeps the newest. Contributions travel in plain dictionaries from wherever
the number is born (rollout process, planner, module, callbacks) to the metrics callback, which merges them over a
logging window. Logging a name that is not registered raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Mean:
    """A ratio of two sums. ``Mean(total=6.0, count=3)`` is 2.0; nothing counted is no value."""

    total: float
    count: float = 1.0
    kind: ClassVar[str] = "mean"

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Mean of the values, NaN left out (a reward that nobody gave is no zero)."""
        kept = [float(v) for v in values if not math.isnan(v)]
        return cls(sum(kept), float(len(kept)))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Sum:
    """A counter: contributions of a window are added."""

    total: float
    kind: ClassVar[str] = "sum"

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest contribution."""

    extreme: float
    kind: ClassVar[str] = "max"

    def merge(self, other: Max) -> Max:
        return Max(max(self.extreme, other.extreme))

    def value(self) -> float | None:
        return self.extreme


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest contribution."""

    extreme: float
    kind: ClassVar[str] = "min"

    def merge(self, other: Min) -> Min:
        return Min(min(self.extreme, other.extreme))

    def value(self) -> float | None:
        return self.extreme


@dataclass(frozen=True, slots=True)
class Last:
    """The newest contribution (a gauge)."""

    newest: float
    kind: ClassVar[str] = "last"

    def merge(self, other: Last) -> Last:
        return other

    def value(self) -> float | None:
        return self.newest


Stat = Mean | Sum | Max | Min | Last
Stats = dict[str, Stat]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One line of the registry. A ``<...>`` part of the name stands for one path element chosen by the user."""

    name: str
    unit: str
    kind: str
    meaning: str

    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"<[^>]+>", r"[^/]+", re.escape(self.name).replace(r"\<", "<").replace(r"\>", ">")))


def _specs(*rows: tuple[str, str, str, str]) -> tuple[MetricSpec, ...]:
    return tuple(MetricSpec(*row) for row in rows)


REGISTRY: tuple[MetricSpec, ...] = _specs(
    # rewards
    ("reward", "reward", "mean", "mean total reward of all scored rollouts, groups that are then dropped included"),
    ("reward_kept", "reward", "mean", "mean total reward of the groups that are trained"),
    ("reward_group_std", "reward", "mean", "standard deviation of the reward within a trained sample's group"),
    ("frac_reward_zero_std", "fraction", "mean", "groups dropped: all rewards equal, or fewer than two scorable"),
    ("rewards/<func>/mean", "reward", "mean", "one reward function's mean over its scored rollouts"),
    ("rewards/<func>/group_std", "reward", "mean", "its standard deviation within a trained sample's group"),
    # completions
    ("completions/mean_length", "tokens", "mean", "generated tokens of a rollout, all turns"),
    ("completions/min_length", "tokens", "min", "shortest rollout"),
    ("completions/max_length", "tokens", "max", "longest rollout"),
    ("completions/clipped_ratio", "fraction", "mean", "rollouts cut off by `max_completion_length`"),
    # rollout
    ("rollout/duration_s", "s", "mean", "wall time of one rollout, from dispatch to collection"),
    ("rollout/generated_tok_s", "tokens/s", "mean", "generated tokens per second over the last interval"),
    ("rollout/concurrency", "rollouts", "mean", "rollouts in flight"),
    ("rollout/concurrency_cap", "rollouts", "last", "how many rollouts may be in flight now"),
    ("rollout/turns_mean", "turns", "mean", "turns of a conversation"),
    ("rollout/turns_max", "turns", "max", "most turns of a conversation"),
    ("rollout/samples_per_rollout", "samples", "mean", "training samples made from one conversation"),
    ("rollout/fork_frac", "fraction", "mean", "turn borders at which a new sequence began"),
    ("rollout/score_queue_size", "groups", "last", "finished groups waiting to be scored"),
    ("rollout/score_s", "s", "mean", "time to score a group"),
    ("rollout/score_wait_s", "s", "mean", "time that a group waited to be scored"),
    ("rollout/score_block_s", "s", "sum", "time that generation waited because the score queue was full"),
    ("rollout/backpressure_s", "s", "sum", "time that generation waited because the rollout queue was full"),
    ("rollout/vllm_retry_total", "requests", "sum", "requests to the server that were tried again"),
    ("rollout/dropped_total/<reason>", "groups", "sum", "groups that are not trained, by reason"),
    ("rollout/failed_total", "rollouts", "sum", "rollouts that failed for good"),
    # samples as they arrive
    ("sample/forwarded_tokens_mean", "tokens", "mean", "tokens of a sample: prompt, tool results, generated"),
    ("sample/forwarded_tokens_max", "tokens", "max", "the longest sample"),
    ("sample/trained_tokens_mean", "tokens", "mean", "tokens of a sample under the loss"),
    ("sample/rollout_queue_size", "samples", "last", "scored samples waiting in the queue"),
    ("sample/time_in_queue_s", "s", "mean", "how long a sample waited in the queue"),
    ("sample/staleness_mean", "versions", "mean", "policy version now minus the version of the group's first rollout"),
    ("sample/staleness_max", "versions", "max", "largest staleness of a sample"),
    ("sample/dropped_stale_total", "samples", "sum", "samples dropped because they were too stale"),
    # batch
    ("batch/samples_per_step", "samples", "mean", "samples of an optimizer step"),
    ("batch/groups_per_step", "groups", "mean", "distinct prompts of an optimizer step"),
    ("batch/forwarded_tokens_per_step", "tokens", "mean", "unique tokens forwarded in an optimizer step, all ranks"),
    ("batch/trained_tokens_per_step", "tokens", "mean", "loss terms of an optimizer step, all ranks"),
    ("batch/microbatches_per_step", "micro-batches", "mean", "micro-batches of an optimizer step, counted"),
    ("batch/masked_token_frac", "fraction", "mean", "forwarded tokens that are not trained"),
    ("batch/samples_per_row", "samples", "mean", "samples packed into a row"),
    ("batch/row_tokens_mean", "tokens", "mean", "unique tokens of a row"),
    ("batch/row_tokens_max", "tokens", "max", "unique tokens of the largest row"),
    ("batch/row_fill_frac", "fraction", "mean", "unique tokens of a row over the token budget"),
    (
        "batch/row_imbalance",
        "ratio",
        "mean",
        "largest over mean attention cost of a micro-batch's rows; 1 is best",
    ),
    ("batch/packing_ratio", "ratio", "mean", "raw tokens per forwarded token; 1 = nothing shared"),
    ("batch/pad_frac", "fraction", "mean", "padding that the scatter to ranks adds; removed before the forward"),
    ("batch/dropped_oversize_total", "samples", "sum", "samples dropped because they exceed the token budget"),
    ("batch/skipped_steps_total", "steps", "sum", "steps without anything to train; the optimizer did not move"),
    # policy
    ("loss", "loss", "mean", "the objective's loss, as minimised"),
    ("entropy", "nats", "mean", "entropy of the policy at the predicting positions"),
    ("kl", "nats", "mean", "divergence from the reference policy"),
    ("grad_norm", "norm", "mean", "gradient norm before clipping"),
    ("lr", "rate", "last", "learning rate of the first parameter group"),
    ("clip_ratio/low_mean", "fraction", "mean", "terms clipped below with a negative advantage"),
    ("clip_ratio/low_min", "fraction", "min", "smallest share of terms clipped below in a completion"),
    ("clip_ratio/high_mean", "fraction", "mean", "terms clipped above with a positive advantage"),
    ("clip_ratio/high_max", "fraction", "max", "largest share of terms clipped above in a completion"),
    ("clip_ratio/region_mean", "fraction", "mean", "terms clipped either way"),
    ("num_tokens", "tokens", "last", "unique tokens forwarded since training began"),
    # distance from the sampler
    ("sampling/importance_sampling_ratio/mean", "ratio", "mean", "policy over sampler probability of a trained token"),
    ("sampling/importance_sampling_ratio/min", "ratio", "min", "smallest such ratio"),
    ("sampling/importance_sampling_ratio/max", "ratio", "max", "largest such ratio"),
    ("sampling/sampling_logp_difference/mean", "nats", "mean", "absolute log-prob difference of a trained token"),
    ("sampling/sampling_logp_difference/max", "nats", "max", "largest such difference"),
    ("sampling/kl", "nats", "mean", "divergence of the policy from the sampler, estimated as (r - 1) - log r"),
    ("sampling/masked_mean", "fraction", "mean", "trained tokens whose ratio is outside the band of score centering"),
    ("sampling/sampler_mass", "fraction", "mean", "the sampler's probability of the candidates that it told"),
    # time
    ("perf/step_s", "s", "mean", "wall time between optimizer steps, everything included"),
    ("perf/fwd_bwd_s", "s", "mean", "forward and backward of a step"),
    ("perf/fwd_s", "s", "mean", "the forward part of it"),
    ("perf/optimizer_s", "s", "mean", "clipping and `optimizer.step()`"),
    ("perf/rollout_wait_s", "s", "mean", "time that the trainer waited for samples"),
    ("perf/weight_sync_s", "s", "mean", "one whole weight sync"),
    ("perf/weight_sync_pause_s", "s", "mean", "waiting for the server to pause"),
    ("perf/weight_sync_barrier_s", "s", "mean", "waiting for the other ranks"),
    ("perf/weight_sync_transfer_s", "s", "mean", "sending and loading the weights"),
    ("perf/weight_sync_receipt_s", "s", "mean", "proving that they arrived"),
    ("perf/forwarded_tok_s_fwd_bwd", "tokens/s", "mean", "forwarded tokens per second of forward and backward"),
    ("perf/forwarded_tok_s_wall_clock", "tokens/s", "mean", "forwarded tokens per second of the whole step"),
    ("perf/trained_tok_s_wall_clock", "tokens/s", "mean", "trained tokens per second of the whole step"),
    ("perf/mfu_fwd_bwd", "fraction", "mean", "operations of the model over those possible in forward and backward"),
    ("perf/mfu_wall_clock", "fraction", "mean", "the same over the whole step; both absent for unknown devices"),
    # sync
    ("sync/policy_version", "versions", "last", "completed weight syncs"),
    ("sync/receipt_error", "nats", "mean", "mean log-prob difference between server and trainer after a sync"),
    ("sync/receipt_moved", "nats", "mean", "how far the receipt's tokens moved in the step before that sync"),
    # evaluation
    ("eval/<set>/reward", "reward", "last", "mean total reward on held-out prompts"),
    ("eval/<set>/<func>", "reward", "last", "one reward function's mean on held-out prompts"),
)

_BY_NAME = {spec.name: spec for spec in REGISTRY}
_PATTERNS = tuple((spec.pattern(), spec) for spec in REGISTRY if "<" in spec.name)


def spec_of(name: str) -> MetricSpec:
    """The registry's line for ``name``; raises KeyError for a name that is not registered."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    for pattern, spec in _PATTERNS:
        if pattern.fullmatch(name):
            return spec
    raise KeyError(f"metric {name!r} is not registered; add it to lit_rl/metrics.py")


def merge_into(into: Stats, stats: Mapping[str, Stat]) -> None:
    """Merges contributions into a window, checking each against the registry.

    Raises:
        KeyError: a name is not registered.
        TypeError: a contribution's kind is not the registered one.
    """
    for name, stat in stats.items():
        spec = spec_of(name)
        if stat.kind != spec.kind:
            raise TypeError(f"metric {name!r} is registered as {spec.kind}, contributed as {stat.kind}")
        held = into.get(name)
        into[name] = stat if held is None else held.merge(stat)  # type: ignore[arg-type]


def values(stats: Mapping[str, Stat]) -> dict[str, float]:
    """The numbers of a window; a mean without anything counted is left out."""
    found = {name: stat.value() for name, stat in stats.items()}
    return {name: v for name, v in found.items() if v is not None}
