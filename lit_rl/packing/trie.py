"""Stop 9: the samples of one row folded into a prefix forest, so that a shared token is forwarded once.

``PrefixTrie`` is a radix trie keyed by token alone: an edge holds a run of tokens as a view of some sample's array, and
tokens are compared by vector, never one by one. What a sample would add is told before it is added
(``PrefixTrie.would_add`` gives a ``Cursor`` that ``PrefixTrie.insert`` takes), so a planner can price many rows.

Two rollouts of one prompt, ``p1 p2 p3 a1 a2`` and ``p1 p2 p3 b1 b2``: 10 raw tokens become 7 forwarded ones. ::

    place          0  1  2 | 3  4 | 5  6
    token_ids     p1 p2 p3 |a1 a2 |b1 b2
    position_ids   0  1  2 | 3  4 | 3  4
    segment        S0      | S1   | S2        segment_parents = [-1, 0, 0]

``p3`` (place 2) predicts ``a1`` for the first and ``b1`` for the second: two loss terms hang on one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from lit_rl.errors import PackingError
from lit_rl.tensors import LossTerms, PackedRow, TermSets, TreeLayout
from lit_rl.types import Sample, TokenSets

# An early mismatch must not cost a comparison of the whole edge: compare this many tokens, then four times as many, ...
_FIRST_COMPARE = 1024


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a sample would add to a trie, and where; taken by ``PrefixTrie.insert``.

    Attributes:
        sample: The sample.
        new_tokens: Tokens that are not shared with the row yet.
        new_terms: Loss terms: trained tokens that have a predecessor.
        new_pairs: (query, key) pairs that the new tokens add.
        depth: Tokens shared with the row.
        node: Number of the node in which the shared part ends; -1 = nothing is shared.
        revision: Revision of the trie that the cursor belongs to.
    """

    sample: Sample
    new_tokens: int
    new_terms: int
    new_pairs: int
    depth: int
    node: int
    revision: int


class _Forest(NamedTuple):
    """Nodes in layout order; ``start[n]`` is the first place of node n, by node number."""

    order: list[int]
    start: list[int]


