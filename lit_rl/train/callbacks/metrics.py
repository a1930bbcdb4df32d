"""Ships what the window gathered to Lightning's loggers and the progress bar, once per logging window."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lit_rl.capabilities import TRAINER_DTYPES
from lit_rl.metrics import Mean, Stats, merge_into, values
from lit_rl.tensors import StepBatch

if TYPE_CHECKING:  # brings transformers along, which `--help` need not wait for
    from lit_rl.policy.flops import FlopCount

PROGRESS_BAR = {
    "reward": "reward",
    "sample/staleness_mean": "staleness",
    "perf/forwarded_tok_s_wall_clock": "tok/s",
}


class Metrics(pl.Callback):
    """One call per logger every ``trainer.log_every_n_steps`` steps, with the exact merge of all contributions.

    Values also reach ``trainer.callback_metrics`` every step, so that ``ModelCheckpoint(monitor="reward")`` works.
    """

    def __init__(self) -> None:
        self._window: Stats = {}
        self._step_started = 0.0
        self._flops: FlopCount | None = None
        self._peak: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from lit_rl.policy.flops import FlopCount

        pl_module.drain_stats()  # what came before the first step belongs to no step
        self._peak = peak_flops(trainer, pl_module)
        self._flops = FlopCount.of(pl_module.policy) if self._peak is not None else None
        self._step_started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        step_s, self._step_started = now - self._step_started, now
        pl_module.contribute(throughput(batch, step_s, pl_module.peek("perf/fwd_bwd_s"), self._flops, self._peak))
        step = pl_module.drain_stats()
        merge_into(self._window, step)
        self._show(pl_module, values(step))
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._ship(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ship(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Held-out figures are logged at once, also those of the check before the first step."""
        found = pl_module.drain_stats() if not trainer.training else {}
        held_out = {name: stat for name, stat in found.items() if name.startswith("eval/")}
        for logger in trainer.loggers:
            logger.log_metrics(values(held_out), step=trainer.global_step)

    @staticmethod
    def _show(pl_module: pl.LightningModule, step: dict[str, float]) -> None:
        shown = {short: step[name] for name, short in PROGRESS_BAR.items() if name in step}
        silent = {name: value for name, value in step.items() if name not in shown}  # `reward` has one name for both
        for found, visible in ((silent, False), (shown, True)):
            pl_module.log_dict(found, prog_bar=visible, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)

    def _ship(self, trainer: pl.Trainer) -> None:
        window, self._window = self._window, {}
        found = values(window)
        if not found:
            return
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)


def throughput(
    batch: StepBatch, step_s: float, fwd_bwd_s: float | None, flops: FlopCount | None, peak: float | None
) -> Stats:
    """Tokens per second, and the model's share of what the device could compute, on both bases of time.

    Numerator and denominator stay apart over the window.

    Args:
        batch: The step, this rank's part.
        step_s: Seconds from the end of the step before to the end of this one.
        fwd_bwd_s: Seconds of forward and backward; None for a step that had nothing to train.
        flops: The model's operations; None where they are not known.
        peak: The device's operations per second; None where they are not known.
    """
    rows = [row for row in batch.rows if row.sample_ids]
    forwarded = sum(row.tree.num_tokens for row in rows)
    stats: Stats = {
        "perf/step_s": Mean(step_s),
        "perf/forwarded_tok_s_wall_clock": Mean(forwarded, step_s),
        "perf/trained_tok_s_wall_clock": Mean(sum(len(row.terms) for row in rows), step_s),
    }
    if fwd_bwd_s is not None:
        stats["perf/forwarded_tok_s_fwd_bwd"] = Mean(forwarded, fwd_bwd_s)
    if flops is not None and peak is not None:
        done = sum(flops.forward_and_backward(row) for row in rows)
        stats["perf/mfu_wall_clock"] = Mean(done, peak * step_s)
        if fwd_bwd_s is not None:
            stats["perf/mfu_fwd_bwd"] = Mean(done, peak * fwd_bwd_s)
    return stats


def peak_flops(trainer: pl.Trainer, pl_module: pl.LightningModule) -> float | None:
    """Operations per second of the training device at the training precision; None where Lightning's table has none."""
    precision = str(trainer.precision)
    dtype = pl_module.policy.dtype if precision == "32-true" else getattr(torch, TRAINER_DTYPES[precision])
    return get_available_flops(pl_module.device, dtype)
