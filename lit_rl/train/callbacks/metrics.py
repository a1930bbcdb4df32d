"""Ships what the window gathered to Lightning's loggers and the progress bar, once per logging window."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_rl.metrics import Mean, Stats, merge_into, values
from lit_rl.tensors import StepBatch

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

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.drain_stats()  # what came before the first step belongs to no step
        self._step_started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        step_s, self._step_started = now - self._step_started, now
        pl_module.contribute(self._time_stats(pl_module, batch, step_s))
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
    def _time_stats(pl_module: pl.LightningModule, batch: StepBatch, step_s: float) -> Stats:
        """Tokens per second on both bases; numerator and denominator stay apart over the window."""
        forwarded = sum(row.tree.num_tokens for row in batch.rows if row.sample_ids)
        trained = sum(len(row.terms) for row in batch.rows)
        fwd_bwd = pl_module.peek("perf/fwd_bwd_s")
        stats: Stats = {
            "perf/step_s": Mean(step_s),
            "perf/forwarded_tok_s_wall_clock": Mean(forwarded, step_s),
            "perf/trained_tok_s_wall_clock": Mean(trained, step_s),
        }
        if fwd_bwd is not None:
            stats["perf/forwarded_tok_s_fwd_bwd"] = Mean(forwarded, fwd_bwd)
        return stats

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
