"""The mean of a step does not depend on how it was packed (case 3 of the public bug reports)."""

from typing import Literal

import pytest
import torch

from lit_rl.maths.normalize import row_loss, row_scale
from lit_rl.tensors import StepTotals


def totals(*terms: int) -> StepTotals:
    return StepTotals(sum(terms), samples=1, groups=1, rows_per_rank=len(terms), micro_batch_terms=terms)


def step_loss(micro_batches: list[list[float]], average: Literal["step", "micro_batch"] = "step") -> float:
    counts = totals(*(len(m) for m in micro_batches))
    scales = [row_scale(counts, i, average, world_size=1) for i in range(len(micro_batches))]
    return sum(float(row_loss(torch.tensor(m), scale)) for m, scale in zip(micro_batches, scales, strict=True))


@pytest.mark.parametrize(
    "split",
    [
        [[3.0], [1.0] * 9],
        [[3.0] + [1.0] * 9],
        [[3.0] + [1.0] * 4, [1.0] * 5],
        [[3.0] + [1.0] * 9, []],
    ],
)
def test_ten_terms_give_the_same_mean_in_every_split(split):
    assert step_loss(split) == pytest.approx(1.2)


def test_micro_batch_average_is_the_mean_of_means():
    assert step_loss([[3.0], [1.0] * 9], "micro_batch") == pytest.approx(2.0)


def test_micro_batch_average_leaves_out_an_empty_micro_batch():
    assert step_loss([[3.0, 1.0], []], "micro_batch") == pytest.approx(2.0)


def test_ranks_that_are_averaged_give_the_global_mean():
    """1 term on rank 0 and 9 on rank 1: the data-parallel mean of the two scaled sums is 1.2."""
    scale = row_scale(totals(10), 0, "step", world_size=2)
    ranks = [row_loss(torch.tensor([3.0]), scale), row_loss(torch.ones(9), scale)]
    assert float(sum(ranks)) / 2 == pytest.approx(1.2)


def test_an_empty_row_gives_a_zero_that_can_be_differentiated():
    terms = torch.zeros(0, requires_grad=True)
    loss = row_loss(terms, row_scale(totals(0), 0, "step", world_size=1))
    loss.backward()
    assert loss.item() == 0.0 and terms.grad is not None
