"""Stop 11: the flash kernels behind one face: queries of all entries, keys of all entries, forward and backward.

Each adapter wraps a kernel's *low-level* pair, since the kernels' public functions keep the gathered keys alive for
their own autograd, and varlen.py gathers them again instead. Every mask here is causal, aligned bottom-right, and a
window of w tokens is a left window of ``w - 1``: the kernels count the tokens before a query's own.

No function of theirs promises to stay, so an adapter looks at the signatures when it is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.chains import Entries

HALVES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

Gradients = tuple[Tensor, Tensor, Tensor]


class KernelMissing(Exception):
    """A kernel cannot be had on this machine; the message says why, without a full stop."""


class Call(NamedTuple):
    """What a kernel is told beside its operands.

    Attributes:
        entries: Where each entry's queries and keys begin and end.
        scale: Factor of the scores.
        window: How many tokens, its own included, a query sees; None = all.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None = they stay.
    """

    entries: Entries
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def lengths(self) -> dict[str, Any]:
        """Where entries begin and end, under the names that FlashAttention gives them."""
        entries = self.entries
        return {
            "cu_seqlens_q": entries.cu_seqlens_q,
            "cu_seqlens_k": entries.cu_seqlens_k,
            "max_seqlen_q": entries.max_q,
            "max_seqlen_k": entries.max_k,
        }

    def left(self, unbounded: int | None) -> int | None:
        """How many tokens before its own a query sees; ``unbounded`` is the kernel's word for all."""
        return unbounded if self.window is None else self.window - 1


class AttentionKernel(Protocol):
    """A variable-length flash kernel.

    Attributes:
        name: What messages call it.
        dtypes: What it computes in.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Output [N, heads, head_dim] and log-sum-exp, in whatever shape ``backward`` wants it back.

        Args:
            query: [N, heads, head_dim], the entries' queries end to end.
            keys: [keys of all entries, kv_heads, head_dim]; each serves ``heads / kv_heads`` query heads.
            values: The same shape.
            call: The entries, and what the scores go through.
        """

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
        """Gradients of query, keys, values, given the output's; ``deterministic``: the same bits each time."""


class FlashAttention3:
    """FlashAttention-3 on Hopper.

    Signatures: huggingface/kernels-community, flash-attn3/torch-ext/flash_attn3/flash_attn_interface.py at 5f632e25,
    which is hopper/flash_attn_interface.py of Dao-AILab/flash-attention. Log-sum-exp: [heads, N] float32.
    """

    dtypes = HALVES

    def __init__(self, module: Any, name: str = "flash-attn3") -> None:
        self.name = name
        self._forward = _function(
            module,
            "flash_attn_interface._flash_attn_forward",
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal window_size_left "
            "window_size_right softcap",
        )
        self._backward = _function(
            module,
            "flash_attn_interface._flash_attn_backward",
            "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale "
            "is_causal window_size_left window_size_right softcap deterministic",
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        output, normaliser, *_ = self._forward(
            q=query,
            k=keys,
            v=values,
            **call.lengths,
            softmax_scale=call.scale,
            causal=True,
            window_size_left=call.left(-1),
            window_size_right=0,
            softcap=call.softcap or 0.0,
        )
        return output, normaliser

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
        gradients = torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values)
        self._backward(
            dout=grad,
            q=query,
            k=keys,
            v=values,
            out=output,
            softmax_lse=normaliser,
            **call.lengths,
            dq=gradients[0],
            dk=gradients[1],
            dv=gradients[2],
            softmax_scale=call.scale,
            is_causal=True,
            window_size_left=call.left(-1),
            window_size_right=0,
            softcap=call.softcap or 0.0,
            deterministic=deterministic,
        )
        return gradients


