"""Stop 11: which blocks of a row FlexAttention visits, straight from the tree's intervals: no [N, N] mask is made.

Place k is seen by the places ``k ... end[k] - 1``, so the extremes of a block decide. With queries ``first ... last``
and keys that all stand before them:

- some pair is visible where the keys' farthest end lies behind ``first``, for then ``first`` sees that key;
- all pairs are visible where the keys' nearest end lies behind ``last``.

A block on the diagonal holds visible pairs (a place sees itself) and invisible ones, unless it holds a single place;
blocks above it hold none. Under a sliding window depths must be near enough too. "All" stays exact then. "Some" is
asked of the blocks' extremes, so that a block without a visible pair may be listed as partial: that costs time, never
correctness, since partial blocks are masked pair by pair.

Memory: B blocks of 128 make [B, B] tables. A row keeps 4 of them in int32 for each window that its layers have: 4 MiB
at 64k tokens (B = 512), 1 GiB at 1M tokens (B = 8,192). Making them takes one and a half times that for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lit_rl.policy.tree_attention.plan import TreePlan

BLOCK = 128
"""Places in a block: what the kernels' tiles divide on every GPU."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Blocks(NamedTuple):
    """Which blocks hold visible pairs, each [B, B], a row for each block of queries; no block is in both.

    Attributes:
        partial: To be masked pair by pair.
        full: Every pair of existing places is visible.
    """

    partial: Tensor
    full: Tensor


def classified(plan: TreePlan, window: int | None, size: int = BLOCK) -> Blocks:
    """The blocks of a row.

    Args:
        plan: The row.
        window: Sliding window, where it cuts some sample of the row; else None.
        size: Places in a block; the last block may hold fewer.
    """
    tokens, ends, depth = plan.num_tokens, plan.subtree_end_of_place, plan.layout.position_ids
    block = torch.arange(-(-tokens // size), device=ends.device)
    first, behind = block * size, ((block + 1) * size).clamp(max=tokens)
    nearest_end, farthest_end = _extremes(ends, size)
    before = block[:, None] > block
    diagonal = block[:, None] == block
    some = diagonal | (before & (first[:, None] < farthest_end))
    full = (before & (behind[:, None] <= nearest_end)) | (diagonal & (behind - first == 1))
    if window is not None:
        least, most = _extremes(depth, size)
        some &= least[:, None] - most < window
        full &= most[:, None] - least < window
    return Blocks(some & ~full, full)


def block_mask(plan: TreePlan, window: int | None, size: int = BLOCK) -> BlockMask:
    """The row's mask as FlexAttention takes it, lists for the backward included; made without waiting for the device.

    Args:
        plan: The row.
        window: Sliding window, where it cuts some sample of the row; else None.
        size: Places in a block.
    """
    partial, full = classified(plan, window, size)
    ends, depth = plan.subtree_end_of_place.int(), plan.layout.position_ids.int()
    return BlockMask(
        (plan.num_tokens, plan.num_tokens),
        *_listed(partial),
        *_listed(full),
        *_listed(partial.T),
        *_listed(full.T),
        BLOCK_SIZE=(size, size),
        mask_mod=_tree_mask(ends) if window is None else _window_mask(ends, depth, depth - window),
    )


def _extremes(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each block, each [B]. [3, 1, 2 | 5] gives [1, 5] and [3, 5]."""
    missing = -len(values) % size
    whole = torch.cat([values, values[-1:].expand(missing)]).view(-1, size)  # a value once more changes no extreme
    return whole.amin(1), whole.amax(1)


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are set, and which, in front: int32, [1, 1, B] and [1, 1, B, B].

    [[1, 0, 1]] gives [2] and [[0, 2, 0]]. Entries behind the count are never read; 0 is a block that exists.
    """
    blocks = len(table)
    spare = blocks  # where columns that are not set go
    slot = torch.where(table, table.cumsum(1) - 1, spare)
    columns = torch.arange(blocks, dtype=torch.int32, device=table.device).expand(blocks, blocks)
    index = columns.new_zeros(blocks, blocks + 1).scatter_(1, slot, columns)[:, :spare].contiguous()
    return table.sum(1, dtype=torch.int32)[None, None], index[None, None]


# The compiled kernels tell masks apart by the code and by the kind of what it captures. So a row's mask may be a new
# function without a new compilation, as long as it captures tensors only: a number would be compiled in.
def _tree_mask(ends: Tensor) -> MaskMod:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return mask


def _window_mask(ends: Tensor, depth: Tensor, floor: Tensor) -> MaskMod:
    """``floor`` is ``depth - window``: a place sees what lies deeper than its floor."""

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key]) & (floor[query] < depth[key])

    return mask
