"""Records that hold tensors, and the axis letters used everywhere.

====== ==========================================================================================================
letter axis
====== ==========================================================================================================
N      unique tokens of a row (places in its depth-first layout)
S      segments of a row: maximal runs without a branch
M      loss terms of a row: (position, target) pairs; several may hang on one position
K      vocabulary entries of a row's sets, end to end: candidates of the sampler, or what truncated sampling kept
====== ==========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

_Record = TypeVar("_Record", bound=Any)


def _moved(record: _Record, device: torch.device | str) -> _Record:
    """The same frozen record with its tensors on ``device``."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    moved: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device, non_blocking=True)
        elif isinstance(value, TermSets):
            moved[name] = value.to(device)
    return replace(record, **moved)


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A prefix forest laid out depth-first, heavy child first.

    Segment s holds the rows ``segment_starts[s] : segment_starts[s + 1]``; all rows of its subtree are the contiguous
    rows ``segment_starts[s] : subtree_ends[s]``. A token at place q sees the tokens of its own segment up to itself and
    all tokens of the segments above.

    Example: the samples [1, 2, 3] and [1, 2, 4, 5] give token_ids [1, 2, 4, 5, 3], position_ids [0, 1, 2, 3, 2],
    segment_starts [0, 2, 4, 5], segment_parents [-1, 0, 0], subtree_ends [5, 4, 5].

    Attributes:
        token_ids: [N] int64.
        position_ids: [N] int64, depth in the tree.
        segment_starts: [S + 1] int64.
        segment_parents: [S] int64, -1 for a root.
        subtree_ends: [S] int64, exclusive.
    """

    token_ids: Tensor
    position_ids: Tensor
    segment_starts: Tensor
    segment_parents: Tensor
    subtree_ends: Tensor

    def to(self, device: torch.device | str) -> Self:
        return _moved(self, device)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True)
class TermSets:
    """A set of vocabulary entries for each loss term, end to end: term m has ``ids[offsets[m] : offsets[m + 1]]``.

    Attributes:
        offsets: [M + 1] int64.
        ids: [K] int64.
        logprobs: [K] float32, the sampler's log-prob of each; None where it is not told.
    """

    offsets: Tensor
    ids: Tensor
    logprobs: Tensor | None = None

    def to(self, device: torch.device | str) -> Self:
        return _moved(self, device)

    @property
    def terms(self) -> Tensor:
        """[K] int64, the loss term that each entry belongs to."""
        sizes = self.offsets.diff()
        every = torch.arange(len(sizes), device=sizes.device)
        return torch.repeat_interleave(every, sizes, output_size=len(self.ids))


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The (position, target) pairs of a row that are under the loss.

    Attributes:
        target_index: [M] int64, place in N whose prediction is scored.
        target_ids: [M] int64, the token that was sampled there.
        sampler_logprobs: [M] float32, the sampler's log-prob of it.
        advantages: [M] float32.
        sample_index: [M] int64, which sample of the row the term belongs to (0 ... samples - 1).
        candidates: The sampler's most likely tokens with their log-probs; None = not asked for.
        kept: What truncated sampling could have chosen, the target included; an empty set, or None for all terms, is
            the whole vocabulary.
    """

    target_index: Tensor
    target_ids: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    sample_index: Tensor
    candidates: TermSets | None = None
    kept: TermSets | None = None

    def to(self, device: torch.device | str) -> Self:
        return _moved(self, device)

    def __len__(self) -> int:
        return self.target_ids.numel()


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Stop 9: what one rank forwards in one micro-batch.

    A row without samples (``terms`` of length 0, one token in ``tree``) is legal: it weighs nothing and keeps a rank in
    step with the others.

    Attributes:
        tree: The tokens and their tree.
        terms: The loss terms.
        sample_ids: Rollout id of each sample, for messages.
        group_ids: Group id of each sample.
        raw_tokens: Tokens of all samples before sharing.
        attention_pairs: Number of (query, key) pairs, the cost by which rows are balanced.
    """

    tree: TreeLayout
    terms: LossTerms
    sample_ids: tuple[str, ...] = ()
    group_ids: tuple[int, ...] = ()
    raw_tokens: int = 0
    attention_pairs: int = 0

    def to(self, device: torch.device | str) -> Self:
        return replace(self, tree=self.tree.to(device), terms=self.terms.to(device))


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts over all rows and ranks of one step: the denominators of the loss.

    Attributes:
        loss_terms: All loss terms of the step.
        samples: All samples of the step.
        groups: Distinct groups of the step.
        rows_per_rank: Rows that every rank runs.
        micro_batch_terms: Loss terms of each micro-batch, over all ranks (for ``loss_average: micro_batch``).
    """

    loss_terms: int
    samples: int
    groups: int
    rows_per_rank: int
    micro_batch_terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Stop 10: one item of the stream = one optimizer step, this rank's part.

    Attributes:
        rows: This rank's rows, one per micro-batch.
        totals: Counts over all ranks.
        policy_version: The version under which the step was planned.
        sample_versions: ``version_first`` of each sample of the step (only on rank 0); staleness counts from it.
        stats: Metric contributions (only on rank 0).
    """

    rows: tuple[PackedRow, ...]
    totals: StepTotals
    policy_version: int
    sample_versions: tuple[int, ...] = ()
    stats: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, rows=tuple(row.to(device) for row in self.rows))


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Stop 11: what the forward says of each loss term.

    Attributes:
        logprobs: [M] float32, log-prob of the target at the training temperature; carries the gradient. Normalised over
            the term's ``kept`` set where it has one, else over the vocabulary.
        entropy: [M] float32, entropy of the whole distribution at that place, detached.
        candidate_logprobs: [K] float32, the same as ``logprobs`` for the entries of the terms' ``candidates``.
    """

    logprobs: Tensor
    entropy: Tensor
    candidate_logprobs: Tensor | None = None
