"""The promise of packing: log-probs, entropies and every gradient are those of each sample forwarded alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from lit_rl.packing.trie import pack
from lit_rl.policy.build import build_policy
from lit_rl.policy.forward import score_row
from lit_rl.types import Sample
from tests.fakes.policies import furthest, gradients, scored_alone, tiny_model, tiny_policy
from tests.fakes.samples import forests, sample

MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True}),
}


@functools.cache
def policy(name: str, attention: str, checkpointing: bool) -> PreTrainedModel:
    config, options = MODELS[name]
    return tiny_policy(config, attention=attention, gradient_checkpointing=checkpointing, **options)


@functools.cache
def plain(name: str) -> PreTrainedModel:
    config, options = MODELS[name]
    return tiny_model(config, **options)


def assert_same_as_alone(
    name: str, attention: str, samples: list[Sample], *, checkpointing: bool = False, temperature: float = 1.0
) -> None:
    model, alone = policy(name, attention, checkpointing), plain(name)
    row = pack(samples)
    weights = torch.linspace(-1.0, 2.0, len(row.terms), dtype=torch.float64)
    packed = score_row(model, row, temperature=temperature)
    ours = gradients(model, (packed.logprobs * weights).sum())
    logprobs, entropy = scored_alone(alone, samples, temperature)
    assert packed.logprobs.dtype == torch.float64
    torch.testing.assert_close(packed.logprobs, logprobs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(packed.entropy, entropy, rtol=1e-9, atol=1e-12)
    if len(row.terms):
        assert furthest(ours, gradients(alone, (logprobs * weights).sum())) < 1e-9
    else:
        assert all(not gradient.any() for gradient in ours.values())


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None)
@given(samples=forests(), checkpointing=st.booleans(), temperature=st.sampled_from([1.0, 0.7]))
def test_a_packed_row_equals_its_samples_alone(
    name: str, attention: str, samples: list[Sample], checkpointing: bool, temperature: float
) -> None:
    assert_same_as_alone(name, attention, samples, checkpointing=checkpointing, temperature=temperature)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_forks_duplicates_prefixes_and_single_tokens_share_a_row(attention: str, checkpointing: bool) -> None:
    """Three of a group, one ends where the others branch; a duplicate counts twice; a single token is no error."""
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 10, 11], [5, 6, 7], [5, 6, 7, 8, 9], [4], [4, 4], [9, 8, 7]]
    assert_same_as_alone("llama", attention, [sample(tokens) for tokens in rows], checkpointing=checkpointing)


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_a_tree_three_levels_deep_equals_its_samples_alone(attention: str) -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 8, 9], [1, 2, 8, 5, 5, 5], [1, 3]]
    assert_same_as_alone("qwen3-tied", attention, [sample(tokens) for tokens in rows])


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_another_token_in_one_branch_does_not_move_a_sibling_by_a_bit(attention: str) -> None:
    model = policy("llama", attention, False)
    kept = [sample([1, 2, 3, 4]), sample([1, 2, 5, 6]), sample([8, 9])]
    one = score_row(model, pack([*kept, sample([1, 2, 7, 7])]))
    other = score_row(model, pack([*kept, sample([1, 2, 7, 9])]))
    terms = 3 + 3 + 1
    assert torch.equal(one.logprobs[:terms], other.logprobs[:terms])
    assert not torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@settings(max_examples=10, deadline=None)
@given(samples=forests(most=6))
def test_a_tree_split_over_two_rows_gives_the_same_summed_gradient(attention: str, samples: list[Sample]) -> None:
    model = policy("llama", attention, False)
    whole = gradients(model, score_row(model, pack(samples)).logprobs.sum())
    half = max(1, len(samples) // 2)
    parts = [score_row(model, pack(part)).logprobs.sum() for part in (samples[:half], samples[half:]) if part]
    assert furthest(gradients(model, torch.stack(parts).sum()), whole) < 1e-9 or not any(
        gradient.any() for gradient in whole.values()
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_row_without_terms_reaches_the_parameters_that_a_full_row_reaches(checkpointing: bool) -> None:
    """With a zero for each: a rank that has nothing to train must still answer every collective."""
    model = policy("llama", "cpu", checkpointing)
    scores = score_row(model, pack([sample([3, 4], [1, 0])]))
    assert scores.logprobs.shape == (0,)
    found = gradients(model, scores.logprobs.sum())
    assert all(not gradient.any() for gradient in found.values())


def test_float32_agrees_with_float32_alone() -> None:
    model = tiny_policy(LlamaConfig, attention="cpu", dtype=torch.float32)
    samples = [sample([5, 6, 7, 8, 9]), sample([5, 6, 7, 10, 11]), sample([5, 6])]
    scores = score_row(model, pack(samples))
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    expected = scored_alone(tiny_model(LlamaConfig, dtype=torch.float32), samples)[0]
    torch.testing.assert_close(scores.logprobs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_equal_samples_alone_and_are_compiled_once_for_rows_of_all_sizes(checkpointing: bool) -> None:
    torch.compiler.reset()
    model, alone = tiny_model(LlamaConfig), plain("llama")
    compiled = build_policy(model, attention="cpu", gradient_checkpointing=checkpointing, compile_layers=True)
    graphs = []
    for rows in ([[1, 2, 3, 4], [1, 2, 5]], [[1, 2, 3, 4, 7, 8], [1, 2, 5], [3]], [[4, 5], [4, 8, 9, 1, 2, 3, 4]]):
        samples = [sample(tokens) for tokens in rows]
        ours, theirs = score_row(compiled, pack(samples)).logprobs, scored_alone(alone, samples)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert furthest(gradients(compiled, ours.sum()), gradients(alone, theirs.sum())) < 1e-9
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs == [graphs[0]] * 3
