"""Stop 11: the dense reference: one [N, N] mask per row, any device; what the other backends are tested against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.policy.tree_attention.plan import TreePlan, required


def reference_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree: TreePlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over a row, as transformers' ``AttentionInterface`` calls it.

    Args:
        module: The model's attention module.
        query: [1, heads, N, head_dim].
        key: [1, kv_heads, N, head_dim].
        value: [1, kv_heads, N, head_dim].
        attention_mask: None; the row's layout takes its place.
        scaling: Factor of the scores; ``head_dim ** -0.5`` by default.
        sliding_window: How far back a token sees, by depth in the tree.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        tree: The row's plan.

    Returns:
        [1, N, heads, head_dim], and None for the weights.
    """
    plan = required(tree, attention_mask, query)
    mask = plan.mask(sliding_window)
    if softcap is None:
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[None, None], scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        output = _capped(query, key, value, mask, scaling or query.shape[-1] ** -0.5, softcap)
    return output.transpose(1, 2).contiguous(), None


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention written out, for scores that no fused kernel caps; softmax in float32 or better."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap)) * softcap
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = scores.to(precise).masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return weights @ value
