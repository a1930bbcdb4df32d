"""Five real steps: real vLLM, real gloo transfer, the real rollout process, a real W&B file; every receipt green."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

from lit_rl import PolicyModule, RolloutDataModule, Sampling, VLLMServer, callbacks
from lit_rl.packing.paths import single_sequence_row
from tests.fakes.wandb_file import history
from tests.integration.conftest import RealServer
from tests.process.rewards_of_tests import share_of_letter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PROMPTS = [
    {"prompt": [{"role": "user", "content": f"Say {word}."}], "letter": word[0]}
    for word in ("apple", "bread", "cider", "dough", "eggs", "flour", "grape", "honey")
]


def test_five_steps_with_green_receipts(
    real_server: RealServer, model_dir: Path, tmp_path: Path, tokens: list[int]
) -> None:
    policy = PolicyModule(
        str(model_dir),
        gradient_checkpointing=False,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0),
    )
    data = RolloutDataModule(
        PROMPTS,  # a dataset as it is
        [share_of_letter],
        eval=PROMPTS[:2],
        engine=VLLMServer(url=real_server.url, model_name="policy", timeout=120.0, transfer_port=0),
        sampling=Sampling(temperature=0.7),
        num_generations=4,
        samples_per_rank=8,
        token_budget=0,
        accumulate_grad_batches=2,
        max_completion_length=8,
        worker_timeout=120.0,
    )
    logger = WandbLogger(save_dir=tmp_path, project="lit_rl", offline=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=5,
        logger=logger,
        default_root_dir=tmp_path,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        callbacks=[callbacks.Export(), callbacks.RunReport()],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(policy, data)

    assert trainer.global_step == 5
    assert data.policy_version == 6  # the cold sync made it 1
    rows = history(tmp_path)
    steps = [row for row in rows if "perf/step_s" in row]
    assert [row["sync/policy_version"] for row in steps] == [2, 3, 4, 5, 6]
    receipts = steps[1:]  # a row tells of the receipt of the sync before it
    assert all(row["sync/receipt_error"] < 1e-4 for row in receipts)
    assert all(row["sync/receipt_error"] < row["sync/receipt_moved"] / 4 for row in receipts)
    assert all(row["batch/samples_per_step"] == 16 and row["batch/microbatches_per_step"] == 2 for row in steps)
    # sampled by the policy of the cold sync: the same distribution on both sides, at temperature 0.7
    assert steps[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    assert all(math.isfinite(value) for row in steps for value in row.values() if isinstance(value, float))
    assert [row["trainer/global_step"] for row in rows if "eval/heldout/reward" in row] == [0, 5]
    assert np.abs(real_server.logprobs(tokens) - logprobs_of(policy, tokens)).mean() < 2e-5
    assert (tmp_path / "model" / "model.safetensors").exists() and (tmp_path / "reward.png").exists()


def logprobs_of(policy: PolicyModule, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return policy.score(single_sequence_row(torch.tensor(tokens)), 1.0).logprobs.numpy()
