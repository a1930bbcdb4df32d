"""Stop 14: the policy's tensors under the names that its checkpoint has, for the sampling server and for disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion


class TensorInfo(NamedTuple):
    """What a receiver must know before a tensor arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its checkpoint name, detached, always in the same order.

    A tied head comes under its own name too: a server that keeps a copy of the head would otherwise go on using the old
    one. Weights that transformers holds fused (experts) come apart as in the checkpoint.
    """
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        yield from revert_weight_conversion(model, state).items()


def tensor_metadata(model: PreTrainedModel) -> list[TensorInfo]:
    """Name, dtype and shape of each tensor of ``named_tensors``, in its order."""
    return [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors(model)]


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path) -> Path:
    """Writes safetensors, configuration and tokenizer; ``AutoModelForCausalLM.from_pretrained(folder)`` loads them.

    Args:
        model: The policy; whole weights, on any device.
        tokenizer: Its tokenizer; None writes none.
        folder: Where to write; made if absent.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
