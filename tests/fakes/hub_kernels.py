"""Modules with the exact signatures of the flash kernels' low-level functions, which compute densely.

So an argument of another name fails, and so does one in the wrong place. The signatures are of
huggingface/kernels-community:

- flash-attn3/torch-ext/flash_attn3/flash_attn_interface.py at 5f632e25
- flash-attn4/torch-ext/flash_attn4/interface.py at 747528a5
- aiter-flash-attn/torch-ext/aiter_flash_attn/mha.py at 3c551ab4, mha_onekernel_bwd.py at 1267ac44

and of torch 2.13: torch/nn/attention/varlen.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fakes.attention_kernel import dense_backward, dense_forward


class Recorded:
    """What the functions below were called with last, by the function's name; tensors as their shapes."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}

    def __call__(self, name: str, arguments: dict[str, Any]) -> None:
        self.calls[name] = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in arguments.items()}


RECORD = Recorded()


def _fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    RECORD("forward", locals())
    assert causal and window_size_right == 0 and cu_seqlens_q is not None and cu_seqlens_k is not None
    output, lse = dense_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale or 0.0, window_size_left, softcap or None
    )
    return output, lse, torch.tensor([]), torch.tensor([])


def _fa3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    RECORD("backward", locals())
    assert is_causal and window_size_right == 0 and cu_seqlens_q is not None and cu_seqlens_k is not None
    assert dq is not None and dk is not None and dv is not None
    found = dense_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, softmax_scale or 0.0, window_size_left,
        softcap or None,
    )  # fmt: skip
    for buffer, gradient in zip((dq, dk, dv), found, strict=True):
        buffer.copy_(gradient)
    return torch.tensor([])


def _fa4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    m_block_size: int = 128,
    n_block_size: int = 128,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    RECORD("forward", locals())
    assert causal and window_size_right == 0 and cu_seqlens_q is not None and cu_seqlens_k is not None
    assert return_lse and softcap is None and window_size_left != -1
    return dense_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale or 0.0, window_size_left, None)


def _fa4_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    block_sparse_tensors: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    RECORD("backward", locals())
    assert causal and window_size_right == 0 and cu_seqlens_q is not None and cu_seqlens_k is not None
    assert window_size_left != -1
    return dense_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale or 0.0, window_size_left, None
    )


def _aiter_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    return_softmax: bool,
    max_seqlen_q: int,
    max_seqlen_k: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    sink: Tensor | None = None,
    config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    RECORD("forward", locals())
    assert causal and window_size_right == -1 and cu_seqlens_q is not None and cu_seqlens_k is not None
    assert bias is None and alibi_slopes is None and dropout_p == 0.0 and not return_softmax
    output, lse = dense_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left, None)
    return output, lse.T.contiguous(), None, 0, 0  # [N, heads] there


def _aiter_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
    sm_scale: float,
    alibi_slopes: Tensor | None,
    causal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    philox_seed: int | None = 0,
    philox_offset: int | None = 0,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    descale_do: Tensor | None = None,
    USE_INT64_STRIDES: bool | None = False,
    s_aux: Tensor | None = None,
    ds_aux: Tensor | None = None,
    config: dict[str, Any] | None = None,
    sliding_window: int = 0,
) -> Tensor:
    RECORD("backward", locals())
    assert causal and dbias is None and cu_seqlens_q is not None and cu_seqlens_k is not None
    assert not dq.any()  # it adds to dq
    found = dense_backward(
        do, q, k, v, o, softmax_lse.T, cu_seqlens_q, cu_seqlens_k, sm_scale, sliding_window or None, None
    )
    for buffer, gradient in zip((dq, dk, dv), found, strict=True):
        buffer.copy_(gradient)
    return torch.zeros_like(softmax_lse)


def _torch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    RECORD("forward", locals())
    assert window_size is not None and cu_seq_k is not None and is_causal == (window_size == [-1, 0])
    assert enable_gqa == (query.shape[1] != key.shape[1])
    output, lse = dense_forward(query, key, value, cu_seq_q, cu_seq_k, scale or 0.0, window_size[0], None)
    return output, lse, torch.zeros(2, dtype=torch.uint64)


def _torch_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    RECORD("backward", locals())
    assert window_size is not None and is_causal == (window_size == [-1, 0])
    assert rng_state.dtype == torch.uint64
    return dense_backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, scale or 0.0, window_size[0], None)


MODULES: dict[str, Any] = {
    "flash-attn3": SimpleNamespace(
        flash_attn_interface=SimpleNamespace(_flash_attn_forward=_fa3_forward, _flash_attn_backward=_fa3_backward)
    ),
    "flash-attn4": SimpleNamespace(
        interface=SimpleNamespace(_flash_attn_fwd=_fa4_forward, _flash_attn_bwd=_fa4_backward)
    ),
    "aiter-flash-attn": SimpleNamespace(
        mha=SimpleNamespace(_flash_attn_forward=_aiter_forward, flash_attn_onekernel_backward=_aiter_backward)
    ),
    "torch": SimpleNamespace(_varlen_attn=_torch_forward, _varlen_attn_backward=_torch_backward),
}
"""By the kernel's name; the last is ``torch.ops.torch_attn``."""
