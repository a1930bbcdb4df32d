"""A token outside the completion mask never touches loss, gradient or metric (case 1 of the public bug reports)."""

import math

import numpy as np
import pytest
import torch

from lit_rl.errors import NonFiniteError
from lit_rl.metrics import values
from lit_rl.packing.planner import FixedCountPlanner
from lit_rl.tensors import TokenScores
from lit_rl.train.objectives import GRPO
from lit_rl.types import Sample, Sequence


def train_on(sampler_logprobs: list[float], mask: list[bool]):
    """Prompt token 5, then tokens 6 and 7; the policy gives each of them log-prob -1."""
    ids = np.array([5, 6, 7])
    sequence = Sequence(ids, np.array([False, *mask]), np.array([0.0, *sampler_logprobs], dtype=np.float32))
    planner = FixedCountPlanner(1, ranks=1, micro_batches=1)
    planner.offer(Sample(sequence, 1.0, 1.0, "r0", 0, 1))
    plan = planner.close(1)
    row = plan.rows[0][0]
    logprobs = torch.full((len(row.terms),), -1.0, requires_grad=True)
    scores = TokenScores(logprobs, torch.zeros(len(row.terms)))
    loss, stats = GRPO().row_loss(scores, row, plan.totals, micro_batch=0, world_size=1)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), values(stats)


@pytest.mark.parametrize("poison", [-200.0, math.nan, -math.inf, math.inf])
def test_what_stands_under_a_masked_token_changes_nothing(poison):
    harmless = train_on([-1.0, -1.0], [True, False])
    assert train_on([-1.0, poison], [True, False]) == harmless
    loss, gradient, stats = harmless
    assert loss == -1.0 and gradient == [-1.0]
    assert all(math.isfinite(value) for value in stats.values())


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_the_same_value_under_a_trained_token_is_noticed(poison):
    with pytest.raises(NonFiniteError, match="r0"):
        train_on([-1.0, poison], [True, True])


def test_an_extreme_ratio_of_a_trained_token_stays_finite():
    loss, gradient, _ = train_on([-1.0, -200.0], [True, True])
    assert math.isfinite(loss) and all(math.isfinite(g) for g in gradient)
