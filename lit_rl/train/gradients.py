"""Stop 13: the gradient's norm, clipping, and the check that it is finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

ClipAlgorithm = Literal["norm", "value"]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients, summed in float64.

    torch's float32 norm of a CPU tensor of 3M elements is off by 5e-5, which would scale every clipped step.

    Returns:
        A float64 scalar on the gradients' device; 0 where nothing has a gradient.
    """
    squares = [
        torch.linalg.vector_norm(p.grad.detach(), dtype=torch.float64).square()
        for p in parameters
        if p.grad is not None
    ]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def clip_gradients(
    parameters: Iterable[nn.Parameter], *, norm: Tensor, limit: float | None, algorithm: ClipAlgorithm
) -> None:
    """Scales gradients to ``limit`` (``norm``) or cuts each element to +-``limit`` (``value``). None does nothing.

    Args:
        parameters: Whose gradients are changed in place.
        norm: What ``gradient_norm`` gave for them.
        limit: ``trainer.gradient_clip_val``.
        algorithm: ``trainer.gradient_clip_algorithm``.
    """
    if limit is None:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if algorithm == "value":
        torch._foreach_clamp_max_(gradients, limit)
        torch._foreach_clamp_min_(gradients, -limit)
    elif float(norm) > limit:
        torch._foreach_mul_(gradients, limit / float(norm))
