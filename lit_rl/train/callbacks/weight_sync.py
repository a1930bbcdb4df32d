"""Stop 14: brings the policy to the servers and proves that it arrived."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from lit_rl.capabilities import compute_dtype
from lit_rl.engines.http import Background
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
        self._probes: list[Tensor] = []
        self._before: Background[np.ndarray] | None = None

    # ---- when -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._cold_sync(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.policy_version == 0:  # `lit-rl validate`: there was no fit start
            self._cold_sync(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """What the server says of the step's samples before the sync is asked for while the step runs."""
        if (trainer.global_step + 1) % self.every_n_steps == 0 and batch.totals.loss_terms:
            self._ask_before(trainer.datamodule, _probes_of(batch))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._synced_step  # a skipped step leaves the version alone
        if stepped and trainer.global_step % self.every_n_steps == 0:
            self._sync(trainer, pl_module)
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
        self._ask_before(data, [torch.tensor(ids) for ids in data.probe_prompts(PROBE_SEQUENCES)])
        self._sync(trainer, pl_module)

    def _ask_before(self, data: Any, probes: list[Tensor]) -> None:
        """Chooses the receipt's sequences and has the servers score them under the weights that they have."""
        if not self.receipt:
            return
        # a server refuses a prompt that leaves no room for one more token
        self._probes = [probe[: data.max_model_len - 1] for probe in probes]
        self._before = Background(lambda: self._ask_servers(data), "receipt-before")

    def _sync(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One sync with its receipt; raises SyncError or ReceiptError, and the version stays what it was."""
        from lit_rl.policy.export import named_tensors

        assert self._transport is not None
        data = trainer.datamodule
        started = time.perf_counter()
        before = None if self._before is None else self._before.result(self._seconds(data))
        asked = time.perf_counter()
        timings = self._transport.push(named_tensors(pl_module.policy), self.policy_version + 1)
        pushed = time.perf_counter()
        if before is not None:
            self._check_receipt(trainer, pl_module, before)
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

    def _check_receipt(self, trainer: pl.Trainer, pl_module: pl.LightningModule, before: np.ndarray) -> None:
        data = trainer.datamodule
        answers = Background(lambda: self._ask_servers(data), "receipt-after")
        new = np.concatenate([_policy_logprobs(trainer, pl_module, probe) for probe in self._probes])
        after = answers.result(self._seconds(data))
        self._before = None
        dtype = compute_dtype(str(trainer.precision), pl_module.dtype_name)
        for url, was, answer in zip(data.endpoint.urls, before, after, strict=True):
            receipt = judge(answer, new, was, dtype=dtype, url=url)
            pl_module.contribute(
                {
                    "sync/receipt_error": Mean(receipt.error),
                    "sync/receipt_moved": Mean(receipt.moved),
                }
            )

    def _ask_servers(self, data: Any) -> np.ndarray:
        """[servers, tokens]: each server's log-probs of all probes, one after the other, at temperature 1.

        All questions are asked at once: behind a full server each would wait its turn.

        Raises:
            ServerError: a server did not answer in time, or refused.
        """
        seconds, name = self._seconds(data), data.endpoint.model_name

        def ask(url: str, probe: Tensor) -> Background[np.ndarray]:
            ids = probe.tolist()
            return Background(lambda: server_logprobs(url, name, ids, timeout=seconds), f"receipt {url}")

        asked = [[ask(url, probe) for probe in self._probes] for url in data.endpoint.urls]
        return np.stack([np.concatenate([question.result(seconds) for question in of_url]) for of_url in asked])

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
