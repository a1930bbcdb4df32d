"""However a step is packed, its loss and every gradient are those of its samples forwarded one by one."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from lit_rl.packing.planner import FixedCountPlanner, Planner, TokenBudgetPlanner, Verdict
from lit_rl.policy.forward import score_row
from lit_rl.train.objectives import GRPO
from lit_rl.types import Sample
from tests.fakes.policies import furthest, gradients, scored_alone, tiny_model, tiny_policy
from tests.fakes.samples import forests, sample


@functools.cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny_policy(LlamaConfig, attention="cpu"), tiny_model(LlamaConfig)


def packed_loss(planner: Planner, samples: list[Sample]) -> Tensor:
    """The step's loss as the module adds it up, row by row on every rank."""
    assert all(planner.offer(one) is Verdict.PLACED for one in samples)
    plan = planner.close(policy_version=1)
    world = len(plan.rows)
    parts = [
        GRPO().row_loss(score_row(models()[0], row), row, plan.totals, micro_batch=i, world_size=world)[0] / world
        for rows in plan.rows
        for i, row in enumerate(rows)
    ]
    return torch.stack(parts).sum()


def loss_alone(samples: list[Sample]) -> Tensor:
    """The clipped surrogate written out over every trained token, and their plain mean."""
    terms = []
    for one in samples:
        logprobs, _ = scored_alone(models()[1], [one])
        trained = torch.from_numpy(one.sequence.completion_mask[1:].nonzero()[0] + 1)
        ratio = (logprobs - torch.from_numpy(one.sequence.sampler_logprobs)[trained]).exp()
        terms.append(-torch.minimum(ratio * one.advantage, ratio.clamp(0.8, 1.2) * one.advantage))
    every = torch.cat(terms)
    return every.sum() / max(len(every), 1)


def assert_same(planner: Planner, samples: list[Sample]) -> None:
    for number, one in enumerate(samples):
        one.advantage = (-1.5, 0.25, 2.0)[number % 3]
        one.sequence.sampler_logprobs = one.sequence.sampler_logprobs - 2.5 * one.sequence.completion_mask
    ours, theirs = packed_loss(planner, samples), loss_alone(samples)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    packed = gradients(models()[0], ours)
    if any(one.sequence.completion_mask[1:].any() for one in samples):
        assert furthest(packed, gradients(models()[1], theirs)) < 1e-9
    else:
        assert not any(gradient.any() for gradient in packed.values())


@settings(max_examples=25, deadline=None)
@given(samples=forests(), ranks=st.integers(1, 3), micro_batches=st.integers(1, 3))
def test_rows_by_token_budget(samples: list[Sample], ranks: int, micro_batches: int) -> None:
    longest = max(len(one.sequence.token_ids) for one in samples)
    # a row for each sample, or else space for all of them in one
    budget = longest if ranks * micro_batches >= len(samples) else longest * len(samples)
    assert_same(TokenBudgetPlanner(budget, ranks, micro_batches), samples)


@settings(max_examples=25, deadline=None)
@given(samples=forests(), ranks=st.integers(1, 3), per_rank=st.integers(1, 3))
def test_rows_by_number_of_samples(samples: list[Sample], ranks: int, per_rank: int) -> None:
    micro_batches = -(-len(samples) // (ranks * per_rank))
    assert_same(FixedCountPlanner(per_rank, ranks, micro_batches), samples)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_prefix_a_duplicate_and_a_single_token(rows: int) -> None:
    """The third ends where the others branch; the duplicate counts twice; the single token has nothing to train."""
    tokens = [[5, 6, 7, 8, 9], [5, 6, 7, 10, 11], [5, 6, 7], [5, 6, 7, 8, 9], [4]]
    samples = [sample(one) for one in tokens]
    assert_same(FixedCountPlanner(-(-5 // rows), 1, rows), samples)
    assert_same(TokenBudgetPlanner(25, rows, 1), [sample(one) for one in tokens])
