"""Stop 11: the attention backends by the name that ``model.attention`` takes, made known to transformers."""

from __future__ import annotations

import importlib.util
import logging

import torch
from transformers import AttentionInterface, PretrainedConfig

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.cpu import cpu_attention
from lit_rl.policy.tree_attention.flex import flex_tree_attention
from lit_rl.policy.tree_attention.kernels import kinds_for, machine_of, require_kernel
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.policy.tree_attention.varlen import varlen_attention

PREFIX = "lit_rl_tree_"
BACKENDS = {
    "reference": reference_attention,
    "cpu": cpu_attention,
    "varlen": varlen_attention,
    "flex": flex_tree_attention,
}

_log = logging.getLogger(__name__)


def register() -> None:
    """Makes the backends selectable as ``attn_implementation``; safe to call twice.

    No mask function is registered on purpose: for an implementation without one transformers builds no mask at all, and
    a row's layout says everything.
    """
    for name, function in BACKENDS.items():
        # under model.compile a row's plan, new for each row, must not be traced: it would be compiled anew each time
        AttentionInterface.register(PREFIX + name, torch.compiler.disable(function))


def resolve_attention(
    name: str, device: torch.device | str, config: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> str:
    """The registered implementation for a value of ``model.attention``.

    Args:
        name: ``auto`` or a backend by name.
        device: Where the model will run.
        config: The model's text configuration.
        dtype: What attention will compute in: autocast's type, or the weights'.

    Raises:
        SettingsError: no such backend, not for this device, or not for this model.
    """
    register()
    place = torch.device(device)
    if name == "auto":
        return PREFIX + _best(place, config, dtype)
    require_backend(name, place)
    _require_for(config, name, place, dtype)
    return PREFIX + name


def require_backend(name: str, device: torch.device | str) -> None:
    """Raises SettingsError where ``model.attention`` names no backend, or one that does not run on the device."""
    place = torch.device(device)

    def require(ok: bool, remedy: str) -> None:
        if not ok:
            raise SettingsError("model.attention", name, remedy)

    require(name == "auto" or name in BACKENDS, f"give auto or one of {', '.join(sorted(BACKENDS))}")
    if name == "cpu":
        require(place.type == "cpu", f"this backend runs on CPU only, the model is on {place}; use auto")
    elif name == "varlen":
        kinds_for(machine_of(place))
    elif name == "flex":
        require(place.type != "cpu", "FlexAttention has no backward on CPU; use auto or cpu")
        compiler = importlib.util.find_spec("triton")
        require(compiler is not None, "it is compiled with triton, which is not installed; use reference")


def _require_for(config: PretrainedConfig, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SettingsError where a backend, which runs on the device, cannot run the model."""

    def require(ok: bool, remedy: str) -> None:
        if not ok:
            raise SettingsError("model.attention", name, remedy)

    if name == "cpu":
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        require(not capped, "the CPU kernel cannot cap scores as this model does; use reference")
    elif name == "varlen":
        require_kernel(device, config, dtype)
    elif name == "flex":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        require(width >= 16, f"its kernel takes heads of 16 and wider, this model's are {width}; use reference")
        require(dtype != torch.float64, "its kernel has no float64; use reference")


def _best(device: torch.device, config: PretrainedConfig, dtype: torch.dtype) -> str:
    """The fastest backend that can do what the model asks for, and a line where another would be faster on a GPU."""
    for name in {"cpu": ("cpu",), "cuda": ("varlen", "flex")}.get(device.type, ()):
        try:
            require_backend(name, device)
            _require_for(config, name, device, dtype)
        except SettingsError as why:
            if device.type == "cuda":
                _log.warning("attention does not run on the %s backend: %s", name, why)
            continue
        return name
    return "reference"
