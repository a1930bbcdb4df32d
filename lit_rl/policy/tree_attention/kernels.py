"""Stop 11: which flash kernel runs the varlen backend on this machine.

====================================  ===========================  ===================
machine                               first                        where that is not to be had
====================================  ===========================  ===================
NVIDIA Hopper (9.0)                   FlashAttention-3 (hub)       torch's own, with a line that says so
NVIDIA Blackwell (10.x), Thor (11.x)  FlashAttention-4 (hub)       torch's own, with a line that says so
NVIDIA Ampere, Ada (8.x), 12.x        torch's own                  --
AMD on ROCm                           aiter (hub)                  an error that says what to install
====================================  ===========================  ===================

Kernels of the hub are fetched by the ``kernels`` package at run time, in the version that the adapter was written for.
``choose`` decides from facts alone; what cannot be had is found out by ``kernel_on``, one kernel after the other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants as hub
from huggingface_hub.errors import HfHubHTTPError
from transformers import PretrainedConfig

from lit_rl.errors import SettingsError
from lit_rl.policy.checkpoint import reach_hub
from lit_rl.policy.tree_attention.adapters import (
    Aiter,
    AttentionKernel,
    CoreTorch,
    FlashAttention3,
    FlashAttention4,
    KernelMissing,
)

__all__ = ["AttentionKernel", "Machine", "Needs", "choose", "kernel_for", "kernel_on", "require_kernel", "wrong_dtype"]

_log = logging.getLogger(__name__)


class Machine(NamedTuple):
    """Where attention runs.

    Attributes:
        vendor: ``nvidia``, ``amd``, or torch's device type where it is no GPU of these.
        capability: NVIDIA's compute capability.
        arch: AMD's architecture, for instance ``gfx942``.
    """

    vendor: str
    capability: tuple[int, int] = (0, 0)
    arch: str = ""


class Needs(NamedTuple):
    """What a model asks of the kernel.

    Attributes:
        head_dim: Width of a key in each head.
        value_dim: Width of a value.
        softcap: Whether scores are capped.
        deterministic: Whether the backward must repeat itself bit for bit.
    """

    head_dim: int
    value_dim: int
    softcap: bool = False
    deterministic: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig) -> Needs:
        """Of a model by its text configuration, as torch is set now."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys = getattr(config, "qk_head_dim", None) or width  # where keys are compressed, values have their own width
        values = getattr(config, "v_head_dim", None) or keys
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        return cls(keys, values, capped, torch.are_deterministic_algorithms_enabled())


class Kind(NamedTuple):
    """A kernel before it is loaded.

    Attributes:
        name: What messages call it.
        head_dim: Widest head.
        softcap: Whether it can cap scores.
        adapter: Wraps what was loaded.
        repo: Its repository on the hub; empty = it comes with torch.
        version: The repository's version branch. Within one, the hub's rules let nothing break. (The branch of
            flash-attn3 and the others that transformers 5.19 names in FLASH_ATTN_KERNEL_VERSIONS.)
    """

    name: str
    head_dim: int
    softcap: bool
    adapter: Callable[[Any], AttentionKernel]
    repo: str = ""
    version: int = 0


FA3 = Kind("flash-attn3", 256, True, FlashAttention3, "kernels-community/flash-attn3", 1)
# wider heads than 128 came after version 0, for a width of 256 alone
FA4 = Kind("flash-attn4", 128, False, FlashAttention4, "kernels-community/flash-attn4", 0)
AITER = Kind("aiter-flash-attn", 256, False, Aiter, "kernels-community/aiter-flash-attn", 2)
TORCH = Kind("torch", 256, False, CoreTorch)

# what aiter-flash-attn ships tuned settings for; it stops at its first call elsewhere
AITER_ARCHS = ("gfx942", "gfx950", "gfx1150", "gfx1151", "gfx1250")


def kinds_for(machine: Machine) -> tuple[Kind, ...]:
    """The kernels that run on a machine, the best first.

    Raises:
        SettingsError: there is none.
    """
    major, minor = machine.capability
    if machine.vendor == "amd":
        if machine.arch in AITER_ARCHS:
            return (AITER,)
        why = f"aiter-flash-attn runs on {', '.join(AITER_ARCHS)}, and this GPU is {machine.arch}"
    elif machine.vendor == "nvidia":
        if machine.capability == (9, 0):
            return FA3, TORCH
        if major in (10, 11):
            return FA4, TORCH
        if major in (8, 12):  # the hub's FlashAttention-4 asserts 9.x to 11.x; torch's own runs up to 12.1
            return (TORCH,)
        why = f"no flash kernel is known for compute capability {major}.{minor}"
    else:
        why = f"this backend runs on GPUs of NVIDIA and AMD, the model is on {machine.vendor}"
    remedy = "auto" if machine.vendor not in ("amd", "nvidia") else "flex"
    raise SettingsError("model.attention", "varlen", f"{why}; use model.attention={remedy}")


