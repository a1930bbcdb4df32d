"""The clipped surrogate and its ratios, on numbers that can be checked by eye."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.maths.losses import clipped_surrogate
from lit_rl.maths.ratios import LOG_RATIO_LIMIT, log_ratio, sampler_kl


def surrogate(ratios: list[float], advantages: list[float], **clip: float):
    logs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    clipped = clipped_surrogate(logs, torch.tensor(advantages, dtype=torch.float64), **clip)
    (gradient,) = torch.autograd.grad(clipped.loss.sum(), logs)
    return clipped, gradient


def test_a_good_token_gains_nothing_beyond_the_upper_clip():
    clipped, gradient = surrogate([1.0, 1.1, 1.5], [2.0, 2.0, 2.0], epsilon=0.2, epsilon_high=0.28)
    assert clipped.loss.tolist() == pytest.approx([-2.0, -2.2, -2.56])
    assert gradient.tolist() == pytest.approx([-2.0, -2.2, 0.0])
    assert clipped.high.tolist() == [False, False, True]


def test_a_bad_token_that_grew_keeps_its_whole_gradient():
    clipped, gradient = surrogate([0.5, 0.9, 1.5], [-1.0, -1.0, -1.0], epsilon=0.2, epsilon_high=0.2)
    assert clipped.loss.tolist() == pytest.approx([0.8, 0.9, 1.5])
    assert gradient.tolist() == pytest.approx([0.0, 0.9, 1.5])
    assert clipped.low.tolist() == [True, False, False]


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=20),
    st.floats(0, 0.9),
    st.floats(0, 2),
)
def test_the_surrogate_is_its_definition(terms, low, high):
    logs = torch.tensor([t[0] for t in terms], dtype=torch.float64)
    advantages = torch.tensor([t[1] for t in terms], dtype=torch.float64)
    expected = [-min(math.exp(x) * a, min(max(math.exp(x), 1 - low), 1 + high) * a) for x, a in terms]
    found = clipped_surrogate(logs, advantages, epsilon=low, epsilon_high=high).loss
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_an_extreme_log_ratio_stays_finite():
    policy = torch.tensor([-1.0, -300.0], requires_grad=True)
    ratios = log_ratio(policy, torch.tensor([-200.0, -1.0]))
    assert ratios.tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]
    loss = clipped_surrogate(ratios, torch.tensor([-1.0, 1.0]), epsilon=0.2, epsilon_high=0.2).loss.sum()
    (gradient,) = torch.autograd.grad(loss, policy)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_nan_under_the_mask_is_not_hidden_by_the_clamp():
    assert torch.isnan(log_ratio(torch.tensor([float("nan")]), torch.tensor([-1.0]))).all()


def test_sampler_kl_is_zero_at_equal_policies_and_positive_elsewhere():
    assert sampler_kl(torch.tensor([0.0])).item() == 0.0
    assert sampler_kl(torch.tensor([math.log(2.0)], dtype=torch.float64)).item() == pytest.approx(1 - math.log(2.0))
    assert sampler_kl(torch.tensor([-1.0])).item() > 0
