"""Stop 12: per-term objectives over flat loss terms. Pure functions; all of them are minimised."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clipped(NamedTuple):
    """What the clipped surrogate gives: each [M].

    Attributes:
        loss: Per-term loss, carries the gradient.
        low: True where the lower bound took the gradient away (ratio below it, advantage negative).
        high: True where the upper bound did (ratio above it, advantage positive).
    """

    loss: Tensor
    low: Tensor
    high: Tensor


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float) -> Clipped:
    """The clipped surrogate of PPO (Schulman et al. 2017, eq. 7) with its own upper bound (DAPO, Yu et al. 2025).

    ``loss = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`` with ``r = exp(log_ratio)``.

    Args:
        log_ratio: [M] log of policy over sampler probability, already clamped against overflow.
        advantages: [M].
        epsilon: Lower clip.
        epsilon_high: Upper clip.

    Example: r = 1.5, A = 1, epsilon_high = 0.2 gives loss -1.2 and no gradient; with A = -1 loss 1.5 and its gradient.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    low = (ratio < 1.0 - epsilon) & (advantages < 0)
    high = (ratio > 1.0 + epsilon_high) & (advantages > 0)
    return Clipped(loss, low, high)
