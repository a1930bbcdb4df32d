"""Stop 11: the attention backends by the name that ``model.attention`` takes, made known to transformers."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PretrainedConfig

from lit_rl.errors import SettingsError
from lit_rl.policy.tree_attention.cpu import cpu_attention
from lit_rl.policy.tree_attention.reference import reference_attention

PREFIX = "lit_rl_tree_"
BACKENDS = {"reference": reference_attention, "cpu": cpu_attention}


def register() -> None:
    """Makes the backends selectable as ``attn_implementation``; safe to call twice.

    No mask function is registered on purpose: for an implementation without one transformers builds no mask at all, and
    a row's layout says everything.
    """
    for name, function in BACKENDS.items():
        # under model.compile a row's plan, new for each row, must not be traced: it would be compiled anew each time
        AttentionInterface.register(PREFIX + name, torch.compiler.disable(function))


def resolve_attention(name: str, device: torch.device | str, config: PretrainedConfig | None = None) -> str:
    """The registered implementation for a value of ``model.attention``.

    Args:
        name: ``auto`` or a backend by name.
        device: Where the model will run.
        config: The model's text configuration; ``auto`` avoids a backend that cannot do what it asks for.

    Raises:
        SettingsError: no such backend, not for this device, or not for this model.
    """
    register()
    on_cpu = torch.device(device).type == "cpu"
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if name == "auto":
        name = "cpu" if on_cpu and not capped else "reference"
    if name not in BACKENDS:
        raise SettingsError("model.attention", name, f"give auto or one of {', '.join(sorted(BACKENDS))}")
    if name == "cpu" and not on_cpu:
        raise SettingsError(
            "model.attention", name, f"this backend runs on CPU only, the model is on {device}; use auto"
        )
    if name == "cpu" and capped:
        raise SettingsError(
            "model.attention", name, "the CPU kernel cannot cap scores as this model does; use reference"
        )
    return PREFIX + name
