"""The script of README's quick tour, run as a user runs it, on the shared server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import RealServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_of_the_readme_trains(real_server: RealServer, model_dir: Path, tmp_path: Path) -> None:
    [script] = re.findall(r"```python\n(# train\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for written, here in {
        "models/SmolLM2-135M-Instruct": str(model_dir),
        "VLLMServer(launch=True)": f'VLLMServer(url="{real_server.url}", model_name="policy", transfer_port=0)',
        "max_steps=15": "max_steps=2",
        "samples_per_rank=60": "samples_per_rank=12",
        '"size": 64': '"size": 2',
        '["lit_rl.tasks.arithmetic.right_answer"]': '["tests.process.rewards_of_tests.length_of_answer"]',
    }.items():
        assert script.count(written) == 1
        script = script.replace(written, here)
    (tmp_path / "train.py").write_text(script)

    # another test's W&B service would write this run's files into its own folder
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=own | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["steps"] == 2
    assert None not in (summary["reward_last5"], summary["heldout_before"], summary["heldout_after"])
    assert (tmp_path / summary["model_dir"] / "model.safetensors").exists()
    assert list((tmp_path / summary["wandb_dir"]).glob("*.wandb"))
