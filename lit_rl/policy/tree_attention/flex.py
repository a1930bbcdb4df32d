"""Stop 11: the flex backend: torch's FlexAttention under a block mask, for trees too deep for copies of their keys.

Needs a GPU (Triton) to train; caps scores, takes sliding windows, has no dropout. No keys are copied, and the gradient
of a shared key is summed in float32 inside the kernel. The same row gives the same bits each time: dQ and dK/dV come
from loops of their own, without atomic additions.

Rows get new lengths all the time, and nothing is compiled for a length: only for each kind of call (with a window or
without, with gradients or without), once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.flex_blocks import BLOCK, block_mask
from lit_rl.policy.tree_attention.plan import TreePlan, of_one_dtype, required
from lit_rl.policy.tree_attention.reference import reference_attention

_ONE_KERNEL_FOR_ALL_LENGTHS = {
    # scale and cap are constants of a model; torch would make tensors of them, which its kernels do not take
    "specialize_float": True,
    # else compilations behind the first give each tensor a length of its own
    "automatic_dynamic_shapes": False,
    # compilations before torch raises: a model has four, and a process may hold several models
    "recompile_limit": 32,
}


def flex_tree_attention(
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

    A row of one block (128 tokens) has nothing to skip and takes the dense mask.

    Raises:
        SettingsError: tensors with gradients on a CPU.
    """
    plan = required(tree, attention_mask, query)
    if query.device.type == "cpu" and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise SettingsError(
            "model.attention", "flex", "FlexAttention has no backward on CPU; use model.attention=auto or cpu"
        )
    query, key, value = of_one_dtype(query, key, value)
    if plan.num_tokens <= BLOCK:
        return reference_attention(
            module, query, key, value, None, scaling=scaling, sliding_window=sliding_window, softcap=softcap, tree=plan
        )
    window = plan.binding(sliding_window)
    mask = plan.derived(("flex", window), lambda: block_mask(plan, window))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, mask, scale, softcap).transpose(1, 2).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None = None,
    *,
    compiled: bool = True,
) -> Tensor:
    """[1, heads, N, head_dim]; keys and values may have fewer heads. Gradients flow to all three on a GPU.

    Args:
        query: [1, heads, N, head_dim].
        key: [1, kv_heads, N, head_dim].
        value: [1, kv_heads, N, head_dim].
        mask: The row's.
        scale: Factor of the scores.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        compiled: Else torch's dense form, which reads the mask pair by pair and not its blocks; takes float64 and needs
            no compiler.
    """
    with torch.autocast(query.device.type, enabled=False):  # types are settled: one compilation with it and without
        if not compiled:
            return _flex(query, key, value, mask, scale, softcap)
        for tensor in (query, key, value):
            _only_length_varies(tensor)
        with torch._dynamo.config.patch(_ONE_KERNEL_FOR_ALL_LENGTHS):
            return _compiled()(query, key, value, mask, scale, softcap)


def _only_length_varies(tensor: Tensor) -> None:
    """Tells the compiler that sizes other than N are constants.

    It takes sizes that are equal in the first row it sees for equal in all: 8 heads and a row of 8 blocks, say. Then
    the next row would be compiled anew. A view is told apart by what it is a view of, too.
    """
    for seen in (tensor, tensor._base):
        if seen is not None:
            for axis, size in enumerate(seen.shape):
                if size != tensor.shape[2]:
                    torch._dynamo.mark_static(seen, axis)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_flex, dynamic=True, fullgraph=True)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, softcap: float | None) -> Tensor:
    output: Tensor = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # never another kernel on some GPUs: FLASH has no deterministic backward under a block mask before SM100
        kernel_options={"BACKEND": "TRITON"},
    )
    return output


def _capped(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score