class FlashAttention4:
    """FlashAttention-4 on Blackwell, compiled on its first call.

    Signatures: huggingface/kernels-community, flash-attn4/torch-ext/flash_attn4/interface.py at 747528a5, which is
    flash_attn/cute/interface.py of Dao-AILab/flash-attention. No window is None there, not -1. Log-sum-exp: [heads, N]
    float32. Capped scores are refused: the forward makes a score modification of the cap, and the backward takes none
    in varlen calls.
    """

    dtypes = HALVES

    def __init__(self, module: Any, name: str = "flash-attn4") -> None:
        self.name = name
        lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal window_size_left "
        self._forward = _function(module, "interface._flash_attn_fwd", f"q k v {lengths} window_size_right return_lse")
        self._backward = _function(
            module, "interface._flash_attn_bwd", f"q k v out dout lse {lengths} window_size_right deterministic"
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        _no_softcap(self.name, call.softcap)
        output, normaliser, *_ = self._forward(
            q=query,
            k=keys,
            v=values,
            **call.lengths,
            softmax_scale=call.scale,
            causal=True,
            window_size_left=call.left(None),
            window_size_right=0,
            return_lse=True,
        )
        return output, normaliser

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
        of_query, of_keys, of_values, *_ = self._backward(
            q=query,
            k=keys,
            v=values,
            out=output,
            dout=grad,
            lse=normaliser,
            **call.lengths,
            softmax_scale=call.scale,
            causal=True,
            window_size_left=call.left(None),
            window_size_right=0,
            deterministic=deterministic,
        )
        return of_query, of_keys, of_values


class Aiter:
    """AMD's Triton kernels on ROCm.

    Signatures: huggingface/kernels-community, aiter-flash-attn/torch-ext/aiter_flash_attn: mha.py at 3c551ab4 and
    mha_onekernel_bwd.py at 1267ac44, from aiter/ops/triton/attention of ROCm/aiter. A right window is refused there, a
    left window of 0 means none. Log-sum-exp: [N, heads] float32. The backward is the one that adds without atomics:
    deterministic always.
    """

    dtypes = HALVES

    def __init__(self, module: Any, name: str = "aiter-flash-attn") -> None:
        self.name = name
        lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p alibi_slopes causal "
        self._forward = _function(
            module,
            "mha._flash_attn_forward",
            f"q k v {lengths} softmax_scale window_size_left window_size_right bias return_lse return_softmax",
        )
        self._backward = _function(
            module,
            "mha.flash_attn_onekernel_backward",
            f"do q k v o softmax_lse dq dk dv dbias sm_scale {lengths} USE_INT64_STRIDES sliding_window",
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        _no_softcap(self.name, call.softcap)
        if call.window == 1:
            raise SettingsError(
                "model.attention", "varlen", f"{self.name} has no sliding window of 1 token; use model.attention=flex"
            )
        output, normaliser, *_ = self._forward(
            q=query,
            k=keys,
            v=values,
            dropout_p=0.0,
            softmax_scale=call.scale,
            causal=True,
            window_size_left=call.left(-1),
            window_size_right=-1,
            bias=None,
            alibi_slopes=None,
            return_lse=True,
            return_softmax=False,
            **call.lengths,
        )
        return output, normaliser

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
        gradients = torch.zeros_like(query), torch.empty_like(keys), torch.empty_like(values)
        self._backward(
            do=grad,
            q=query,
            k=keys,
            v=values,
            o=output,
            softmax_lse=normaliser,
            dq=gradients[0],
            dk=gradients[1],
            dv=gradients[2],
            dbias=None,
            sm_scale=call.scale,
            alibi_slopes=None,
            causal=True,
            **call.lengths,
            dropout_p=0.0,
            USE_INT64_STRIDES=True,
            sliding_window=call.left(0),
        )
        return gradients


class CoreTorch:
    """FlashAttention-2 as torch brings it, on NVIDIA from Ampere on.

    Signatures: torch/nn/attention/varlen.py of torch 2.13. Log-sum-exp: [heads, N] float32. It takes ``deterministic``
    from ``torch.use_deterministic_algorithms`` itself.

    Args:
        ops: ``torch.ops.torch_attn``.
    """

    dtypes = HALVES

    def __init__(self, ops: Any, name: str = "torch") -> None:
        self.name = name
        self._forward, self._backward = ops._varlen_attn, ops._varlen_attn_backward

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        _no_softcap(self.name, call.softcap)
        output, normaliser, _ = self._forward(
            query=query,
            key=keys,
            value=values,
            cu_seq_q=call.entries.cu_seqlens_q,
            cu_seq_k=call.entries.cu_seqlens_k,
            max_q=call.entries.max_q,
            max_k=call.entries.max_k,
            is_causal=call.window is None,
            scale=call.scale,
            window_size=[call.left(-1), 0],
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return output, normaliser

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
        return self._backward(
            grad_out=grad,
            query=query,
            key=keys,
            value=values,
            out=output,
            lse=normaliser,
            cu_seq_q=call.entries.cu_seqlens_q,
            cu_seq_k=call.entries.cu_seqlens_k,
            max_q=call.entries.max_q,
            max_k=call.entries.max_k,
            is_causal=call.window is None,
            rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),  # of the dropout that there is not
            scale=call.scale,
            window_size=[call.left(-1), 0],
        )


def _function(module: Any, path: str, takes: str) -> Callable[..., Any]:
    """``module.path``, which must take these arguments by name.

    Raises:
        KernelMissing: it is not there, or is another function by now.
    """
    try:
        function = attrgetter(path)(module)
    except AttributeError as cause:
        raise KernelMissing(f"the build that was loaded has no {path}") from cause
    plain = getattr(function, "_init_fn", function)  # torch.library.custom_op keeps the Python function there
    unknown = [name for name in takes.split() if name not in inspect.signature(plain).parameters]
    if unknown:
        raise KernelMissing(f"{path} of the build that was loaded takes no {', '.join(unknown)}")
    return function


def _no_softcap(name: str, softcap: float | None) -> None:
    if softcap is not None:
        raise SettingsError("model.attention", "varlen", f"{name} cannot cap scores; use model.attention=flex")
