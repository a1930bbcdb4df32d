"""Stop 14: brings the policy to the servers and proves that it arrived."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from lit_rl.capabilities import compute_dtype
from lit_rl.errors import ReceiptError, ServerError, SyncError
from lit_rl.metrics import Last, Mean
from lit_rl.packing.paths import single_sequence_row
from lit_rl.settings import require
from lit_rl.sync.transport import SyncTimings, Transport
from lit_rl.tensors import StepBatch
from lit_rl.train.proof import PROBE_SEQUENCES, Proof, probes_of

LAST_BREATH_S = 2.0
"""From the first broken connection of a dying server until it has ended."""


class WeightSync(pl.Callback):
    """Sends the weights before the first rollout and after every ``every_n_steps`` optimizer steps.

    Each sync raises the policy version by one. Its receipt scores sequences of the step just trained on the servers,
    before and after, and demands that they now answer as the new policy does and no longer as they did. The servers'
    answers are awaited while the next step runs, and judged before the next sync, before an evaluation and at the end.

    Args:
        every_n_steps: Optimizer steps between two syncs.
        timeout: Seconds that one call to the server may take; the engine's timeout by default.
        receipt: Whether each sync is proven. Costs a forward of two sequences, and two prompts on each server.
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
        self._coming: Proof | None = None
        self._pending: Proof | None = None

    # ---- when -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._cold_sync(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.policy_version == 0:  # `lit-rl validate`: there was no fit start
            self._cold_sync(trainer, pl_module)
        self._settle(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """What the servers say of the step's samples before its sync is asked for while the step runs."""
        if self._pending is not None and self._pending.ready:
            self._settle(trainer, pl_module)
        if (trainer.global_step + 1) % self.every_n_steps == 0 and batch.totals.loss_terms:
            self._coming = self._proof(trainer.datamodule, probes_of(batch))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._synced_step  # a skipped step leaves the version alone
        if stepped and trainer.global_step % self.every_n_steps == 0:
            waited = time.perf_counter()
            self._settle(trainer, pl_module)
            self._sync(trainer, pl_module, waited)
            self._synced_step = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()  # before the data module's teardown ends the servers

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
        self._coming = self._proof(data, [torch.tensor(ids) for ids in data.probe_prompts(PROBE_SEQUENCES)])
        self._sync(trainer, pl_module, time.perf_counter())
        self._settle(trainer, pl_module)  # nothing is sampled before the first receipt is green

    def _sync(self, trainer: pl.Trainer, pl_module: pl.LightningModule, started: float) -> None:
        """Sends the weights and asks for the receipt; raises SyncError, and the version stays what it was."""
        from lit_rl.policy.export import named_tensors

        assert self._transport is not None
        data = trainer.datamodule
        waited_s = time.perf_counter() - started
        with _servers_own_words(data):
            timings = self._transport.push(named_tensors(pl_module.policy), self.policy_version + 1)
        self._pending, self._coming = self._coming, None
        pushed = time.perf_counter()
        if self._pending is not None:
            self._pending.synced(lambda probe: _policy_logprobs(trainer, pl_module, probe))
        self.policy_version += 1
        data.set_policy_version(self.policy_version)
        receipt_s = waited_s + time.perf_counter() - pushed
        self._contribute(pl_module, timings, receipt_s, time.perf_counter() - started)

    def _contribute(self, pl_module: Any, timings: SyncTimings, receipt_s: float, total_s: float) -> None:
        pl_module.contribute(
            {
                "perf/weight_sync_s": Mean(total_s),
                "perf/weight_sync_pause_s": Mean(timings.pause_s),
                "perf/weight_sync_barrier_s": Mean(timings.barrier_s),
                "perf/weight_sync_transfer_s": Mean(timings.transfer_s),
                "perf/weight_sync_receipt_s": Mean(receipt_s),
                "sync/policy_version": Last(self.policy_version),
            }
        )

    def _proof(self, data: Any, probes: list[Tensor]) -> Proof | None:
        return Proof(data.endpoint, probes, data.max_model_len, self._seconds(data)) if self.receipt else None

    def _settle(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Judges the receipt that is due, if there is one; raises ReceiptError."""
        proof, self._pending = self._pending, None
        if proof is None:
            return
        with _servers_own_words(trainer.datamodule):
            receipts = proof.settle(compute_dtype(str(trainer.precision), pl_module.dtype_name))
        for receipt in receipts:
            pl_module.contribute({"sync/receipt_error": Mean(receipt.error), "sync/receipt_moved": Mean(receipt.moved)})

    def _seconds(self, data: Any) -> float:
        return self.timeout if self.timeout is not None else data.engine.timeout


@contextmanager
def _servers_own_words(data: Any) -> Iterator[None]:
    """Where the launched server has ended, its log says more than the connection that broke."""
    try:
        yield
    except (SyncError, ServerError) as failure:
        if not isinstance(failure, ReceiptError):
            data.sampler.check_alive(patience=LAST_BREATH_S)
        raise


def _policy_logprobs(trainer: pl.Trainer, pl_module: Any, token_ids: Tensor) -> np.ndarray:
    """[T - 1] log-probs of the sequence under the trainer's policy, at temperature 1."""
    row = single_sequence_row(token_ids).to(pl_module.device)
    with torch.no_grad(), trainer.precision_plugin.val_step_context():
        scores = pl_module.score(row, 1.0)
    return scores.logprobs.float().cpu().numpy()
