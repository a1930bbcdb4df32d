"""Operations of a row, against torch's own count of what the model really multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma2Config, GPTNeoXConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from lit_rl.packing.trie import pack
from lit_rl.policy.flops import FlopCount
from lit_rl.policy.forward import hidden_states
from tests.fakes.policies import tiny_policy
from tests.fakes.samples import sample

LAYERS, HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 2, 4, 8, 16, 19


@pytest.mark.parametrize(
    ("config", "options"),
    [(LlamaConfig, {}), (LlamaConfig, {"tie_word_embeddings": True}), (Qwen2Config, {}), (GPTNeoXConfig, {})],
    ids=["llama", "llama, tied", "qwen2", "gpt-neox"],
)
def test_the_layers_count_is_what_torch_counts(config: type[PretrainedConfig], options: dict[str, Any]) -> None:
    counted, count, tokens = counts(config, **options)
    assert counted == count.per_token * tokens  # torch does not count the fused attention of a CPU


def test_the_attention_count_is_what_torch_counts_where_it_is_written_out() -> None:
    counted, count, tokens = counts(Gemma2Config, attn_logit_softcapping=5.0, query_pre_attn_scalar=8)
    # the dense reference computes the pairs that the mask hides, too
    assert counted == count.per_token * tokens + count.per_pair * tokens**2


def counts(config: type[PretrainedConfig], **options: Any) -> tuple[int, FlopCount, int]:
    """Torch's count of the layers for one sequence, ours, and its tokens."""
    policy = tiny_policy(config, attention="reference", dtype=torch.float32, **options)
    row = pack([sample([1, 2, 3, 4, 5, 6, 7])])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden_states(policy, row)
    count = FlopCount.of(policy)
    assert count is not None
    return counter.get_total_flops(), count, row.tree.num_tokens


def test_a_shared_token_counts_once_and_each_place_of_the_head_once() -> None:
    count = FlopCount(per_token=100, per_pair=10, per_place=1)
    row = pack([sample([1, 2, 3], [0, 0, 1]), sample([1, 2, 4], [0, 0, 1])])
    # four tokens; 1 + 2 + 3 + 3 pairs; both targets hang on one place
    assert count.forward(row) == 4 * 100 + 9 * 10 + 1
    assert count.forward_and_backward(row) == 3 * count.forward(row)


def test_a_token_meets_only_some_experts() -> None:
    options: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    policy = tiny_policy(Qwen3MoeConfig, dtype=torch.float32, **options)
    count = FlopCount.of(policy)
    attention = HIDDEN * HEADS * HEAD_DIM * 2 + HIDDEN * 2 * HEAD_DIM * 2
    two_experts = 2 * (3 * HIDDEN * 8)
    router = 4 * HIDDEN
    assert count == FlopCount(
        per_token=2 * LAYERS * (attention + two_experts + router),
        per_pair=4 * LAYERS * HEADS * HEAD_DIM,
        per_place=2 * HIDDEN * VOCABULARY,
    )


def test_experts_of_unknown_number_give_no_count() -> None:
    policy = tiny_policy(Qwen3MoeConfig, dtype=torch.float32, num_experts=4, num_experts_per_tok=2)
    policy.config.num_experts_per_tok = 0
    assert FlopCount.of(policy) is None
