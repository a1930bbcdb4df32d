"""Stop 14: brings the policy to the servers and proves that it arrived."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from lit_rl.capabilities import compute_dtype
from lit_rl.metrics import Last, Mean
from lit_rl.packing.paths import sample_tokens, single_sequence_row
from lit_rl.settings import require
from lit_rl.sync.receipts import judge, server_logprobs
from lit_rl.sync.transport import Transport
from lit_rl.tensors import StepBatch

PROBE_SEQUENCES = 2
"""Sequences per receipt. Their tokens moved by 1e-2 nats at lr 1e-6, a thousand times the noise of float32."""


class WeightSync(pl.Callback):
    """Sends the weights before the first rollout and after every ``every_n_steps`` optimizer steps.

    Each sync raises the policy version by one. Its receipt scores sequences of the step just trained on the server,
    before and after, and demands that the server now answers as the new policy does and no longer as it did.

    Args:
        every_n_steps: Optimizer steps between two syncs.
        timeout: Seconds that one call to the server may take; the engine's timeout by default.
        receipt: Whether each sync is proven. Costs a forward of two sequences and as much on the server.
    """

    def __init__(self, every_n_steps: int = 1, timeout: float | None = None, receipt: bool = True) -> None:
        require("weight_sync.every_n_steps", every_n_steps, every_n_steps >= 1, "give 1 or more")
        require("weight_sync.timeout", timeout, timeout is None or timeout > 0, "give seconds above 0, or null")
        self.every_n_steps = every_n_steps
        self.timeout = timeout
        self.receipt = receipt
        self.policy_version = 0
        self._transport: Transport | None = None
        self._synced_step = 0

    # ---- when -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._cold_sync(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.policy_version == 0:  # `lit-rl validate`: there was no fit start
            self._cold_sync(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._synced_step  # a skipped step leaves the version alone
        if stepped and trainer.global_step % self.every_n_steps == 0:
            self._sync(trainer, pl_module, _probes_of(batch))
            self._synced_step = trainer.global_step

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    # ---- how ------------------------------------------------------------------------------------------------------

    def _cold_sync(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits for the servers, opens the transfer and makes the policy version 1."""
        from lit_rl.policy.export import tensor_metadata

        data = trainer.datamodule
        data.connect()
        self._transport = data.sampler.transport(timeout=self._seconds(data))
        self._transport.open(tensor_metadata(pl_module.policy))
        self._synced_step = trainer.global_step
        self._sync(trainer, pl_module, [torch.tensor(ids) for ids in data.probe_prompts(PROBE_SEQUENCES)])

    def _sync(self, trainer: pl.Trainer, pl_module: pl.LightningModule, probes: list[Tensor]) -> None:
        """One sync with its receipt; raises SyncError or ReceiptError, and the version stays what it was."""
        from lit_rl.policy.export import named_tensors

        assert self._transport is not None
        data = trainer.datamodule
        # a server refuses a prompt that leaves no room for one more token
        probes = [probe[: data.max_model_len - 1] for probe in probes]
        started = time.perf_counter()
        before = [self._ask_servers(data, probe) for probe in probes] if self.receipt else []
        asked = time.perf_counter()
        timings = self._transport.push(named_tensors(pl_module.policy), self.policy_version + 1)
        pushed = time.perf_counter()
        if self.receipt:
            self._check_receipt(trainer, pl_module, probes, before)
        self.policy_version += 1
        data.set_policy_version(self.policy_version)
        ended = time.perf_counter()
        pl_module.contribute(
            {
                "perf/weight_sync_s": Mean(ended - started),
                "perf/weight_sync_pause_s": Mean(timings.pause_s),
                "perf/weight_sync_barrier_s": Mean(timings.barrier_s),
                "perf/weight_sync_transfer_s": Mean(timings.transfer_s),
                "perf/weight_sync_receipt_s": Mean(asked - started + ended - pushed),
                "sync/policy_version": Last(self.policy_version),
            }
        )

    def _check_receipt(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, probes: list[Tensor], before: list[np.ndarray]
    ) -> None:
        data = trainer.datamodule
        new = np.concatenate([_policy_logprobs(trainer, pl_module, probe) for probe in probes])
        after = np.concatenate([self._ask_servers(data, probe) for probe in probes], axis=1)
        dtype = compute_dtype(str(trainer.precision), pl_module.dtype_name)
        for url, was, answer in zip(data.endpoint.urls, np.concatenate(before, axis=1), after, strict=True):
            receipt = judge(answer, new, was, dtype=dtype, url=url)
            pl_module.contribute(
                {
                    "sync/receipt_error": Mean(receipt.error),
                    "sync/receipt_moved": Mean(receipt.moved),
                }
            )

    def _ask_servers(self, data: Any, token_ids: Tensor) -> np.ndarray:
        """[servers, T - 1]: each server's log-probs of the sequence, at temperature 1."""
        seconds = self._seconds(data)
        ids = token_ids.tolist()
        return np.stack(
            [server_logprobs(url, data.endpoint.model_name, ids, timeout=seconds) for url in data.endpoint.urls]
        )

    def _seconds(self, data: Any) -> float:
        return self.timeout if self.timeout is not None else data.engine.timeout


def _probes_of(batch: StepBatch) -> list[Tensor]:
    """Token ids of the step's samples with the largest advantages: they moved most."""
    found: list[tuple[float, Tensor]] = []
    for row in batch.rows:
        strength = torch.zeros(len(row.sample_ids), device=row.terms.advantages.device)
        strength.index_add_(0, row.terms.sample_index, row.terms.advantages.abs())
        order = strength.argsort(descending=True)[:PROBE_SEQUENCES].tolist()
        found += [(float(strength[s]), sample_tokens(row, s)) for s in order]
    found.sort(key=lambda item: -item[0])
    return [tokens for _, tokens in found[:PROBE_SEQUENCES]]


def _policy_logprobs(trainer: pl.Trainer, pl_module: pl.LightningModule, token_ids: Tensor) -> np.ndarray:
    """[T - 1] log-probs of the sequence under the trainer's policy, at temperature 1."""
    row = single_sequence_row(token_ids).to(pl_module.device)
    with torch.no_grad(), trainer.precision_plugin.val_step_context():
        scores = pl_module.score(row, 1.0)
    return scores.logprobs.float().cpu().numpy()
