"""Stop 12: importance ratios between the policy and the sampler, over flat loss terms. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp overflows float32 near 88 and inf times 0 is NaN, so log-ratios are clamped before exp, never after."""


def log_ratio(policy_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """log(pi_theta / mu) of each loss term, clamped to +-``LOG_RATIO_LIMIT``.

    Args:
        policy_logprobs: [M] log-probs under the policy being trained; carries the gradient.
        sampler_logprobs: [M] log-probs under the sampler that drew the token.

    Returns:
        [M] log-ratio. A NaN stays NaN (clamp does not hide it).
    """
    return (policy_logprobs - sampler_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sampler_kl(log_ratios: Tensor) -> Tensor:
    """Per-term estimate of KL(mu || pi): ``(r - 1) - log r`` with r = pi / mu (Schulman's k3, never negative).

    Args:
        log_ratios: [M] log r.

    Returns:
        [M] non-negative values whose mean under the sampler is the divergence.
    """
    return torch.expm1(log_ratios) - log_ratios