class PrefixTrie:
    """The samples of one row; grows sample by sample, then is laid out once.

    Attributes:
        num_tokens: Unique tokens, what the row forwards.
        num_terms: Loss terms.
        num_pairs: (query, key) pairs, the attention cost.
        raw_tokens: Tokens of all samples before sharing.
        trained_tokens: Unique tokens that some loss term predicts; known once the row was laid out.
        samples: The samples in the order of insertion; a loss term's ``sample_index`` counts in it.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_terms = self.num_pairs = self.raw_tokens = self.trained_tokens = 0
        self.samples: list[Sample] = []
        self._ends: list[int] = []  # per sample the node in which it ends (perhaps before that node's last token)
        self._revision = 0
        # nodes by number: tokens of the edge, depth of its first token, parent, children by first token
        self._edge: list[np.ndarray] = []
        self._depth: list[int] = []
        self._parent: list[int] = []
        self._children: list[dict[int, int]] = []
        self._roots: dict[int, int] = {}

    def would_add(self, sample: Sample) -> Cursor:
        """What ``sample`` would add, without adding it.

        Raises:
            PackingError: the sample has no token.
        """
        tokens = sample.sequence.token_ids
        length = len(tokens)
        if length == 0:
            raise PackingError(f"sample {sample.rollout_id!r} has no token; it cannot be forwarded")
        node, depth, children = -1, 0, self._roots
        while depth < length:
            child = children.get(int(tokens[depth]))
            if child is None:
                break
            edge = self._edge[child]
            common = _common_prefix(edge, tokens[depth : depth + len(edge)])
            node, depth = child, depth + common
            if common < len(edge):
                break
            children = self._children[child]
        pairs = (length * (length + 1) - depth * (depth + 1)) // 2
        terms = int(np.count_nonzero(sample.sequence.completion_mask[1:]))
        return Cursor(sample, length - depth, terms, pairs, depth, node, self._revision)

    def insert(self, cursor: Cursor) -> None:
        """Adds the sample of a cursor that ``would_add`` gave since the last insertion.

        Raises:
            PackingError: the trie has changed since the cursor was made.
        """
        if cursor.revision != self._revision:
            raise PackingError("the cursor is older than the trie; ask would_add again before inserting")
        sample, node, depth = cursor.sample, cursor.node, cursor.depth
        tokens = sample.sequence.token_ids
        if cursor.new_tokens:
            node = self._grow(node, depth, tokens)
        self._ends.append(node)
        self.samples.append(sample)
        self.num_tokens += cursor.new_tokens
        self.num_terms += cursor.new_terms
        self.num_pairs += cursor.new_pairs
        self.raw_tokens += len(tokens)
        self._revision += 1

    def add(self, sample: Sample) -> Cursor:
        """``would_add`` and ``insert`` in one."""
        cursor = self.would_add(sample)
        self.insert(cursor)
        return cursor

    def layout(self) -> PackedRow:
        """The row: tokens depth-first with the heavy child first, segments, and the loss terms."""
        if not self.samples:
            return empty_row()
        forest = self._arranged()
        return PackedRow(
            tree=self._tree(forest),
            terms=self._terms(forest),
            sample_ids=tuple(sample.rollout_id for sample in self.samples),
            group_ids=tuple(sample.group_id for sample in self.samples),
            raw_tokens=self.raw_tokens,
            attention_pairs=self.num_pairs,
        )

    # growing

    def _grow(self, node: int, depth: int, tokens: np.ndarray) -> int:
        """Adds ``tokens[depth:]`` below the place where the walk ended; returns the node that holds its end."""
        if node < 0:
            return self._new_node(tokens, 0, -1, self._roots)
        inside = depth - self._depth[node]
        if inside < len(self._edge[node]):
            node = self._split(node, inside)
        elif not self._children[node]:
            # a leaf that a longer sample goes on from: the same run, now longer
            self._edge[node] = tokens[self._depth[node] :]
            return node
        return self._new_node(tokens[depth:], depth, node, self._children[node])

    def _new_node(self, edge: np.ndarray, depth: int, parent: int, siblings: dict[int, int]) -> int:
        number = len(self._edge)
        self._edge.append(edge)
        self._depth.append(depth)
        self._parent.append(parent)
        self._children.append({})
        siblings[int(edge[0])] = number
        return number

    def _split(self, node: int, inside: int) -> int:
        """Cuts a run before its token ``inside``; returns the new upper half.

        The *lower* half keeps its number, so that samples which end in it still point at their last token. A sample
        that ends in the upper half points below its end; walking up from there, the lower half contributes nothing.
        """
        edge, depth, parent = self._edge[node], self._depth[node], self._parent[node]
        siblings = self._roots if parent < 0 else self._children[parent]
        upper = self._new_node(edge[:inside], depth, parent, siblings)
        self._edge[node], self._depth[node], self._parent[node] = edge[inside:], depth + inside, upper
        self._children[upper][int(edge[inside])] = node
        return upper

    # laying out

    def _arranged(self) -> _Forest:
        """Depth-first order: of a node's children the one with the longest way down first, the rest by insertion."""
        height = [len(edge) for edge in self._edge]
        for node in self._bottom_up():
            children = self._children[node]
            if children:
                height[node] += max(height[child] for child in children.values())
        start = [0] * len(self._edge)
        order: list[int] = []
        stack = list(self._roots.values())[::-1]
        place = 0
        while stack:
            node = stack.pop()
            order.append(node)
            start[node] = place
            place += len(self._edge[node])
            below = list(self._children[node].values())
            if below:
                heavy = max(below, key=height.__getitem__)
                stack.extend(child for child in reversed(below) if child != heavy)
                stack.append(heavy)
        return _Forest(order, start)

    def _bottom_up(self) -> list[int]:
        """All nodes, children before parents."""
        order = list(self._roots.values())
        for node in order:  # grows while it is walked: level by level
            order.extend(self._children[node].values())
        return order[::-1]

    def _tree(self, forest: _Forest) -> TreeLayout:
        order = forest.order
        edges = [self._edge[node] for node in order]
        lengths = np.fromiter(map(len, edges), np.int64, len(edges))
        starts = np.zeros(len(edges) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        depths = np.array([self._depth[node] for node in order])
        segment_of = [0] * len(order)
        for segment, node in enumerate(order):
            segment_of[node] = segment
        parents = [segment_of[self._parent[node]] if self._parent[node] >= 0 else -1 for node in order]
        subtree_ends = starts[1:].tolist()
        for segment in range(len(order) - 1, 0, -1):  # children come after their parent, the last one at its end
            parent = parents[segment]
            if parent >= 0 and subtree_ends[parent] < subtree_ends[segment]:
                subtree_ends[parent] = subtree_ends[segment]
        positions = np.arange(starts[-1]) + np.repeat(depths - starts[:-1], lengths)
        return TreeLayout(
            token_ids=torch.from_numpy(np.concatenate(edges).astype(np.int64, copy=False)),
            position_ids=torch.from_numpy(positions),
            segment_starts=torch.from_numpy(starts),
            segment_parents=torch.tensor(parents, dtype=torch.int64),
            subtree_ends=torch.tensor(subtree_ends, dtype=torch.int64),
        )

    def _terms(self, forest: _Forest) -> LossTerms:
        """All samples at once, their tokens end to end."""
        sequences = [sample.sequence for sample in self.samples]
        lengths = np.fromiter((len(sequence.token_ids) for sequence in sequences), np.int64, len(sequences))
        places = self._places(forest, lengths)
        trained = np.concatenate([sequence.completion_mask for sequence in sequences]).astype(bool, copy=False)
        trained[np.cumsum(lengths) - lengths] = False  # the first token of a sample has nothing that predicts it
        at = np.flatnonzero(trained)
        self.trained_tokens = int(np.count_nonzero(np.bincount(places[at])))
        of_sample = np.repeat(np.arange(len(sequences)), lengths)[at]
        tokens = np.concatenate([sequence.token_ids for sequence in sequences])
        sampler = np.concatenate([sequence.sampler_logprobs for sequence in sequences])
        advantages = np.fromiter((sample.advantage for sample in self.samples), np.float32, len(self.samples))
        return LossTerms(
            target_index=torch.from_numpy(places[at - 1]),
            target_ids=torch.from_numpy(tokens[at].astype(np.int64, copy=False)),
            sampler_logprobs=torch.from_numpy(sampler[at].astype(np.float32, copy=False)),
            advantages=torch.from_numpy(advantages[of_sample]),
            sample_index=torch.from_numpy(of_sample),
            candidates=_term_sets([sequence.sampler_candidates for sequence in sequences], lengths, at),
            kept=_term_sets([sequence.sampling_masks for sequence in sequences], lengths, at),
        )

    def _places(self, forest: _Forest, lengths: np.ndarray) -> np.ndarray:
        """[raw tokens] where each token of each sample was laid, the samples end to end."""
        paths: list[list[int]] = [[]] * len(self._edge)
        for node in forest.order:  # parents first
            parent = self._parent[node]
            paths[node] = [*paths[parent], node] if parent >= 0 else [node]
        path_of_sample = [paths[end] for end in self._ends]
        runs = np.array(list(chain.from_iterable(path_of_sample)))
        counts = np.fromiter(map(len, path_of_sample), np.int64, len(path_of_sample))
        ends = np.cumsum(lengths)
        begins = np.array(self._depth)[runs] + np.repeat(ends - lengths, counts)
        offsets = np.array(forest.start)[runs] - begins
        # a sample that ends in an upper half points at the lower one, where it has no token
        held = begins < np.repeat(ends, counts)
        begins, offsets = begins[held], offsets[held]
        return np.arange(ends[-1]) + np.repeat(offsets, np.diff(begins, append=ends[-1]))


def _term_sets(given: list[TokenSets | None], lengths: np.ndarray, at: np.ndarray) -> TermSets | None:
    """The sets of the tokens ``at`` of samples that stand end to end; a sample without sets has empty ones."""
    held = [sets for sets in given if sets is not None]
    if not held:
        return None
    pairs = zip(given, lengths.tolist(), strict=True)
    size = np.concatenate([np.zeros(n, np.int64) if sets is None else np.diff(sets.offsets) for sets, n in pairs])
    begins = np.cumsum(size) - size
    offsets = np.zeros(len(at) + 1, np.int64)
    np.cumsum(size[at], out=offsets[1:])
    taken = np.arange(offsets[-1]) + np.repeat(begins[at] - offsets[:-1], size[at])
    ids = np.concatenate([sets.ids for sets in held])[taken].astype(np.int64)
    logprobs = [sets.logprobs for sets in held if sets.logprobs is not None]  # all of them have some, or none has
    return TermSets(
        offsets=torch.from_numpy(offsets),
        ids=torch.from_numpy(ids),
        logprobs=torch.from_numpy(np.concatenate(logprobs)[taken]) if logprobs else None,
    )


def empty_row() -> PackedRow:
    """A row without samples: one token, no term, no weight; it keeps a rank in step with the others."""
    zero, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    one = torch.ones(1, dtype=torch.int64)
    tree = TreeLayout(zero, zero.clone(), torch.tensor([0, 1]), -one, one)
    terms = LossTerms(none, none.clone(), torch.zeros(0), torch.zeros(0), none.clone())
    return PackedRow(tree=tree, terms=terms, attention_pairs=1)


def pack(samples: Sequence[Sample]) -> PackedRow:
    """The samples as one row, whatever its size."""
    trie = PrefixTrie()
    for sample in samples:
        trie.add(sample)
    return trie.layout()


def _common_prefix(edge: np.ndarray, tokens: np.ndarray) -> int:
    """How many leading tokens agree; ``tokens`` may be the shorter."""
    length = min(len(edge), len(tokens))
    begin, size = 0, _FIRST_COMPARE
    while begin < length:
        end = min(begin + size, length)
        differ = edge[begin:end] != tokens[begin:end]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, size = end, size * 4
    return length
