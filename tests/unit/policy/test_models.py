"""The families that packing is checked with, each as a tiny random model, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from lit_rl.errors import SettingsError
from lit_rl.packing.trie import pack
from lit_rl.policy.build import build_policy
from lit_rl.policy.forward import score_row
from tests.fakes.policies import SIZES, furthest, gradients, scored_alone, tiny_model, tiny_policy
from tests.fakes.samples import sample

ROWS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 7], [1, 2, 8, 9], [1, 2, 8, 5, 5, 5], [1, 3], [9, 8, 7, 6, 5, 4, 3, 2]]

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "mistral, window 4": (MistralConfig, {"sliding_window": 4}),
    "gemma3, window 4": (Gemma3TextConfig, {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma2, window 4, head capped": (
        Gemma2Config,
        {
            "sliding_window": 4,
            "attn_logit_softcapping": None,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gpt-neox": (GPTNeoXConfig, {"num_key_value_heads": 4}),
    "granite, logits divided": (GraniteConfig, {"logits_scaling": 4.0}),
}


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packing_is_exact_in_each_family(family: str, attention: str) -> None:
    config, options = FAMILIES[family]
    check(config, options, attention, torch.float64, 1e-9)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        # transformers' eager attention, norms of Cohere and grouped experts compute in float32 whatever the model has
        (Gemma2Config, {"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
        (CohereConfig, {"logit_scale": 0.3}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    ],
    ids=["gemma2, scores capped", "cohere, logits multiplied", "qwen3-moe"],
)
def test_packing_agrees_in_float32_where_the_family_has_no_float64(
    config: type[PretrainedConfig], options: dict[str, Any]
) -> None:
    check(config, options, "auto", torch.float32, 1e-5)


def check(
    config: type[PretrainedConfig], options: dict[str, Any], attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    samples = [sample(tokens) for tokens in ROWS]
    packed = tiny_policy(config, attention=attention, dtype=dtype, **options)
    alone = tiny_model(config, dtype=dtype, **options)
    scores = score_row(packed, pack(samples))
    weights = torch.linspace(-1.0, 2.0, len(scores.logprobs), dtype=dtype)
    logprobs, _ = scored_alone(alone, samples)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=tolerance, atol=tolerance)
    ours = gradients(packed, (scores.logprobs * weights).sum())
    assert furthest(ours, gradients(alone, (logprobs * weights).sum())) < tolerance


def test_recurrent_layers_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"Qwen3NextForCausalLM.*linear_attention"):
        tiny_policy(Qwen3NextConfig)


def test_convolutions_are_refused_because_they_look_along_the_row() -> None:
    with pytest.raises(SettingsError, match="conv"):
        tiny_policy(Lfm2Config, layer_types=["conv", "full_attention"])


def test_attention_sinks_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"GptOssForCausalLM.*attention sinks"):
        build_policy(GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)))


def test_dropout_is_refused_with_the_remedy_and_the_remedy_works() -> None:
    with pytest.raises(SettingsError, match=r"model\.disable_dropout = False.*transformer\.drop.*set it to true"):
        tiny_policy(GPT2Config, n_embd=16, n_layer=2, n_head=4)
    model = tiny_model(GPT2Config, n_embd=16, n_layer=2, n_head=4)
    policy = build_policy(model, disable_dropout=True)
    row = pack([sample([1, 2, 3])])
    assert torch.equal(score_row(policy, row).logprobs, score_row(policy, row).logprobs)


def test_positions_that_depend_on_the_longest_sample_are_refused() -> None:
    with pytest.raises(SettingsError, match="dynamic positions"):
        tiny_policy(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


def test_a_layer_that_looks_along_the_row_is_caught_whatever_it_is_called() -> None:
    model = tiny_model(LlamaConfig)
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, output: output + output.cumsum(1))
    with pytest.raises(SettingsError, match="one branch reach another"):
        build_policy(model)


def test_a_head_that_does_more_than_a_product_is_caught() -> None:
    model = tiny_model(LlamaConfig)
    plain = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(SettingsError, match="logits are made in a way"):
        build_policy(model)
