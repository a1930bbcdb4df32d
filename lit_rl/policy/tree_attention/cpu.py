"""Stop 11: the CPU backend: a cascade over segments, exact, near-linear in unique tokens, without mask or gather.

In depth-first order the places that see a segment's keys are one slice: the segment's own rows and, right behind them,
its whole subtree. The kernel aligns causal masks top-left, so a single causal call with that slice as queries and the
segment as keys lets own rows see their past and descendants see everything. The partial results of a row (one for each
segment on its path) are merged by their log-sum-exp.

The backward must not run through the merge. Given the *merged* output and log-sum-exp, the kernel's own backward
returns each call's exact share of dQ, dK and dV, since all that couples the shares is the row's normaliser.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.plan import TreePlan, required

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Call(NamedTuple):
    """Queries ``begin : tail`` against the keys ``begin : end`` of one segment."""

    begin: int
    end: int
    tail: int


class _Cascade(NamedTuple):
    """The calls of a row: the roots', and for each branching segment those of its children, which tile ``end : tail``."""

    roots: list[_Call]
    families: list[list[_Call]]

    @classmethod
    def of(cls, plan: TreePlan) -> _Cascade:
        starts = plan.layout.segment_starts.tolist()
        parents, tails = plan.layout.segment_parents.tolist(), plan.layout.subtree_ends.tolist()
        families: dict[int, list[_Call]] = {-1: []}
        for segment, parent in enumerate(parents):
            families.setdefault(parent, []).append(_Call(starts[segment], starts[segment + 1], tails[segment]))
        return cls(families.pop(-1), list(families.values()))


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
        SettingsError: a sliding window that is shorter than the row's longest sample, or soft-capped scores.
    """
    plan = required(tree, attention_mask, query)
    if softcap is not None:
        raise SettingsError("model.attention", "cpu", "the CPU kernel cannot cap scores; use model.attention=reference")
    if sliding_window is not None and sliding_window < plan.longest_path:
        raise SettingsError(
            "model.attention",
            "cpu",
            f"a sliding window of {sliding_window} cuts a sample of {plan.longest_path} tokens, which this backend "
            "cannot do; use model.attention=reference",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _TreeAttention.apply(query, key, value, plan.derived(_Cascade.of), scale)
    return output.transpose(1, 2), None


class _TreeAttention(torch.autograd.Function):
    """[1, heads, N, head_dim] out of queries, keys and values of a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, cascade: _Cascade, scale: float) -> Tensor:
        output, normaliser = _forward(query, key, value, cascade, scale)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.cascade, ctx.scale = cascade, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        rows, keys = (1, query.shape[2], query.shape[1], query.shape[3]), (1, key.shape[2], key.shape[1], key.shape[3])
        grad_query = query.new_zeros(rows).transpose(1, 2)
        grad_key, grad_value = key.new_empty(keys).transpose(1, 2), value.new_empty(keys).transpose(1, 2)
        for family in [ctx.cascade.roots, *ctx.cascade.families]:
            for begin, end, tail in family:
                of_query, of_key, of_value = _flash_backward(
                    grad[:, :, begin:tail],
                    query[:, :, begin:tail],
                    key[:, :, begin:end],
                    value[:, :, begin:end],
                    output[:, :, begin:tail],
                    normaliser[:, :, begin:tail],
                    0.0,
                    True,
                    scale=ctx.scale,
                )
                grad_query[:, :, begin:tail] += of_query
                # a key belongs to one segment, and its whole gradient comes from that segment's call
                grad_key[:, :, begin:end] = of_key
                grad_value[:, :, begin:end] = of_value
        return grad_query, grad_key, grad_value, None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, cascade: _Cascade, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, heads, N, head_dim] and log-sum-exp [1, heads, N] of every row over its whole path."""

    def run(family: list[_Call]) -> tuple[Tensor, Tensor]:
        parts = [
            _flash(query[:, :, b:t], key[:, :, b:e], value[:, :, b:e], 0.0, True, scale=scale) for b, e, t in family
        ]
        if len(parts) == 1:
            return parts[0]
        # joined along tokens in the memory order of the kernel: [1, N, heads, head_dim]
        output = torch.cat([part[0].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
        return output, torch.cat([part[1].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)

    output, normaliser = run(cascade.roots)
    for family in cascade.families:
        rows = slice(family[0].begin, family[-1].tail)
        below, below_normaliser = run(family)
        above, above_normaliser = output[:, :, rows], normaliser[:, :, rows]
        merged = torch.logaddexp(above_normaliser, below_normaliser)
        above.mul_((above_normaliser - merged).exp_().unsqueeze(-1).to(above.dtype))
        above.add_(below.mul_((below_normaliser - merged).exp_().unsqueeze(-1).to(above.dtype)))
        above_normaliser.copy_(merged)
    return output, normaliser
