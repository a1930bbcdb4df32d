"""From a checkpoint to the policy: a causal language model whose attention runs over trees."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_rl.errors import SettingsError
from lit_rl.policy.checkpoint import LOCATION, require_model
from lit_rl.policy.checks import dropout_attributes, refuse_unsupported
from lit_rl.policy.tree_attention.registry import resolve_attention
from lit_rl.settings import require

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def build_policy(
    pretrained: str | PreTrainedModel,
    *,
    dtype: str = "float32",
    init_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    attention: str = "auto",
    gradient_checkpointing: bool = True,
    disable_dropout: bool = False,
    compile_layers: bool = False,
    device: torch.device | str | None = None,
    compute_dtype: str | None = None,
) -> PreTrainedModel:
    """Loads the policy, in training mode, with tree attention, refusing what would train wrongly.

    Args:
        pretrained: Folder or hub id; or a model, taken as it is (``dtype`` and ``init_kwargs`` are its maker's).
        dtype: Of the loaded weights: ``float32``, ``bfloat16``, ``float16``, ``float64``, ``auto`` (as stored).
        init_kwargs: More arguments of ``from_pretrained``, for instance ``{"revision": "main"}``.
        trust_remote_code: Whether code of the checkpoint may run.
        attention: ``auto`` or a backend by name.
        gradient_checkpointing: Recompute each layer in the backward.
        disable_dropout: Set every dropout of the model to 0.
        compile_layers: Run each decoder layer through ``torch.compile``, with dynamic shapes.
        device: Where the weights are loaded and the model will run, which decides what ``auto`` means. When None,
            torch's default device, or where a model given as an object is.
        compute_dtype: What the trainer's precision computes in; the weights' own when None.

    Raises:
        SettingsError: names ``model.pretrained``, ``model.attention``, ... and the remedy.
    """
    if isinstance(pretrained, PreTrainedModel):
        return prepare_policy(
            pretrained if device is None else pretrained.to(device),
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            disable_dropout=disable_dropout,
            compile_layers=compile_layers,
            compute_dtype=compute_dtype,
        )
    extra = _checked_kwargs(init_kwargs)
    place = torch.get_default_device() if device is None else torch.device(device)
    config = _load_config(pretrained, trust_remote_code, extra)
    computed = _torch_dtype(compute_dtype or dtype) or config.dtype or torch.float32
    implementation = resolve_attention(attention, place, config.get_text_config(), computed)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            pretrained,
            dtype=_torch_dtype(dtype) or "auto",
            attn_implementation=implementation,
            trust_remote_code=trust_remote_code,
            **extra,
        )
    except (OSError, ValueError, SafetensorError) as cause:
        raise SettingsError("model.pretrained", pretrained, f"it cannot be loaded: {cause}") from cause
    model.to(place)
    return prepare_policy(
        model,
        gradient_checkpointing=gradient_checkpointing,
        disable_dropout=disable_dropout,
        compile_layers=compile_layers,
        compute_dtype=compute_dtype,
    )


def prepare_policy(
    model: PreTrainedModel,
    *,
    attention: str | None = None,
    gradient_checkpointing: bool = True,
    disable_dropout: bool = False,
    compile_layers: bool = False,
    compute_dtype: str | None = None,
) -> PreTrainedModel:
    """Makes a loaded model the policy (it is changed in place); also for a model given as an object.

    Args:
        model: A causal language model.
        attention: Backend to switch to; None keeps the one that it has.
        gradient_checkpointing: Recompute each layer in the backward.
        disable_dropout: Set every dropout of the model to 0.
        compile_layers: Run each decoder layer through ``torch.compile``, with dynamic shapes.
        compute_dtype: What the trainer's precision computes in; the weights' own when None.

    Raises:
        SettingsError: the model has something that tree attention cannot do, or there is nothing to compile with.
    """
    computed = (_torch_dtype(compute_dtype) if compute_dtype else None) or model.dtype
    if attention is not None:
        config = model.config.get_text_config()
        model.set_attn_implementation(resolve_attention(attention, model.device, config, computed))
    if disable_dropout:
        remove_dropout(model)
    refuse_unsupported(model, computed)
    if gradient_checkpointing:
        # the reentrant kind loses gradients of keyword arguments
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    if compile_layers:
        _compile(model)
    return model.train()


def _compile(model: PreTrainedModel) -> None:
    """Layer by layer: one compilation serves all layers, and names of parameters stay what they are."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    name = type(model).__name__
    require("model.compile", True, bool(layers), f"{name} has no decoder layers that can be compiled; give false")
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    found = model.device.type != "cpu" or any(shutil.which(compiler) for compiler in compilers)
    require("model.compile", True, found, f"on CPU it needs a C++ compiler ({' or '.join(compilers)}); give false")
    for layer in layers:
        layer.compile(dynamic=True)


def remove_dropout(model: PreTrainedModel) -> None:
    """Sets every dropout probability of the model to 0, in its modules and in its configuration."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in dropout_attributes(module):
            setattr(module, name, 0.0)
    config = model.config.get_text_config()
    for name in dropout_attributes(config):
        setattr(config, name, 0.0)


def _checked_kwargs(init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    extra = dict(init_kwargs or {})
    keys = {
        "dtype": "model.dtype",
        "torch_dtype": "model.dtype",
        "attn_implementation": "model.attention",
        "trust_remote_code": "model.trust_remote_code",
        "quantization_config": "model.quantization",
    }
    for name, key in keys.items():
        if name in extra:
            raise SettingsError("model.init_kwargs", {name: extra[name]}, f"this has a key of its own: {key}")
    return extra


def _torch_dtype(name: str) -> torch.dtype | None:
    """None for ``auto``."""
    if name != "auto" and name not in _DTYPES:
        raise SettingsError("model.dtype", name, f"give auto or one of {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def _load_config(pretrained: str, trust_remote_code: bool, extra: dict[str, Any]) -> PretrainedConfig:
    """The checkpoint's configuration; decides within seconds that there is none to be had."""
    require_model(pretrained, extra)
    located: dict[str, Any] = {name: extra[name] for name in LOCATION if name in extra}
    try:
        return AutoConfig.from_pretrained(pretrained, trust_remote_code=trust_remote_code, **located)
    except (OSError, ValueError) as cause:
        raise SettingsError("model.pretrained", pretrained, f"its configuration cannot be loaded: {cause}") from cause
