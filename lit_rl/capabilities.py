"""Every combination of options that is refused, with the sentence that says what to do instead.

Checks are plain functions over what the user gave; they run before anything is loaded or started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rl.settings import require

TRAINER_DTYPES = {"32-true": "float32", "bf16-true": "bfloat16", "16-true": "float16", "bf16-mixed": "bfloat16"}
"""Compute dtype of each ``trainer.precision``; ``32-true`` keeps the dtype of the weights."""

SHORT_PRECISIONS = {"None": "32-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Other ways to write ``trainer.precision``, and what a Trainer makes of them."""

ONE_RANK = "this version trains on one device"


def check_module(module: Any) -> None:
    """Options of ``model.`` that cannot work, whatever the trainer is."""
    names = ("float32", "bfloat16", "float16", "auto")
    require("model.dtype", module.dtype_name, module.dtype_name in names, f"give one of {', '.join(names)}")
    clip = module.gradient_clip_val
    require("trainer.gradient_clip_val", clip, clip is None or clip > 0, "give a limit above 0, or null")
    algorithm = module.gradient_clip_algorithm
    require("trainer.gradient_clip_algorithm", algorithm, algorithm in ("norm", "value"), "give norm or value")
    clash = sorted({"attn_implementation", "dtype", "torch_dtype", "trust_remote_code"} & set(module.init_kwargs))
    require("model.init_kwargs", module.init_kwargs, not clash, f"{clash} have keys of their own under model.")


def check_data(data: Any) -> None:
    """Options of ``data.`` that cannot work, whatever the trainer is."""
    n = data.num_generations
    require("data.num_generations", n, n >= 2, "a group needs at least 2 rollouts for its baseline")
    require("data.num_generations_eval", data.num_generations_eval, data.num_generations_eval >= 1, "give 1 or more")
    length = data.max_completion_length
    require("data.max_completion_length", length, length >= 1, "give the number of tokens, 1 or more")
    require("data.samples_per_rank", data.samples_per_rank, data.samples_per_rank >= 1, "give 1 or more")
    require("data.queue_maxsize", data.queue_maxsize, data.queue_maxsize >= 1, "give a number of samples, 1 or more")
    require("data.score_queue_maxsize", data.score_queue_maxsize, data.score_queue_maxsize >= 1, "give 1 group or more")
    require("data.worker_timeout", data.worker_timeout, data.worker_timeout > 0, "give seconds above 0")
    ceiling = data.max_concurrent_rollouts
    require("data.max_concurrent_rollouts", ceiling, ceiling is None or ceiling >= 1, "give 1 or more, or null")
    require("data.rewards", data.rewards, bool(data.rewards), "give at least one reward function, by import path")
    accumulate = data.accumulate_grad_batches
    require("trainer.accumulate_grad_batches", accumulate, accumulate >= 1, "give 1 or more micro-batches per step")


def check_trainer_flags(flags: Mapping[str, Any], gpus: int) -> None:
    """What a Trainer would refuse in its own words or, worse, replace with a warning; before it is made.

    Args:
        flags: The Trainer's options as given.
        gpus: CUDA devices that torch sees.
    """
    accelerator = flags.get("accelerator", "auto")
    if isinstance(accelerator, str):
        known = ("auto", "cpu", "gpu", "cuda")
        require("trainer.accelerator", accelerator, accelerator in known, f"give one of {', '.join(known)}")
        require(
            "trainer.accelerator",
            accelerator,
            gpus > 0 or accelerator in ("auto", "cpu"),
            "torch sees no CUDA GPU here (nvidia-smi and CUDA_VISIBLE_DEVICES say more); give cpu, or auto",
        )
    _check_precision(str(flags.get("precision")))
    devices = flags.get("devices", "auto")
    require("trainer.devices", devices, str(devices) not in ("0", "[]"), f"{ONE_RANK}; give 1")
    strategy = flags.get("strategy", "auto")
    if isinstance(strategy, str):
        require("trainer.strategy", strategy, strategy in ("auto", "single_device"), f"{ONE_RANK}; give auto")


def check_checkpoint_path(path: Any) -> None:
    """``ckpt_path``: a file or folder of this machine that is not there, told before anything is loaded."""
    local = path is not None and "://" not in str(path) and not str(path).startswith("registry")
    there = not local or str(path) in ("last", "best", "hpc") or Path(path).exists()
    require("ckpt_path", str(path), there, "there is no such checkpoint; give its path, or last for the latest")


def check_one_rank(trainer: Any) -> None:
    """One device, one process; before a launcher starts more."""
    for key, value in (("trainer.devices", trainer.num_devices), ("trainer.num_nodes", trainer.num_nodes)):
        require(key, value, value == 1, f"{ONE_RANK}; give 1")
    strategy = type(trainer.strategy).__name__
    require("trainer.strategy", strategy, strategy.startswith("SingleDevice"), f"{ONE_RANK}; give auto")


def _check_precision(given: str) -> None:
    precision = SHORT_PRECISIONS.get(given, given)
    remedy = f"give one of {', '.join(TRAINER_DTYPES)}; 16-mixed needs a loss scaler, which is not built in"
    require("trainer.precision", given, precision in TRAINER_DTYPES, remedy)


def check_trainer(trainer: Any, module: Any, data: Any) -> None:
    """Combinations of trainer, model and data; called at set-up, before models and servers."""
    _check_precision(str(trainer.precision))
    check_one_rank(trainer)
    bounded = trainer.max_steps != -1 or trainer.max_epochs not in (None, -1)
    require(
        "trainer.max_steps",
        trainer.max_steps,
        bounded,
        "give it or trainer.max_epochs, or it never ends",
    )
    require("trainer.fast_dev_run", trainer.fast_dev_run, not trainer.fast_dev_run, "give trainer.max_steps: 1 instead")
    limited = trainer.limit_train_batches in (1.0, None)
    require("trainer.limit_train_batches", trainer.limit_train_batches, limited, "give trainer.max_steps instead")


def compute_dtype(precision: str, model_dtype: str) -> str:
    """The dtype in which the trainer forwards; a launched server is given the same.

    Example: ``bf16-mixed`` over float32 weights computes in ``bfloat16``; ``32-true`` over them in ``float32``.
    """
    return model_dtype if precision == "32-true" else TRAINER_DTYPES[precision]
