"""Stop 12: score centering: an importance-weighted score less its expectation under the sampler. Pure functions.

At one prefix, with policy p, sampler q, scores ``s_v = grad log p_v`` and weights ``w_v`` that carry no gradient, the
usual update ``A w_y s_y`` has the mean ``E[A] E[w s] + Cov(A, w s)``. Its first part does not ask which token was good:
it drags the policy whenever the weights are not exact ratios, and no group baseline takes it away. Subtracting the
expectation ``m = E_q[w s]`` leaves the covariance alone (Marek and Ryabinin, arXiv 2609.20807).

The sampler tells the log-probs of its most likely tokens H only. Outside H it is taken to be proportional to the
policy, ``q_v = rho p_v``, and since the scores sum to zero under p, the tail needs nothing but ``rho``::

    rho = (1 - sum_H q) / (1 - sum_H p)
    m   = sum_H c_v s_v,   c_v = q_v W(p_v / q_v) - rho W(1 / rho) p_v
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

OutOfBand = Literal["center", "drop"]
"""What becomes of a position whose sampled token is outside the band; see ``centered_surrogate``."""

NO_TAIL = 1e-6
"""Probability outside the candidates below which the sampler has no tail: what rounding leaves of 1 - 1."""


class Centered(NamedTuple):
    """What score centering gives.

    Attributes:
        loss: [M] per-term loss, carries the gradient.
        masked: [M] bool, True where the sampled token's ratio is outside the band.
        sampler_mass: [M] the sampler's probability of the candidates.
    """

    loss: Tensor
    masked: Tensor
    sampler_mass: Tensor


def centered_surrogate(
    log_ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    candidate_logprobs: Tensor,
    candidate_sampler_logprobs: Tensor,
    term: Tensor,
    *,
    low: float,
    high: float,
    out_of_band: OutOfBand = "center",
) -> Centered:
    """Masked importance sampling (IcePop's band) with score centering.

    ``loss = -A (w_y log p_y - sum_H c_v log p_v)`` with ``w_v = r_v`` where ``low <= r_v <= high``, else 0, for
    ``r = p / q``; weights and coefficients carry no gradient. The gradient is ``-A (w_y s_y - m)``.

    A sampled token outside the band loses its own score. What becomes of ``m`` there can be read in two ways:

    ``center``: it stays, so that the mean update is the covariance, without drift.
    ``drop``: the position is left out whole, and at the others ``m`` is divided by Q, the sampler's probability of
    tokens inside the band, which makes the mean over the kept positions free of drift.

    Args:
        log_ratio: [M] log of policy over sampler probability of the sampled tokens, clamped against overflow.
        logprobs: [M] the policy's log-probs of the sampled tokens; carries the gradient.
        advantages: [M].
        candidate_logprobs: [K] the policy's log-probs of the candidates, over the same support; carries the gradient.
        candidate_sampler_logprobs: [K] the sampler's. The sampled token is among them only by its rank.
        term: [K] int64, the term that each candidate belongs to.
        low: Lower end of the band.
        high: Upper end.
        out_of_band: ``center`` or ``drop``.

    Example: without candidates ``c`` is empty, ``rho`` is 1, and the loss is that of masked importance sampling.
    """
    count = len(logprobs)
    ratio = log_ratio.detach().exp()
    kept = (ratio >= low) & (ratio <= high)

    policy, sampler = candidate_logprobs.detach().exp(), candidate_sampler_logprobs.exp()
    policy_tail, sampler_tail = 1.0 - _summed(policy, term, count), 1.0 - _summed(sampler, term, count)
    rho = sampler_tail.clamp(min=0.0) / policy_tail.clamp(min=NO_TAIL)
    # the tail's ratio is 1 / rho everywhere
    tail_kept = (sampler_tail > NO_TAIL) & (low * rho <= 1.0) & (high * rho >= 1.0)
    kept_candidates = (policy >= low * sampler) & (policy <= high * sampler)
    coefficients = policy * (kept_candidates.to(policy.dtype) - tail_kept[term].to(policy.dtype))
    expected = _summed(coefficients * candidate_logprobs, term, count)

    own = torch.where(kept, ratio, 0.0) * logprobs
    if out_of_band == "drop":
        in_band = _summed(sampler * kept_candidates, term, count) + torch.where(tail_kept, sampler_tail, 0.0)
        loss = -advantages * torch.where(kept, own - expected / in_band.clamp(min=NO_TAIL), 0.0)
    else:
        loss = -advantages * (own - expected)
    return Centered(loss, ~kept, (1.0 - sampler_tail))


def _summed(values: Tensor, term: Tensor, count: int) -> Tensor:
    """[count] sums of the values [K] of each term."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, term, values)