def refusal(kind: Kind, machine: Machine, needs: Needs) -> str | None:
    """Why a kernel cannot do what a model asks for; None = it can."""
    if needs.value_dim != needs.head_dim:
        return f"needs keys ({needs.head_dim}) and values ({needs.value_dim}) of one width"
    if needs.head_dim > kind.head_dim:
        return f"takes heads up to {kind.head_dim} wide, and this model's are {needs.head_dim}"
    if needs.head_dim % 8:
        return f"takes head widths that 8 divides, and this model's is {needs.head_dim}"
    if kind is FA3 and needs.deterministic and needs.head_dim > 192:
        return f"has no deterministic backward for heads {needs.head_dim} wide"
    small = machine.capability[0] == 12 or machine.capability in ((8, 6), (8, 7), (8, 9))
    if kind is TORCH and small and 192 < needs.head_dim <= 224:
        return f"has no backward for heads {needs.head_dim} wide on this GPU"
    if needs.softcap and not kind.softcap:
        return "cannot cap scores as this model does"
    return None


def choose(machine: Machine, needs: Needs, missing: Mapping[str, str] | None = None) -> Kind:
    """The kernel to load.

    Args:
        machine: Where it runs.
        needs: What the model asks for.
        missing: What cannot be had here: why, by the kernel's name.

    Raises:
        SettingsError: none is left; the message names each one's reason and what to do.
    """
    missing = missing or {}
    reasons, absent = [], []
    for kind in kinds_for(machine):
        why_not = refusal(kind, machine, needs)
        if why_not is None and kind.name not in missing:
            return kind
        if why_not is None:
            absent.append(kind)
            why_not = f"could not be had ({missing[kind.name]})"
        reasons.append(f"{kind.name} {why_not}")
    remedies = [how_to_get(kind) for kind in absent] + ["use model.attention=flex"]
    raise SettingsError("model.attention", "varlen", f"{'; '.join(reasons)}. {', or '.join(remedies)}")


def how_to_get(kind: Kind) -> str:
    """What to install or fetch so that a kernel of the hub is there, offline too."""
    return (
        "install 'lit_rl[kernels]' and let this machine reach the hub; offline, fetch the kernel on a like machine "
        f"(python -c \"import kernels; print(kernels.get_kernel('{kind.repo}', version={kind.version}).__file__)\"), "
        f"bring the folder that holds its build and set LOCAL_KERNELS={kind.repo}=FOLDER"
    )


def load(kind: Kind) -> AttentionKernel:
    """Imports a kernel, fetching it first where it is not cached.

    Raises:
        KernelMissing: no ``kernels`` package, no hub, no build for this machine, or a build of another shape.
    """
    if not kind.repo:
        import torch.nn.attention.varlen  # registers its operators

        return kind.adapter(torch.ops.torch_attn)
    # of the client's errors some are no OSError; which httpx it uses depends on its version
    of_client = tuple(one for one in HfHubHTTPError.__mro__ if one.__module__.startswith("httpx"))
    try:
        from kernels import get_kernel

        if kind.repo not in os.environ.get("LOCAL_KERNELS", ""):
            reach_hub(f"{hub.ENDPOINT}/{kind.repo}")  # its client would try for minutes, and then name another cause
        module = get_kernel(kind.repo, version=kind.version)
    except (ImportError, OSError, RuntimeError, ValueError, *of_client) as cause:
        raise KernelMissing(f"{type(cause).__name__}: {cause}".rstrip(".")) from cause
    return kind.adapter(module)


def kernel_on(machine: Machine, needs: Needs, loader: Callable[[Kind], AttentionKernel] = load) -> AttentionKernel:
    """The best kernel that can be had, loaded; says so in one line where it is not the best there is.

    Raises:
        SettingsError: none can be had, or none can do what the model asks for.
    """
    missing: dict[str, str] = {}
    while True:
        kind = choose(machine, needs, missing)
        try:
            kernel = loader(kind)
        except KernelMissing as cause:
            missing[kind.name] = str(cause)
            continue
        if missing:
            better = next(other for other in kinds_for(machine) if other.name in missing)
            warn_once_a_machine(
                "attention runs on %s's kernel: the faster %s could not be had (%s). For it, %s.",
                kind.name,
                better.name,
                missing[better.name],
                how_to_get(better),
            )
        return kernel


def warn_once_a_machine(message: str, *values: object) -> None:
    """A warning that only the first process of a machine gives."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning(message, *values)


def machine_of(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(device.type)
    if torch.version.hip:
        # gcnArchName is "gfx942:sramecc+:xnack-"
        return Machine("amd", arch=torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    return Machine("nvidia", torch.cuda.get_device_capability(device))


def kernel_for(device: torch.device, needs: Needs) -> AttentionKernel:
    """``kernel_on`` the machine of a device; loaded once."""
    return _loaded(machine_of(device), needs)


_loaded = cache(kernel_on)


def require_kernel(
    device: torch.device | str, config: PretrainedConfig, dtype: torch.dtype | None = None
) -> AttentionKernel:
    """The kernel that a model will run on, checked and loaded before training starts.

    Args:
        device: Where the model will run.
        config: Its text configuration.
        dtype: What attention will compute in, where it is known: autocast's type, or the weights'.

    Raises:
        SettingsError: as in ``kernel_on``, or the kernel does not compute in ``dtype``.
    """
    kernel = kernel_for(torch.device(device), Needs.of(config))
    if dtype is not None and dtype not in kernel.dtypes:
        raise wrong_dtype(kernel, dtype)
    return kernel


def wrong_dtype(kernel: AttentionKernel, dtype: torch.dtype) -> SettingsError:
    return SettingsError(
        "model.attention",
        "varlen",
        f"the kernel {kernel.name} takes bfloat16 and float16, and this model computes in {str(dtype)[6:]}; "
        "give trainer.precision=bf16-mixed or bf16-true, or model.attention=reference or flex",
    )
