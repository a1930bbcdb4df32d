"""Which pins and which device the quickstart takes, by the GPUs that the machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOUD = '#!/usr/bin/env bash\necho "$(basename "$0") $* [$LIT_RL_DEVICE]"\n'
CPU = ["setup_env.sh  [cpu]", "python scripts/prepare_model.py [cpu]"]
GPU = ["setup_env.sh  [gpu]", "python scripts/prepare_model.py [gpu]"]
FIT = "lit-rl fit --config configs/quickstart.yaml"


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(tmp_path: Path, gpus: int, *args: str, **env: str) -> tuple[list[str], str]:
    """What the script calls on a machine with so many GPUs, and what it says."""
    for name in ("scripts/setup_env.sh", ".venv/bin/python", ".venv/bin/lit-rl"):
        executable(tmp_path / name, LOUD)
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path / "scripts")
    listed = "".join(f"GPU {n}: NVIDIA X (UUID: GPU-{n})\n" for n in range(gpus))
    executable(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\nprintf '%s' '{listed}'\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("LIT_RL_DEVICE", "CUDA_VISIBLE_DEVICES")}
    clean["PATH"] = f"{tmp_path / 'bin'}:{clean['PATH']}"
    script = [str(tmp_path / "scripts" / "quickstart.sh"), *args]
    done = subprocess.run(script, env=clean | env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines(), done.stderr


def test_without_a_gpu_it_takes_the_cpu_pins(tmp_path: Path) -> None:
    assert run(tmp_path, 0, "--trainer.max_steps", "3") == ([*CPU, f"{FIT} --trainer.max_steps 3 [cpu]"], "")


def test_with_two_gpus_trainer_and_server_get_one_each(tmp_path: Path) -> None:
    calls, _ = run(tmp_path, 2, "--trainer.max_steps", "3")

    assert calls == [*GPU, f"{FIT} --trainer.accelerator gpu --trainer.max_steps 3 [gpu]"]


def test_with_one_gpu_it_takes_the_cpu_pins_and_says_so(tmp_path: Path) -> None:
    calls, said = run(tmp_path, 1)

    assert calls == [*CPU, f"{FIT} [cpu]"]
    assert said == "One GPU is not enough for trainer and server: both run on the CPU\n"


@pytest.mark.parametrize(("setting", "last"), [("", f"{FIT} [cpu]"), ("1,3", f"{FIT} --trainer.accelerator gpu [gpu]")])
def test_only_visible_gpus_count(tmp_path: Path, setting: str, last: str) -> None:
    assert run(tmp_path, 4, CUDA_VISIBLE_DEVICES=setting)[0][-1] == last


def test_the_device_may_be_given(tmp_path: Path) -> None:
    assert run(tmp_path, 2, LIT_RL_DEVICE="cpu") == ([*CPU, f"{FIT} [cpu]"], "")
