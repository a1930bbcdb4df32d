"""Stop 13: from per-term losses to the number that is differentiated. Pure functions.

The mean of a step is taken over all its loss terms, on every rank and in every micro-batch, so that it does not depend
on how the samples were packed. Each rank differentiates its own rows one after the other; data-parallel averaging
divides gradients by the number of ranks, so each row's sum is multiplied by it.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lit_rl.tensors import StepTotals

LossAverage = Literal["step", "micro_batch"]


def row_scale(totals: StepTotals, micro_batch: int, average: LossAverage, world_size: int) -> float:
    """The factor that turns a row's summed loss into its share of the step's loss.

    ``step``: 1 / all terms of the step. ``micro_batch``: 1 / (terms of this micro-batch over all ranks) / number of
    micro-batches, the mean of means of the asynchronous GRPO document: a term of a small micro-batch weighs more.

    Args:
        totals: Global counts of the step.
        micro_batch: Which micro-batch the row belongs to.
        average: Which mean.
        world_size: Number of data-parallel ranks whose gradients are averaged.

    Example: micro-batches of 1 term with loss 3 and 9 terms with loss 1: ``step`` gives 1.2, ``micro_batch`` 2.0.
    """
    if average == "step":
        return world_size / max(totals.loss_terms, 1)
    trained = sum(1 for n in totals.micro_batch_terms if n > 0)
    return world_size / max(totals.micro_batch_terms[micro_batch], 1) / max(trained, 1)


def row_loss(per_term: Tensor, scale: float) -> Tensor:
    """Sum of a row's per-term losses [M] times its scale; a scalar. An empty row gives a differentiable zero."""
    return per_term.sum() * scale
