"""Gradient norm and clipping."""

import pytest
import torch
from torch import nn

from lit_rl.train.gradients import clip_gradients, gradient_norm


def parameters(*gradients: list[float]) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        p = nn.Parameter(torch.zeros(len(gradient)))
        p.grad = torch.tensor(gradient)
        made.append(p)
    return [*made, nn.Parameter(torch.zeros(2))]  # the last has no gradient


def test_the_norm_is_over_all_parameters():
    assert gradient_norm(parameters([3.0], [0.0, 4.0])).item() == 5.0


def test_the_norm_of_a_large_tensor_is_exact_where_float32_sums_are_not():
    p = nn.Parameter(torch.zeros(3_000_000))
    p.grad = torch.full_like(p, 0.1)
    expected = torch.tensor(0.1, dtype=torch.float32).double().item() * 3_000_000**0.5
    assert gradient_norm([p]).item() == pytest.approx(expected, rel=1e-10)


def test_nothing_to_clip_has_norm_zero():
    assert gradient_norm([nn.Parameter(torch.zeros(2))]).item() == 0.0


@pytest.mark.parametrize(
    ("limit", "algorithm", "expected"),
    [
        (1.0, "norm", [0.6, 0.8]),
        (5.0, "norm", [3.0, 4.0]),
        (3.5, "value", [3.0, 3.5]),
        (None, "norm", [3.0, 4.0]),
    ],
)
def test_clipping(limit, algorithm, expected):
    params = parameters([3.0, 4.0])
    clip_gradients(params, norm=gradient_norm(params), limit=limit, algorithm=algorithm)
    assert params[0].grad is not None
    assert params[0].grad.tolist() == pytest.approx(expected)
