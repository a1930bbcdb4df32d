"""A stand-in for the flash kernels of GPUs: the same face, dense arithmetic in float64, entry by entry.

Like them, its backward trusts the output and the log-sum-exp that it is given, and gives its gradients in the operands'
type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.policy.tree_attention.adapters import Call, Gradients


class DenseKernel:
    """Takes any type, float64 too.

    Attributes:
        deterministic: What each backward was told, in order.
        gathered: Keys that each forward was given, in order.
    """

    name = "dense stand-in"
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        self.deterministic: list[bool] = []
        self.gathered: list[int] = []

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        self.gathered.append(len(keys))
        entries = call.entries
        return dense_forward(
            query, keys, values, entries.cu_seqlens_q, entries.cu_seqlens_k, call.scale, call.left(-1), call.softcap
        )

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        normaliser: Tensor,
        call: Call,
        deterministic: bool,
    ) -> Gradients:
        self.deterministic.append(deterministic)
        entries = call.entries
        return dense_backward(
            grad,
            query,
            keys,
            values,
            output,
            normaliser,
            entries.cu_seqlens_q,
            entries.cu_seqlens_k,
            call.scale,
            call.left(-1),
            call.softcap,
        )


def seen(queries: int, keys: int, left: int | None) -> Tensor:
    """[queries, keys] bool: causal, aligned bottom-right; ``left`` tokens before a query's own, -1 or None = all."""
    last = torch.arange(queries)[:, None] + keys - queries
    places = torch.arange(keys)
    causal = places <= last
    return causal if left is None or left < 0 else causal & (places >= last - left)


def dense_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    left: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [N, heads, head_dim] and log-sum-exp [heads, N], which float32 operands and lower give in float32."""
    precise = torch.promote_types(query.dtype, torch.float32)
    output, normaliser = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0], dtype=precise)
    for of_queries, of_keys in _slices(cu_seqlens_q, cu_seqlens_k):
        q, k, v = _expanded(query[of_queries], keys[of_keys], values[of_keys])
        scores = _scores(q, k, scale, softcap).masked_fill(~seen(q.shape[1], k.shape[1], left), -torch.inf)
        output[of_queries] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        normaliser[:, of_queries] = scores.logsumexp(-1).to(precise)
    return output, normaliser


def dense_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    normaliser: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    left: int | None,
    softcap: float | None,
) -> Gradients:
    of_query, of_keys, of_values = torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values)
    kv_heads = keys.shape[1]
    for at, among in _slices(cu_seqlens_q, cu_seqlens_k):
        q, k, v = _expanded(query[at], keys[among], values[among])
        scores = _scores(q, k, scale, softcap)
        weights = (scores - normaliser[:, at].double()[..., None]).exp()
        weights = weights.masked_fill(~seen(q.shape[1], k.shape[1], left), 0.0)
        g, o = grad[at].double().transpose(0, 1), output[at].double().transpose(0, 1)
        of_scores = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        if softcap:
            of_scores = of_scores * (1 - (scores / softcap) ** 2)
        of_query[at] = (of_scores @ k).transpose(0, 1).to(query.dtype)
        grouped = (of_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for total, part in zip((of_keys, of_values), grouped, strict=True):
            total[among] = part.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1).to(total.dtype)
    return of_query, of_keys, of_values


def _slices(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def _expanded(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[heads, tokens, head_dim] in float64, keys and values once for each query head."""
    repeats = query.shape[1] // keys.shape[1]
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (query, keys, values))
    return q, k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)


def _scores(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    scores = query @ keys.transpose(1, 2) * scale
    return torch.tanh(scores / softcap) * softcap if softcap else scores
