"""What packing promises of cost, held by counting operations: time follows unique tokens, not raw ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from lit_rl.packing.planner import TokenBudgetPlanner, Verdict
from lit_rl.packing.trie import pack
from lit_rl.policy.forward import score_row
from lit_rl.policy.tree_attention.cascade import CPU_COSTS, Block, blocks
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.types import Sample
from tests.fakes.policies import tiny_policy
from tests.fakes.samples import group_of, sample


def conversation(turns: int, tokens: int) -> list[Sample]:
    """Every turn forks off a history that grows by ``tokens``."""
    history = list(range(turns * tokens))
    return [sample([*history[: turn * tokens], 10**6 + turn, *history[:tokens]]) for turn in range(1, turns)]


def binary(levels: int, tokens: int) -> list[Sample]:
    """A full binary tree: each leaf's sample carries ``tokens`` tokens a level."""
    samples = []
    for leaf in range(2**levels):
        path = [leaf >> (levels - level) for level in range(levels + 1)]
        samples.append(
            sample([10**6 * level + 1000 * node + i for level, node in enumerate(path) for i in range(tokens)])
        )
    return samples


FORESTS = {
    "8 of a prompt": lambda scale: group_of(8, prompt=64 * scale, completion=32 * scale),
    "128 of a prompt": lambda scale: group_of(128, prompt=64 * scale, completion=8 * scale),
    "a forked conversation": lambda scale: conversation(12, 24 * scale),
    "a binary tree": lambda scale: binary(5, 8 * scale),
    "nothing shared": lambda scale: [
        s for g in range(8) for s in group_of(1, prompt=32 * scale, completion=32, group=g)
    ],
}


def pairs(block: Block) -> int:
    """(query, key) pairs that the kernel computes for a call."""
    queries, keys = block.cover - block.begin, block.end - block.begin
    return queries * keys if block.mask is not None else queries * keys - keys * (keys - 1) // 2


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("scale", [1, 4, 16])
def test_attention_computes_the_pairs_of_the_tree_and_little_more(forest: str, scale: int) -> None:
    row = pack(FORESTS[forest](scale))
    calls = blocks(TreePlan(row.tree), None, torch.float32)
    segments = len(row.tree.segment_parents)
    assert len(calls) <= segments
    # a square over small segments computes pairs that do not count, never more than the calls that it saves would cost
    assert sum(map(pairs, calls)) <= row.attention_pairs + segments * CPU_COSTS.call


@pytest.mark.parametrize("forest", FORESTS)
def test_large_segments_leave_nothing_computed_in_vain(forest: str) -> None:
    row = pack(FORESTS[forest](16))
    assert sum(map(pairs, blocks(TreePlan(row.tree), None, torch.float32))) <= 1.15 * row.attention_pairs


def products(samples: list[Sample]) -> int:
    """Operations of the layers' linear modules, forward and backward."""
    policy = tiny_policy(LlamaConfig, dtype=torch.float32, vocab_size=101, max_position_embeddings=4096)
    with FlopCounterMode(display=False) as counter:
        score_row(policy, pack(samples)).logprobs.sum().backward()
    linear = [ops for name, ops in counter.get_flop_counts().items() if name.endswith(("mlp", "_proj"))]
    return sum(count for ops in linear for count in ops.values())


@pytest.mark.parametrize("completion", [16, 64])
def test_products_cost_what_unique_tokens_cost(completion: int) -> None:
    """8 of one prompt against the same unique tokens as one long sample: the layers cannot tell them apart."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 101, 200)
    group = [sample([*prompt, i, *draw.integers(0, 101, completion - 1)]) for i in range(8)]
    unique = pack(group).tree.num_tokens
    assert unique == 200 + 8 * completion
    assert products(group) == products([sample(draw.integers(0, 101, unique).tolist())]) > 0


class Counted(np.ndarray[Any, Any]):
    """An array of tokens that counts how many of them are compared."""

    compared = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(one) if isinstance(one, Counted) else one for one in inputs]
        if ufunc is np.not_equal:
            Counted.compared += max(one.size for one in plain)
        return getattr(ufunc, method)(*plain, **kwargs)


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("rows", [1, 4])
def test_planning_compares_a_token_at_most_twice_for_each_row_that_might_take_it(forest: str, rows: int) -> None:
    samples = FORESTS[forest](4)
    raw = 0
    for one in samples:
        one.sequence.token_ids = one.sequence.token_ids.view(Counted)
        raw += len(one.sequence.token_ids)
    Counted.compared = 0
    planner = TokenBudgetPlanner(raw, ranks=1, micro_batches=rows)
    assert all(planner.offer(one) is Verdict.PLACED for one in samples)
    unique = sum(row.tree.num_tokens for row in planner.close(policy_version=1).rows[0])
    assert raw - unique <= Counted.compared <= 2 * raw * rows
