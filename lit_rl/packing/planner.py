"""Stop 9: which sample goes into which row of one optimizer step.

All row slots of a step are open together (``ranks x micro_batches`` of them), so groups stay together and attention
cost is balanced over ranks and micro-batches before anything is forwarded. A planner is offered samples one at a time
and says what became of each; ``close`` stamps the step's totals, lays the rows out and starts the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from lit_rl.errors import PackingError
from lit_rl.metrics import Max, Mean, Stats, Sum
from lit_rl.packing.trie import Cursor, PrefixTrie, empty_row
from lit_rl.tensors import PackedRow, StepTotals
from lit_rl.types import Sample


class Verdict(Enum):
    """What became of an offered sample."""

    PLACED = "placed"
    FULL = "full"
    """The step is full; the sample was not taken and belongs to a later step."""
    OVERSIZE = "oversize"
    """No row could ever hold the sample: it is longer than the token budget. It is counted and forgotten."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step.

    Attributes:
        rows: ``[rank][micro_batch]``, the same number for every rank.
        totals: Counts over all rows.
        policy_version: The version under which the step was planned.
        sample_versions: ``version_first`` of each sample of the step.
        stats: The ``batch/*`` contributions.
    """

    rows: list[list[PackedRow]]
    totals: StepTotals
    policy_version: int
    sample_versions: tuple[int, ...]
    stats: Stats


class Planner(Protocol):
    """What the stream needs of a planner."""

    @property
    def samples(self) -> int:
        """Samples placed since the last step was closed."""

    @property
    def empty(self) -> bool:
        """Nothing was placed yet."""

    @property
    def full(self) -> bool:
        """The step takes no more samples, as far as the planner knows."""

    def offer(self, sample: Sample) -> Verdict:
        """Places the sample in the step that is being planned, or says why not."""

    def close(self, policy_version: int) -> StepPlan:
        """The step as planned; the planner is empty afterwards."""


class TokenBudgetPlanner:
    """Fills rows up to a number of unique tokens, and of loss terms.

    Loss terms count separately because a row of fully shared samples would otherwise never close. A sample goes to the
    row that holds its group where it fits there, else to the row with the least attention cost after taking it.

    Args:
        token_budget: Most unique tokens, and most loss terms, of a row.
        ranks: Data-parallel ranks.
        micro_batches: Rows of a rank in one step.
    """

    def __init__(self, token_budget: int, ranks: int, micro_batches: int) -> None:
        if min(token_budget, ranks, micro_batches) < 1:
            raise PackingError(f"{token_budget=}, {ranks=} and {micro_batches=} must all be at least 1")
        self.token_budget, self.ranks, self.micro_batches = token_budget, ranks, micro_batches
        self.oversize = 0
        self._begin()

    def _begin(self) -> None:
        self._tries = [PrefixTrie() for _ in range(self.ranks * self.micro_batches)]
        self._homes: dict[int, list[int]] = {}
        self._full = False
        self._samples = 0

    @property
    def samples(self) -> int:
        return self._samples

    @property
    def empty(self) -> bool:
        return self._samples == 0

    @property
    def full(self) -> bool:
        """True once a sample was refused: only an offer can tell that nothing fits any more."""
        return self._full

    def offer(self, sample: Sample) -> Verdict:
        """Places the sample, or says why not."""
        if len(sample.sequence.token_ids) > self.token_budget:
            self.oversize += 1
            return Verdict.OVERSIZE
        placed = self._at_home(sample) or self._elsewhere(sample)
        if placed is None:
            self._full = True
            return Verdict.FULL
        row, cursor = placed
        self._tries[row].insert(cursor)
        homes = self._homes.setdefault(sample.group_id, [])
        if row not in homes:
            homes.append(row)
        self._samples += 1
        return Verdict.PLACED

    def _at_home(self, sample: Sample) -> tuple[int, Cursor] | None:
        """The first row of the sample's group that still has space."""
        for row in self._homes.get(sample.group_id, ()):
            cursor = self._fitting(row, sample)
            if cursor:
                return row, cursor
        return None

    def _elsewhere(self, sample: Sample) -> tuple[int, Cursor] | None:
        """The row whose attention cost stays lowest among those with space."""
        best: tuple[int, Cursor] | None = None
        lowest = 0
        for row, trie in enumerate(self._tries):
            cursor = self._fitting(row, sample)
            if cursor and (best is None or trie.num_pairs + cursor.new_pairs < lowest):
                best, lowest = (row, cursor), trie.num_pairs + cursor.new_pairs
        return best

    def _fitting(self, row: int, sample: Sample) -> Cursor | None:
        trie = self._tries[row]
        cursor = trie.would_add(sample)
        tokens, terms = trie.num_tokens + cursor.new_tokens, trie.num_terms + cursor.new_terms
        return cursor if tokens <= self.token_budget and terms <= self.token_budget else None

    def close(self, policy_version: int) -> StepPlan:
        """The step as planned; the planner is empty afterwards.

        Rows of like cost run in the same micro-batch, since its slowest rank sets its time. Micro-batches without a
        sample are left out.

        Raises:
            PackingError: nothing was placed.
        """
        if self.empty:
            raise PackingError("a step without a sample was closed")
        tries = sorted((trie for trie in self._tries if trie.samples), key=lambda trie: -trie.num_pairs)
        micro_batches = [tries[at : at + self.ranks] for at in range(0, len(tries), self.ranks)]
        plan = _step_plan(micro_batches, self.ranks, policy_version, self.oversize, self.token_budget)
        self.oversize = 0
        self._begin()
        return plan


class FixedCountPlanner:
    """A fixed number of samples in each micro-batch, split over the ranks by attention cost.

    Samples of a group stay in one row, except where a rank would have no row otherwise.

    Args:
        samples_per_rank: Samples of a micro-batch over the number of ranks.
        ranks: Data-parallel ranks.
        micro_batches: Rows of a rank in one step.
    """

    def __init__(self, samples_per_rank: int, ranks: int, micro_batches: int) -> None:
        if min(samples_per_rank, ranks, micro_batches) < 1:
            raise PackingError(f"{samples_per_rank=}, {ranks=} and {micro_batches=} must all be at least 1")
        self.samples_per_rank, self.ranks, self.micro_batches = samples_per_rank, ranks, micro_batches
        self._samples: list[Sample] = []

    @property
    def samples(self) -> int:
        return len(self._samples)

    @property
    def empty(self) -> bool:
        return not self._samples

    @property
    def full(self) -> bool:
        return self.samples >= self.samples_per_rank * self.ranks * self.micro_batches

    def offer(self, sample: Sample) -> Verdict:
        """Takes the sample unless the step has all of its samples."""
        if self.full:
            return Verdict.FULL
        self._samples.append(sample)
        return Verdict.PLACED

    def close(self, policy_version: int) -> StepPlan:
        """The step as planned; the planner is empty afterwards.

        Raises:
            PackingError: nothing was taken.
        """
        if self.empty:
            raise PackingError("a step without a sample was closed")
        size = self.samples_per_rank * self.ranks
        micro_batches = [self._rows(self._samples[at : at + size]) for at in range(0, len(self._samples), size)]
        self._samples = []
        return _step_plan(micro_batches, self.ranks, policy_version, 0, None)

    def _rows(self, samples: list[Sample]) -> list[PrefixTrie]:
        """Longest processing time first: the costliest group to the row that has least so far."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample)
        parts = [(_pairs(group), group) for group in _at_least(self.ranks, list(groups.values()))]
        tries = [PrefixTrie() for _ in range(self.ranks)]
        for _, group in sorted(parts, key=lambda part: -part[0]):
            lightest = min(tries, key=lambda trie: trie.num_pairs)
            for sample in group:
                lightest.add(sample)
        return [trie for trie in tries if trie.samples]


def _at_least(ranks: int, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Halves the costliest group that can be halved until there is one part for each rank, where samples allow."""
    while len(groups) < ranks:
        splittable = [group for group in groups if len(group) > 1]
        if not splittable:
            break
        costliest = max(splittable, key=_pairs)
        groups = [group for group in groups if group is not costliest]
        half = len(costliest) // 2
        groups += [costliest[:half], costliest[half:]]
    return groups


def _pairs(samples: list[Sample]) -> int:
    """Attention cost of the samples in a row of their own."""
    trie = PrefixTrie()
    for sample in samples:
        trie.add(sample)
    return trie.num_pairs


def _step_plan(
    micro_batches: list[list[PrefixTrie]], ranks: int, policy_version: int, oversize: int, budget: int | None
) -> StepPlan:
    """Lays the rows out, fills absent ones with weightless rows, and stamps totals and figures."""
    tries = [trie for micro_batch in micro_batches for trie in micro_batch]
    by_micro_batch = [[trie.layout() for trie in micro_batch] for micro_batch in micro_batches]
    for rows in by_micro_batch:
        rows += [empty_row() for _ in range(ranks - len(rows))]
    samples = [sample for trie in tries for sample in trie.samples]
    totals = StepTotals(
        loss_terms=sum(trie.num_terms for trie in tries),
        samples=len(samples),
        groups=len({sample.group_id for sample in samples}),
        rows_per_rank=len(by_micro_batch),
        micro_batch_terms=tuple(sum(trie.num_terms for trie in micro_batch) for micro_batch in micro_batches),
    )
    return StepPlan(
        rows=[[rows[rank] for rows in by_micro_batch] for rank in range(ranks)],
        totals=totals,
        policy_version=policy_version,
        sample_versions=tuple(sample.version_first for sample in samples),
        stats=_stats(by_micro_batch, tries, totals, oversize, budget),
    )


def _stats(
    micro_batches: list[list[PackedRow]],
    tries: list[PrefixTrie],
    totals: StepTotals,
    oversize: int,
    budget: int | None,
) -> Stats:
    """The ``batch/*`` figures. Per-row figures count weightless rows too, so that rows times mean is the step's sum."""
    rows = [row for micro_batch in micro_batches for row in micro_batch]
    tokens = [row.tree.num_tokens for row in rows]
    forwarded = sum(tokens)
    shared = sum(trie.num_tokens for trie in tries)
    trained = sum(trie.trained_tokens for trie in tries)
    costs = [[row.attention_pairs for row in micro_batch] for micro_batch in micro_batches]
    stats: Stats = {
        "batch/samples_per_step": Mean(totals.samples),
        "batch/groups_per_step": Mean(totals.groups),
        "batch/forwarded_tokens_per_step": Mean(forwarded),
        "batch/trained_tokens_per_step": Mean(totals.loss_terms),
        "batch/microbatches_per_step": Mean(totals.rows_per_rank),
        "batch/masked_token_frac": Mean(forwarded - trained, forwarded),
        "batch/samples_per_row": Mean(totals.samples, len(rows)),
        "batch/row_tokens_mean": Mean(forwarded, len(rows)),
        "batch/row_tokens_max": Max(max(tokens)),
        "batch/row_imbalance": Mean.of(max(cost) * len(cost) / sum(cost) for cost in costs),
        "batch/packing_ratio": Mean(sum(trie.raw_tokens for trie in tries), shared),
        "batch/pad_frac": Mean(0.0, forwarded),
        "batch/dropped_oversize_total": Sum(oversize),
    }
    if budget is not None:
        stats["batch/row_fill_frac"] = Mean(forwarded, budget * len(rows))
    return stats
