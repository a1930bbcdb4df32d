"""Writes the trained policy as a checkpoint that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl


class Export(pl.Callback):
    """Saves the policy with its tokenizer when training ends, as safetensors.

    Args:
        folder: Where; ``model`` inside the run's folder by default.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.saved_to: Path | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from lit_rl.policy.export import save_checkpoint

        folder = Path(self.folder) if self.folder else Path(trainer.default_root_dir) / "model"
        save_checkpoint(pl_module.policy, trainer.datamodule.tokenizer, folder)
        self.saved_to = folder
