"""Stop 11: how a row becomes variable-length attention: one entry for each leaf of the tree.

The trie lays a node's heavy child (longest way down) right behind the node. So the rows from a *head* (a root, or any
child but the first) down first children to a leaf stand side by side: a chain. Chains tile the row, and a chain's rows
are the tail of its leaf's root path. One entry per leaf covers them all::

    queries  the chain's own rows, a slice of the row
    keys     the leaf's root path: rows of the ancestors, gathered, then the chain's own rows

A causal mask that is aligned bottom-right (query i of n sees keys up to the path's length - n + i) is then the tree's
mask, and a sliding window along the path is one by depth. The keys of all entries together are the paths of all leaves:
never more than the tokens of all samples before sharing.

Example: the samples [1, 2, 3] and [1, 2, 4, 5] are laid out as [1, 2, 4, 5 | 3]; chains are the places 0 ... 3 and 4,
their keys the places [0, 1, 2, 3] and [0, 1, 4].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_rl.policy.tree_attention.plan import TreePlan


class Entries(NamedTuple):
    """A row's attention calls, C of them, on the layout's device.

    Attributes:
        cu_seqlens_q: [C + 1] int32; entry c has the queries ``cu_seqlens_q[c] : cu_seqlens_q[c + 1]`` of the row.
        cu_seqlens_k: [C + 1] int32; entry c has these of the gathered keys.
        max_q: Most queries of an entry.
        max_k: Most keys of an entry.
        key_places: [cu_seqlens_k[-1]] int64, the place of each gathered key; None = the row's own keys as they stand.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    key_places: Tensor | None


def entries_of(plan: TreePlan, window: int | None = None) -> Entries:
    """The entries of a row, made once per row and window however many layers ask.

    Args:
        plan: The row.
        window: Sliding window; ancestors that no query of a chain sees any more are not gathered.
    """
    window = plan.binding(window)
    return plan.derived(("chains", window), lambda: _entries(plan, window))


def _entries(plan: TreePlan, window: int | None) -> Entries:
    layout = plan.layout
    device, starts = layout.token_ids.device, layout.segment_starts
    # one copy to the host: a row on a GPU is waited for once
    facts = torch.cat([starts, layout.segment_parents, layout.position_ids[starts[:-1]]]).cpu().numpy()
    segments = len(layout.segment_parents)
    start, parent, depth = np.split(facts, [segments + 1, 2 * segments + 1])

    is_head = (parent != np.arange(segments) - 1) | (parent < 0)
    heads = np.flatnonzero(is_head)
    begins = np.append(start[heads], start[-1])
    depths = depth[heads]
    # a chain's first query sees the window's last tokens; what is above them no query of the chain sees
    above = depths if window is None else np.minimum(depths, window - 1)
    lengths = np.diff(begins)
    ends = np.cumsum(above + lengths)
    places = None
    if above.any():
        parents_chain = (np.cumsum(is_head) - 1)[parent[heads]]  # of a root: anything, it has nothing above
        places = torch.from_numpy(_paths(begins, depths, above, ends, parents_chain)).to(device, non_blocking=True)
    return Entries(
        cu_seqlens_q=torch.from_numpy(begins.astype(np.int32)).to(device, non_blocking=True),
        cu_seqlens_k=torch.from_numpy(np.append(0, ends).astype(np.int32)).to(device, non_blocking=True),
        max_q=int(lengths.max()),
        max_k=int((above + lengths).max()),
        key_places=places,
    )


def _paths(
    begins: np.ndarray, depths: np.ndarray, above: np.ndarray, ends: np.ndarray, parents_chain: np.ndarray
) -> np.ndarray:
    """[ends[-1]] places of all entries' keys; a chain's ancestors stand, one run, in the path of its parent's chain.

    Args:
        begins: [C + 1] first place of each chain, and the row's length.
        depths: [C] depth of each chain's first place.
        above: [C] ancestors that a chain's keys begin with.
        ends: [C] where each chain's keys end.
        parents_chain: [C] the chain that holds the parent of a chain's first segment; an earlier one.
    """
    places = np.empty(ends[-1], np.int64)
    path_begins = np.append(0, ends)
    for chain in range(len(depths)):
        at, kept = path_begins[chain], above[chain]
        if kept:
            other = parents_chain[chain]
            source = path_begins[other] + (depths[chain] - kept) - (depths[other] - above[other])
            places[at : at + kept] = places[source : source + kept]
        places[at + kept : ends[chain]] = np.arange(begins[chain], begins[chain + 1])
    return places
