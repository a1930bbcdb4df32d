"""Stop 11: the varlen backend for GPUs: one flash call over the root path of every leaf.

Keys and values of ancestors are gathered into a copy for each leaf below them (see chains.py). Only the row's own
queries, keys, values, the output and its log-sum-exp are kept for the backward, which gathers again. The gradients of a
key's copies are added up in float32 and rounded once: in bfloat16 the sum of 128 copies is off by 1.4e-2, this way by
2e-3 whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_rl.policy.tree_attention.adapters import AttentionKernel, Call
from lit_rl.policy.tree_attention.chains import Entries, entries_of
from lit_rl.policy.tree_attention.kernels import Needs, kernel_for, wrong_dtype
from lit_rl.policy.tree_attention.plan import TreePlan, of_one_dtype, required

ROWS_AT_ONCE = 32768
"""Rows of gathered gradients that are held in float32 at a time while they are added up."""


def varlen_backend(find: Callable[[torch.device, Needs], AttentionKernel]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function over a row, as transformers' ``AttentionInterface`` calls it.

    Args:
        find: Gives the kernel for a device and what a model asks of it; called for each layer, so it should remember.
    """

    def attention(
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
        """Shapes as in ``reference_attention``.

        Raises:
            SettingsError: no kernel for this device, or none that can do what the model asks for.
        """
        plan = required(tree, attention_mask, query)
        repeats = torch.are_deterministic_algorithms_enabled()
        kernel = find(query.device, Needs(query.shape[-1], value.shape[-1], softcap is not None, repeats))
        query, key, value = of_one_dtype(query, key, value)
        if query.dtype not in kernel.dtypes:
            raise wrong_dtype(kernel, query.dtype)
        window = plan.binding(sliding_window)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        call = Call(entries_of(plan, window), scale, window, softcap)
        return attend(query, key, value, call, kernel)[None], None

    return attention


varlen_attention = varlen_backend(kernel_for)


def attend(query: Tensor, key: Tensor, value: Tensor, call: Call, kernel: AttentionKernel) -> Tensor:
    """[N, heads, head_dim] out of [N, heads, head_dim] and twice [N, kv_heads, head_dim]; all three get gradients."""
    return _ChainAttention.apply(query, key, value, call, kernel)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, kernel: AttentionKernel) -> Tensor:
        keys, values = _gathered(key, call.entries), _gathered(value, call.entries)
        output, normaliser = kernel.forward(query, keys, values, call)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.call, ctx.kernel = call, kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        call: Call = ctx.call
        keys, values = _gathered(key, call.entries), _gathered(value, call.entries)
        grad_query, grad_keys, grad_values = ctx.kernel.backward(
            grad.contiguous(),
            query,
            keys,
            values,
            output,
            normaliser,
            call,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        places, tokens = call.entries.key_places, len(key)
        return grad_query, summed(grad_keys, places, tokens), summed(grad_values, places, tokens), None, None


def _gathered(packed: Tensor, entries: Entries) -> Tensor:
    """[keys of all entries, kv_heads, head_dim] out of [N, kv_heads, head_dim]."""
    return packed if entries.key_places is None else packed.index_select(0, entries.key_places)


def summed(copies: Tensor, places: Tensor | None, tokens: int) -> Tensor:
    """[tokens, ...]: what the copies [keys of all entries, ...] of each place add up to, in float32 or better.

    On CUDA ``index_add_`` adds atomically, in any order; under ``torch.use_deterministic_algorithms`` torch sorts first
    and adds in a fixed order.
    """
    if places is None:
        return copies
    precise = torch.promote_types(copies.dtype, torch.float32)
    total = copies.new_zeros(tokens, *copies.shape[1:], dtype=precise)
    for rows, at in zip(copies.split(ROWS_AT_ONCE), places.split(ROWS_AT_ONCE), strict=True):
        total.index_add_(0, at, rows.to(precise))
    return total.to(copies.dtype)
