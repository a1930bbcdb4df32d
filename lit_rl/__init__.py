"""lit_rl: online reinforcement learning of language models on PyTorch Lightning.

What users name in YAML and in scripts is importable from here. The names load lazily, so that the rollout process and
``import lit_rl`` stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "GRPO": "lit_rl.train.objectives",
    "Objective": "lit_rl.train.objectives",
    "PolicyModule": "lit_rl.train.module",
    "RolloutDataModule": "lit_rl.train.data",
    "Engine": "lit_rl.engines.base",
    "VLLMServer": "lit_rl.engines.vllm_server",
    "RolloutLoop": "lit_rl.rollout.loop",
    "Rollout": "lit_rl.types",
    "RolloutGroup": "lit_rl.types",
    "TurnRecord": "lit_rl.types",
    "Sampling": "lit_rl.settings",
    "Reward": "lit_rl.settings",
    "DatasetSpec": "lit_rl.settings",
    "DatasetFunction": "lit_rl.settings",
    "LitRLError": "lit_rl.errors",
}
_MODULES = {"callbacks": "lit_rl.train.callbacks"}

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'lit_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
