"""Stop 11: which attention calls cover a row: rectangles of (queries x keys), each a pair of slices, no gather.

In depth-first order the places that see a segment's keys are one slice: the segment's own places and, right behind
them, its whole subtree. So one call for each segment covers a row. Two refinements:

- A call costs about as much as a thousand (query, key) pairs, so a small subtree, or small siblings side by side, are
  covered by one square call under a dense mask where that is cheaper.
- Under a sliding window that is shorter than the longest sample, segments are cut into pieces no longer than the
  window, queries are cut off where nothing below sees the piece any more, and the rest is masked by depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.policy.tree_attention.plan import TreePlan


class Costs(NamedTuple):
    """What the kernel charges, in (query, key) pairs; measured on the CPU kernel.

    Attributes:
        call: A call beside its pairs.
        merge: A merge of partial results.
        merge_row: Each query that takes part in a merge.
        piece: Pieces under a short sliding window are not cut smaller than this many tokens.
    """

    call: int = 1000
    merge: int = 600
    merge_row: int = 10
    piece: int = 128


CPU_COSTS = Costs()


class Block(NamedTuple):
    """One call: queries ``begin : cover`` against keys ``begin : end``.

    Attributes:
        begin: First key and first query.
        end: End of the keys. Queries from here on are descendants; calls further down cover them too.
        cover: End of the queries.
        mask: [cover - begin, end - begin] added to the scores; None = causal, aligned top-left, so that own places see
            their past and descendants see everything.
        blind: [cover - begin] True for queries that see no key of the block; None = there are none.
    """

    begin: int
    end: int
    cover: int
    mask: Tensor | None = None
    blind: Tensor | None = None


class _Run(NamedTuple):
    """A segment or a piece of one, or a subtree or siblings that one square call covers (``end == tail``)."""

    begin: int
    end: int
    tail: int
    square: bool
    cost: int
    below: tuple[_Run, ...] = ()


def blocks(plan: TreePlan, window: int | None, dtype: torch.dtype, costs: Costs = CPU_COSTS) -> list[Block]:
    """The calls of a row, a parent's before its children's.

    Args:
        plan: The row.
        window: Sliding window, where it is shorter than the row's longest sample; else None.
        dtype: Of the masks.
        costs: What to weigh calls by.
    """
    starts, parents = plan.layout.segment_starts.tolist(), plan.layout.segment_parents.tolist()
    ends, tails = starts[1:], plan.layout.subtree_ends.tolist()
    children: list[list[_Run]] = [[] for _ in range(len(parents) + 1)]
    for segment in range(len(parents) - 1, -1, -1):  # children stand behind their parent
        below = _joined(children[segment][::-1], costs)
        run = _covered(starts[segment], ends[segment], tails[segment], below, window, costs)
        children[parents[segment]].append(run)  # the roots gather at -1, the last entry
    found: list[Block] = []
    stack = list(_joined(children[-1][::-1], costs))[::-1]
    while stack:
        run = stack.pop()
        found.append(_block(plan, run, window, dtype))
        stack.extend(reversed(run.below))
    return found


def _covered(begin: int, end: int, tail: int, below: tuple[_Run, ...], window: int | None, costs: Costs) -> _Run:
    """The cheaper way to cover a subtree: one square call, or a call for the segment and others for what is below."""
    piece = end - begin if window is None else max(window, costs.piece)
    if end - begin > piece:
        cut = end - piece
        run = _covered(cut, end, tail, below, window, costs)
        while cut > begin:
            upper = max(begin, cut - piece)
            run = _cascaded(upper, cut, tail, (run,), costs)
            cut = upper
        return run
    square, cascaded = _square(begin, tail, costs), _cascaded(begin, end, tail, below, costs)
    return square if square.cost <= cascaded.cost else cascaded


def _square(begin: int, tail: int, costs: Costs) -> _Run:
    return _Run(begin, tail, tail, True, costs.call + (tail - begin) ** 2)


def _cascaded(begin: int, end: int, tail: int, below: tuple[_Run, ...], costs: Costs) -> _Run:
    cost = costs.call + (tail - begin) * (end - begin)
    if below:
        cost += costs.merge + costs.merge_row * (tail - end) + sum(run.cost for run in below)
    return _Run(begin, end, tail, not below, cost, below)


def _joined(siblings: list[_Run], costs: Costs) -> tuple[_Run, ...]:
    """Neighbours that one square call covers more cheaply than two."""
    kept: list[_Run] = []
    for run in siblings:
        if kept and kept[-1].square and run.square:
            both = _square(kept[-1].begin, run.tail, costs)
            if both.cost < kept[-1].cost + run.cost:
                kept[-1] = both
                continue
        kept.append(run)
    return tuple(kept)


def _block(plan: TreePlan, run: _Run, window: int | None, dtype: torch.dtype) -> Block:
    layout = plan.layout
    begin, end, cover = run.begin, run.end, run.tail
    keys = torch.arange(begin, end)
    depth = layout.position_ids
    if window is not None:
        seeing = (depth[begin:cover] - depth[end - 1] < window).nonzero()
        cover = max(end, begin + int(seeing[-1]) + 1)
    branches = end > int(plan.run_ends[begin])  # a square over more than one unbranched run
    near = window is None or int(depth[begin:cover].max() - depth[begin:end].min()) < window
    if near and not branches:
        return Block(begin, end, cover)
    queries = torch.arange(begin, cover)[:, None]
    seen = (queries >= keys) & (queries < plan.subtree_end_of_place[begin:end])
    if window is not None:
        seen &= depth[begin:cover, None] - depth[begin:end] < window
    blind = ~seen.any(1)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return Block(begin, end, cover, mask, blind if bool(blind.any()) else None)
