"""Stop 13: tells the ledger what was trained, and ends training by the ledger's word."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_rl.tensors import StepBatch


class Epochs(pl.Callback):
    """Marks a step's groups as trained once the optimizer has moved; a checkpoint taken after it is consistent.

    When the step was the last one (``max_steps``, or every prompt has its outcome) it asks the trainer to stop, upon
    which Lightning validates a last time where there is a validation set.
    """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        stream = trainer.datamodule.stream
        stream.step_done()
        reached = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if reached or stream.finished:
            trainer.should_stop = True
