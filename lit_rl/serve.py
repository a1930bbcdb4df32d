"""``lit-rl serve``: the server that a run would launch, started by itself or shown as a line for a shell."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from lit_rl.capabilities import SHORT_PRECISIONS, check_trainer_flags
from lit_rl.engines.gpus import visible_gpus
from lit_rl.engines.installed import obstacle_to_serving
from lit_rl.engines.plan import ServerPlan
from lit_rl.engines.process import require_free
from lit_rl.engines.vllm_server import DEFAULT_URL, VLLMServer
from lit_rl.errors import ServerError, SettingsError
from lit_rl.settings import require
from lit_rl.train.data import RolloutDataModule
from lit_rl.train.module import PolicyModule


def serve(
    module: PolicyModule, data: RolloutDataModule, trainer: Mapping[str, Any], *, words: Sequence[str], show: bool
) -> None:
    """Becomes the server, or prints it on stdout; all else goes to stderr.

    Args:
        module: The policy, weights not loaded.
        data: The data, not set up.
        trainer: The Trainer's options; no Trainer is made, for the GPU that it would look for may be elsewhere.
        words: The command line after ``lit-rl``.
        show: Print the command line and the environment instead of starting it.
    """
    with contextlib.redirect_stdout(sys.stderr):  # whatever a dataset's function may print
        plan = server_plan(module, data, trainer)
    if not show:
        _require_servable(trainer_device(trainer["accelerator"]))
        require_free(plan.url)
    says = f"The server will answer at {plan.url}. Train against it with\n  {fit_line(words, plan.url, data.engine)}\n"
    print(says, file=sys.stderr, flush=True)
    if show:
        print(plan.shell(), flush=True)
    else:
        os.execvpe(plan.command[0], plan.command, plan.environment(os.environ))


def _require_servable(device: Literal["cpu", "cuda"]) -> None:
    obstacle = obstacle_to_serving(device)
    if device == "cuda" and not torch.cuda.is_available():
        obstacle = "torch sees no CUDA GPU (nvidia-smi and CUDA_VISIBLE_DEVICES say more)"
    if obstacle is not None:
        raise ServerError(f"no server can be started here: {obstacle}; `lit-rl serve --print` shows its command line")


def server_plan(module: PolicyModule, data: RolloutDataModule, trainer: Mapping[str, Any]) -> ServerPlan:
    """The server that a run of this configuration would launch, at ``data.engine.url``.

    Raises:
        LitRLError: the configuration cannot work, for instance a dataset that cannot be loaded.
    """
    engine = data.engine
    if not isinstance(engine, VLLMServer):
        raise SettingsError("data.engine", type(engine).__name__, "only a vLLM server can be served: lit_rl.VLLMServer")
    require("data.engine.urls", engine.urls, engine.urls is None, "serve starts one server; give data.engine.url")
    url = engine.url or DEFAULT_URL
    require("data.engine.url", url, urlsplit(url).scheme == "http", "the server speaks plain http")
    check_trainer_flags(trainer, gpus=1)  # the trainer's GPU may be another machine's
    precision, device = str(trainer["precision"]), trainer_device(trainer["accelerator"])
    trainer_devices, visible_devices = _gpus(engine, device, trainer["devices"])
    data.load_prompts(module)
    needs = data.engine_needs(
        module,
        precision=SHORT_PRECISIONS.get(precision, precision),
        device=device,
        trainer_devices=trainer_devices,
        visible_devices=visible_devices,
        run_dir=Path(),
    )
    return replace(engine, url=url).plan(needs)


def trainer_device(accelerator: Any) -> Literal["cpu", "cuda"]:
    """What ``trainer.accelerator`` means: ``auto`` is a GPU where torch sees one."""
    if not isinstance(accelerator, str):
        raise SettingsError("trainer.accelerator", accelerator, "serve takes auto, cpu, gpu or cuda, not an object")
    on_cuda = torch.cuda.is_available() if accelerator == "auto" else accelerator != "cpu"
    return "cuda" if on_cuda else "cpu"


def _gpus(engine: VLLMServer, device: str, devices: Any) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """The trainer's GPUs and the visible ones, as ``EngineNeeds`` takes them.

    A server by itself may run on another machine than the trainer. Only where several GPUs are seen and none was chosen
    does it leave those alone that the trainer would take on this machine; else it gets what was asked for.
    """
    visible = visible_gpus(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device == "cpu" or engine.devices is not None or len(visible) < 2:
        return (), visible if engine.devices is not None and visible else None
    taken = _taken(devices, len(visible))
    return (tuple(taken), visible) if set(range(len(visible))) - set(taken) else ((), None)


def _taken(devices: Any, count: int) -> list[int]:
    """Places of the trainer's GPUs: ``trainer.devices`` 2 or "2" are the first two, [3] or "3," is the fourth."""
    if devices in ("auto", "-1", -1):
        return list(range(count))
    try:
        if isinstance(devices, str) and "," in devices:
            devices = [int(place) for place in devices.split(",") if place.strip()]
        return devices if isinstance(devices, list) else list(range(int(devices)))
    except ValueError as cause:
        raise SettingsError("trainer.devices", devices, "give a number of GPUs, or a list of their places") from cause


def fit_line(words: Sequence[str], url: str, engine: Any) -> str:
    """The command that trains against the served engine: the same words, and what says that it runs already."""
    same = [word for word in words if word != "--print"]
    same[same.index("serve")] = "fit"
    key = "--data.engine.init_args."
    given = {f"{key}launch": "false", f"{key}url": url}
    # options of a launched server, which a run that launches none refuses
    given |= {f"{key}devices": "null"} if engine.devices is not None else {}
    given |= {f"{key}log_file": "null"} if engine.log_file is not None else {}
    given |= {f"{key}extra_args": "[]"} if engine.extra_args else {}
    return shlex.join(["lit-rl", *same, *(word for pair in given.items() for word in pair)])
