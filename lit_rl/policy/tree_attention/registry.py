"""Stop 11: the attention backends by the name that ``model.attention`` takes, made known to transformers."""

from __future__ import annotations

import importlib.util

import torch
from transformers import AttentionInterface, PretrainedConfig

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.cpu import cpu_attention
from lit_rl.policy.tree_attention.flex import flex_tree_attention
from lit_rl.policy.tree_attention.kernels import Needs, kinds_for, machine_of, require_kernel, warn_once_a_machine
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.policy.tree_attention.varlen import varlen_attention
from lit_rl.settings import require

PREFIX = "lit_rl_tree_"
BACKENDS = {
    "reference": reference_attention,
    "cpu": cpu_attention,
    "varlen": varlen_attention,
    "flex": flex_tree_attention,
}


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
    place, known = torch.device(device), name == "auto" or name in BACKENDS
    require("model.attention", name, known, f"give auto or one of {', '.join(sorted(BACKENDS))}")
    if name == "cpu":
        here = place.type == "cpu"
        require("model.attention", name, here, f"this backend runs on CPU only, the model is on {place}; use auto")
    elif name == "varlen":
        kinds_for(machine_of(place))
    elif name == "flex":
        remedy = "FlexAttention has no backward on CPU; use auto or cpu"
        require("model.attention", name, place.type != "cpu", remedy)
        remedy = "it is compiled with triton, which is not installed; use reference"
        require("model.attention", name, importlib.util.find_spec("triton") is not None, remedy)


def _require_for(config: PretrainedConfig, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SettingsError where a backend, which runs on the device, cannot run the model."""
    needs = Needs.of(config)
    if name == "cpu":
        remedy = "the CPU kernel cannot cap scores as this model does; use reference"
        require("model.attention", name, not needs.softcap, remedy)
        remedy = f"the CPU kernel needs keys ({needs.head_dim}) and values ({needs.value_dim}) of one width; "
        require("model.attention", name, needs.head_dim == needs.value_dim, remedy + "use reference")
    elif name == "varlen":
        require_kernel(device, config, dtype)
    elif name == "flex":
        narrowest = min(needs.head_dim, needs.value_dim)
        remedy = f"its kernel takes heads of 16 and wider, this model's are {narrowest}; use reference"
        require("model.attention", name, narrowest >= 16, remedy)
        require("model.attention", name, dtype != torch.float64, "its kernel has no float64; use reference")


def _best(device: torch.device, config: PretrainedConfig, dtype: torch.dtype) -> str:
    """The fastest backend that can do what the model asks for, and a line where another would be faster on a GPU."""
    for name in {"cpu": ("cpu",), "cuda": ("varlen", "flex")}.get(device.type, ()):
        try:
            require_backend(name, device)
            _require_for(config, name, device, dtype)
        except SettingsError as why:
            if device.type == "cuda":
                warn_once_a_machine("attention does not run on the %s backend: %s", name, why)
            continue
        return name
    return "reference"
