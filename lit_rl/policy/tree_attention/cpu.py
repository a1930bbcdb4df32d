"""Stop 11: the CPU backend: a cascade of flash calls over a row's segments, exact and near-linear in unique tokens.

The partial results of a place (one for each call that covers it) are merged by their log-sum-exp. The backward must not
run through the merge. Given the *merged* output and log-sum-exp, the kernel's own backward returns each call's exact
share of dQ, dK and dV, since all that couples the shares is the place's normaliser.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.cascade import Block, blocks
from lit_rl.policy.tree_attention.plan import TreePlan, of_one_dtype, required

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_attention(
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
    """Attention over a row, as transformers' ``AttentionInterface`` calls it; shapes as in ``reference_attention``.

    Raises:
        SettingsError: soft-capped scores, or values of another width than keys.
    """
    plan = required(tree, attention_mask, query)
    if softcap is not None:
        raise SettingsError("model.attention", "cpu", "the CPU kernel cannot cap scores; use model.attention=reference")
    if value.shape[-1] != key.shape[-1]:
        raise SettingsError(
            "model.attention",
            "cpu",
            f"the CPU kernel needs keys ({key.shape[-1]}) and values ({value.shape[-1]}) of one width; "
            "use model.attention=reference",
        )
    query, key, value = of_one_dtype(query, key, value)
    window, dtype = plan.binding(sliding_window), query.dtype
    calls = plan.derived(("cascade", window, dtype), lambda: blocks(plan, window, dtype))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, calls, scale).transpose(1, 2), None


def attend(query: Tensor, key: Tensor, value: Tensor, calls: list[Block], scale: float) -> Tensor:
    """[1, heads, N, head_dim]; keys and values may have fewer heads. Gradients flow to all three."""
    return _TreeAttention.apply(query, key, value, calls, scale)


class _TreeAttention(torch.autograd.Function):
    """[1, heads, N, head_dim] out of queries, keys and values of a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: list[Block], scale: float) -> Tensor:
        output = _like(query)
        # the kernel's own memory order of the log-sum-exp: heads innermost
        normaliser = query.new_empty(1, query.shape[2], query.shape[1], dtype=_precise(query.dtype)).transpose(1, 2)
        for block in reversed(calls):  # descendants first: what they found is there to merge with
            size, own = block.cover - block.begin, block.end - block.begin
            part, part_normaliser = _flash(
                query.narrow(2, block.begin, size),
                key.narrow(2, block.begin, own),
                value.narrow(2, block.begin, own),
                0.0,
                block.mask is None,
                attn_mask=block.mask,
                scale=scale,
            )
            if block.blind is not None:  # the kernel gives 0 where it should give minus infinity
                part_normaliser = part_normaliser.masked_fill(block.blind, -torch.inf)
            output.narrow(2, block.begin, own).copy_(part.narrow(2, 0, own))
            normaliser.narrow(2, block.begin, own).copy_(part_normaliser.narrow(2, 0, own))
            if size > own:
                _merge(
                    output.narrow(2, block.end, size - own),
                    normaliser.narrow(2, block.end, size - own),
                    part.narrow(2, own, size - own),
                    part_normaliser.narrow(2, own, size - own),
                )
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.calls, ctx.scale = calls, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        grad_query, grad_key, grad_value = _like(query), _like(key), _like(value)
        for block in reversed(ctx.calls):
            begin, size, own = block.begin, block.cover - block.begin, block.end - block.begin
            of_query, of_key, of_value = _flash_backward(
                grad.narrow(2, begin, size),
                query.narrow(2, begin, size),
                key.narrow(2, begin, own),
                value.narrow(2, begin, own),
                output.narrow(2, begin, size),
                normaliser.narrow(2, begin, size),
                0.0,
                block.mask is None,
                attn_mask=block.mask,
                scale=ctx.scale,
            )
            # a key belongs to one call, which gives all of its gradient; a query's is the sum over its path
            grad_key.narrow(2, begin, own).copy_(of_key)
            grad_value.narrow(2, begin, own).copy_(of_value)
            grad_query.narrow(2, begin, own).copy_(of_query.narrow(2, 0, own))
            if size > own:
                grad_query.narrow(2, block.end, size - own).add_(of_query.narrow(2, own, size - own))
        return grad_query, grad_key, grad_value, None, None


def _merge(output: Tensor, normaliser: Tensor, part: Tensor, part_normaliser: Tensor) -> None:
    """Adds a partial result [1, heads, n, head_dim] to what the places have, weighted by their log-sum-exps."""
    merged = torch.logaddexp(normaliser, part_normaliser)
    output.mul_((normaliser - merged).exp_().unsqueeze(-1))
    output.addcmul_(part, (part_normaliser - merged).exp_().unsqueeze(-1).to(part.dtype))
    normaliser.copy_(merged)


def _like(tensor: Tensor) -> Tensor:
    """Uninitialised [1, heads, N, width] with tokens outermost in memory, as transformers wants it back."""
    return tensor.new_empty(1, tensor.shape[2], tensor.shape[1], tensor.shape[3]).transpose(1, 2)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
