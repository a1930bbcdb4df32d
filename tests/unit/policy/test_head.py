from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_rl.policy import head
from lit_rl.policy.head import HeadOptions, target_scores


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor, target: Tensor, o: HeadOptions) -> Tensor:
    """The same, with all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * o.scale
    if o.softcap is not None:
        logits = o.softcap * torch.tanh(logits / o.softcap)
    return (logits / o.temperature).log_softmax(-1)


def inputs(places: int = 7, vocabulary: int = 11, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((places, width), (vocabulary, width), (vocabulary,))
    )
    hidden, weight, bias = (tensor.requires_grad_() for tensor in made)
    return hidden, weight, bias


def test_the_trainer_scores_at_the_sampling_temperature() -> None:
    """Logits [2, 0, 0] at temperature 0.5 are [4, 0, 0]; dividing log-probs afterwards would be something else."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0], [0.0]])
    place, target = torch.tensor([0, 0]), torch.tensor([0, 1])
    logprobs, entropy = target_scores(hidden, weight, None, place, target, HeadOptions(temperature=0.5))
    total = math.exp(4) + 2
    assert logprobs.tolist() == pytest.approx([4 - math.log(total), -math.log(total)], abs=1e-6)
    assert logprobs.tolist() == pytest.approx([-0.036, -4.036], abs=1e-3)
    assert entropy[0].item() == pytest.approx(math.log(total) - 4 * math.exp(4) / total, abs=1e-6)


@pytest.mark.parametrize("chunk_places", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "options",
    [HeadOptions(), HeadOptions(temperature=0.7), HeadOptions(scale=0.25, softcap=1.5, temperature=1.3)],
    ids=["plain", "temperature", "softcap"],
)
def test_chunks_change_neither_scores_nor_gradients(options: HeadOptions, chunk_places: int) -> None:
    hidden, weight, bias = inputs()
    place = torch.tensor([0, 6, 3, 3, 3, 1, 6])
    target = torch.tensor([0, 10, 2, 2, 5, 7, 1])
    coefficients = torch.arange(1.0, 8.0, dtype=torch.float64)
    width = 11 * 8 * (2 if options.softcap else 1)
    chunked = HeadOptions(options.scale, options.softcap, options.temperature, chunk_bytes=width * chunk_places)

    logprobs, entropy = target_scores(hidden, weight, bias, place, target, chunked)
    ours = torch.autograd.grad((logprobs * coefficients).sum(), (hidden, weight, bias))
    scores = plain(hidden, weight, bias, place, target, options)
    theirs = torch.autograd.grad((scores[place, target] * coefficients).sum(), (hidden, weight, bias))

    torch.testing.assert_close(logprobs, scores[place, target], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(scores * scores.exp()).sum(-1)[place], rtol=1e-12, atol=1e-12)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-11, atol=1e-12)


def test_never_more_than_one_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 places in chunks of 4: no tensor that the head makes is as large as five places of logits."""
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(
                t.numel() for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)
            )
            return result

    monkeypatch.setattr(head, "CPU_ROWS", 2)
    vocabulary = 4000
    hidden = torch.randn(40, 3, requires_grad=True)
    weight = torch.randn(vocabulary, 3)
    place = torch.arange(40)
    with Watch():
        logprobs, _ = target_scores(
            hidden, weight, None, place, place, HeadOptions(temperature=0.9, chunk_bytes=4 * 4 * vocabulary)
        )
        logprobs.sum().backward()
    assert 4 * vocabulary in made
    assert max(made) == 4 * vocabulary


@pytest.mark.parametrize(("chunk_places", "products"), [(7, 1), (6, 4)], ids=["one chunk", "two chunks"])
def test_logits_of_a_lone_chunk_are_kept_for_its_backward(chunk_places: int, products: int) -> None:
    """A second backward finds them gone and makes them again: its gradients are the same."""
    hidden, weight, _ = inputs()
    place, made = torch.arange(7), 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal made
            result = func(*args, **(kwargs or {}))
            made += func is torch.ops.aten.mm.out and result.shape[-1] == 11
            return result

    with Count():
        logprobs, _ = target_scores(hidden, weight, None, place, place, HeadOptions(chunk_bytes=11 * 8 * chunk_places))
        once = torch.autograd.grad(logprobs[:5].sum(), (hidden, weight), retain_graph=True)
    assert made == products
    again = torch.autograd.grad(logprobs[:5].sum(), (hidden, weight))
    for first, second in zip(once, again, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_half_precision_weights_still_get_a_float32_softmax() -> None:
    hidden, weight, _ = (tensor.detach() for tensor in inputs())
    place, target = torch.arange(7), torch.arange(7)
    half = [hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
    logprobs, entropy = target_scores(half[0], half[1], None, place, target, HeadOptions())
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert half[0].grad is not None and half[0].grad.dtype == torch.bfloat16
    exact = plain(half[0].double(), half[1].double(), None, place, target, HeadOptions())[place, target]
    torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=0.05)


def test_half_precision_states_meet_float32_weights_under_autocast() -> None:
    hidden, weight, _ = (tensor.detach().float() for tensor in inputs())
    place = torch.arange(7)
    states, weight = hidden.bfloat16().requires_grad_(), weight.requires_grad_()
    logprobs, _ = target_scores(states, weight, None, place, place, HeadOptions())
    logprobs.sum().backward()
    exact = plain(states.float(), weight, None, place, place, HeadOptions())[place, place]
    torch.testing.assert_close(logprobs, exact, rtol=1e-5, atol=1e-5)
    assert states.grad is not None and states.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden, weight, _ = inputs()
    frozen = weight.detach()
    logprobs, entropy = target_scores(hidden, frozen, None, torch.tensor([2]), torch.tensor([3]), HeadOptions())
    logprobs.sum().backward()
    assert hidden.grad is not None and frozen.grad is None
    assert not entropy.requires_grad


def test_no_targets_give_no_scores_and_zero_gradients() -> None:
    hidden, weight, bias = inputs(places=0)
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = target_scores(hidden, weight, bias, none, none, HeadOptions())
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()
