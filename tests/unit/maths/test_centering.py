"""Score centering against exact enumeration over a vocabulary of twelve, and against autograd of its definition."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from lit_rl.maths.centering import Centered, centered_surrogate
from lit_rl.maths.ratios import log_ratio

V = 12
LOW, HIGH = 0.5, 5.0


def distributions(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy (a leaf), its log-probs, and a sampler's that differ by ``spread``; float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(V, generator=generator, dtype=torch.float64)
    return logits, logits.log_softmax(-1), (logits.detach() + spread * noise).log_softmax(-1)


def of_token(
    policy: Tensor,
    sampler: Tensor,
    token: int,
    advantage: float,
    known: Tensor,
    out_of_band: Literal["center", "drop"] = "center",
) -> Centered:
    """The loss of one term whose sampled token is ``token``, with the candidates ``known``."""
    return centered_surrogate(
        log_ratio(policy[token : token + 1], sampler[token : token + 1]),
        policy[token : token + 1],
        torch.tensor([advantage], dtype=torch.float64),
        policy[known],
        sampler[known],
        torch.zeros(len(known), dtype=torch.int64),
        low=LOW,
        high=HIGH,
        out_of_band=out_of_band,
    )


def scores(logits: Tensor) -> Tensor:
    """[V, V]: row v is the gradient of log p_v by the logits."""
    return torch.eye(V, dtype=torch.float64) - logits.detach().softmax(-1)


def weights(policy: Tensor, sampler: Tensor) -> Tensor:
    ratio = (policy.detach() - sampler).exp()
    return torch.where((ratio >= LOW) & (ratio <= HIGH), ratio, 0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.1, 0.7, 2.0])
def test_with_all_candidates_the_mean_update_is_the_covariance_and_its_drift_is_zero(seed: int, spread: float) -> None:
    logits, policy, sampler = distributions(seed, spread)
    q, s, w = sampler.exp(), scores(logits), weights(policy, sampler)
    advantages = torch.linspace(-1.0, 2.0, V, dtype=torch.float64)
    every = torch.arange(V)

    def mean_update(of: Tensor) -> Tensor:
        total = torch.zeros(V, dtype=torch.float64)
        for token in range(V):
            loss = of_token(policy, sampler, token, float(of[token]), every).loss.sum()
            total += -q[token] * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        return total

    weighted = w[:, None] * s
    covariance = (q * advantages) @ weighted - (q @ advantages) * (q @ weighted)
    torch.testing.assert_close(mean_update(advantages), covariance, rtol=0, atol=1e-12)
    assert mean_update(torch.ones(V, dtype=torch.float64)).abs().max() < 1e-12  # a constant advantage teaches nothing


@pytest.mark.parametrize("token", [0, 3, 11])
@pytest.mark.parametrize("k", [0, 1, 4, 12])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_the_score_less_its_expectation_under_the_tail_model(seed: int, k: int, token: int) -> None:
    """The expectation is taken over the whole vocabulary, the sampler's tail being rho times the policy's."""
    logits, policy, sampler = distributions(seed, 1.0)
    known = sampler.argsort(descending=True)[:k]
    p, q = policy.detach().exp(), sampler.exp()
    rho = (1 - q[known].sum()) / (1 - p[known].sum()) if k < V else torch.tensor(0.0, dtype=torch.float64)
    modelled = rho * p
    modelled[known] = q[known]
    ratio = p / modelled
    w = torch.where((ratio >= LOW) & (ratio <= HIGH), ratio, 0.0)
    own = weights(policy, sampler)[token]  # of the sampled token the sampler's exact log-prob is known
    s = scores(logits)
    update = 1.5 * (own * s[token] - (torch.nan_to_num(modelled * w)) @ s)

    loss = of_token(policy, sampler, token, 1.5, known).loss.sum()
    torch.testing.assert_close(-torch.autograd.grad(loss, logits)[0], update, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spread", [0.7, 2.0])
def test_dropped_positions_leave_kept_ones_without_drift(spread: float) -> None:
    logits, policy, sampler = distributions(1, spread)
    q = sampler.exp()
    total = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        found = of_token(policy, sampler, token, 1.0, torch.arange(V), "drop")
        gradient = torch.autograd.grad(found.loss.sum(), logits, retain_graph=True)[0]
        total += q[token] * gradient
        assert bool(found.masked) == (float(weights(policy, sampler)[token]) == 0.0)
        assert not found.masked or not gradient.any()
    assert total.abs().max() < 1e-12


def test_the_same_policy_needs_no_correction() -> None:
    """Weights are 1 and expected scores 0: the plain policy gradient, whatever the candidates."""
    logits, policy, _ = distributions(0, 0.0)
    sampler = policy.detach()
    for known in (torch.arange(0), torch.arange(4), torch.arange(V)):
        found = of_token(policy, sampler, 2, -0.5, known)
        gradient = torch.autograd.grad(found.loss.sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(gradient, 0.5 * scores(logits)[2], rtol=0, atol=1e-12)
        assert found.sampler_mass.item() == pytest.approx(float(sampler[known].exp().sum()))


def test_by_hand() -> None:
    """p = (0.5, 0.3, 0.2), q = (0.8, 0.1, 0.1), the first is known: rho = 0.2 / 0.5, the tail's ratio is 2.5, in band.

    The first's ratio is 0.625, in band too: its coefficient is 0.5 - 0.5 = 0. The second was sampled: its ratio is 3.
    """
    policy, sampler = torch.tensor([0.5, 0.3, 0.2]).log().double(), torch.tensor([0.8, 0.1, 0.1]).log().double()
    found = of_token(policy, sampler, 1, 2.0, torch.tensor([0]))
    assert found.loss.item() == pytest.approx(-2.0 * 3.0 * policy[1].item())
    # q = (0.05, ...): the known one's ratio is 10, out of band, so that its coefficient is -p = -0.5
    sampler = torch.tensor([0.05, 0.5, 0.45]).log().double()
    found = of_token(policy, sampler, 1, 2.0, torch.tensor([0]))
    assert found.loss.item() == pytest.approx(-2.0 * (0.6 * policy[1].item() + 0.5 * policy[0].item()))
    assert not found.masked.item()


def test_terms_do_not_mix() -> None:
    """Three terms, the second without candidates, scored together and each alone."""
    _, policy, sampler = distributions(4, 1.0)
    tokens, sets = [1, 5, 9], [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3, 9, 0])]
    ids, term = torch.cat(sets), torch.tensor([0, 0, 2, 2, 2])
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    together = centered_surrogate(
        log_ratio(policy[tokens], sampler[tokens]),
        policy[tokens],
        advantages,
        policy[ids],
        sampler[ids],
        term,
        low=LOW,
        high=HIGH,
    )
    each = zip(tokens, advantages.tolist(), sets, strict=True)
    alone = [of_token(policy, sampler, token, advantage, known) for token, advantage, known in each]
    torch.testing.assert_close(together.loss, torch.cat([one.loss for one in alone]))
    torch.testing.assert_close(together.sampler_mass, torch.cat([one.sampler_mass for one in alone]))
