"""The end of a run in a few lines: did the reward go up, and where is everything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, WandbLogger

from lit_rl.metrics import Mean
from lit_rl.tensors import StepBatch
from lit_rl.train.callbacks.export import Export
from lit_rl.types import EvalResult

EDGE_STEPS = 5


class RunReport(pl.Callback):
    """Prints a summary when everything has been stopped; its last line is one JSON object.

    ``{"steps", "reward_first5", "reward_last5", "heldout_before", "heldout_after", "train_minutes", "model_dir",
    "wandb_dir", "plot"}``; what the run does not have is null. Rewards are means over all scored rollouts of a step,
    groups that were then dropped included.

    Args:
        plot: Whether the reward curve is drawn into ``reward.png`` in the run's folder.
    """

    def __init__(self, plot: bool = True) -> None:
        self.plot = plot
        self._rewards: list[float] = []
        self._held_out: list[tuple[int, float]] = []
        self._started = self._ended = 0.0
        self._summary: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        self._ended = time.monotonic()
        reward = batch.stats.get("reward", Mean(0.0, 0.0)).value()
        if reward is not None:
            self._rewards.append(reward)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: EvalResult,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if dataloader_idx == 0:
            self._held_out.append((trainer.global_step, batch.reward))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gathers what every callback has done by now, and moves to the end of their line for the last word.

        The progress bar draws itself a last time in its own teardown.
        """
        trainer.callbacks = [*(c for c in trainer.callbacks if c is not self), self]
        folder = Path(trainer.default_root_dir)
        export = next((c for c in trainer.callbacks if isinstance(c, Export)), None)
        model_dir = export.saved_to if export is not None else None
        self._summary = {
            "steps": trainer.global_step,
            "reward_first5": _mean(self._rewards[:EDGE_STEPS]),
            "reward_last5": _mean(self._rewards[-EDGE_STEPS:]),
            "heldout_before": next((r for step, r in self._held_out if step == 0), None),
            "heldout_after": self._held_out[-1][1] if self._held_out and self._held_out[-1][0] > 0 else None,
            "train_minutes": round((self._ended - self._started) / 60, 2),
            "model_dir": str(model_dir) if model_dir else None,
            "wandb_dir": _wandb_dir(trainer.loggers),
            "plot": str(self._draw(folder / "reward.png")) if self.plot and self._rewards else None,
        }

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Last of all: servers and loggers have ended, so nothing is printed after this."""
        summary, self._summary = self._summary, None
        if summary is None:
            return
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()
        first, last = summary["reward_first5"], summary["reward_last5"]
        if first is not None and last is not None:
            print(f"\nmean reward: first {EDGE_STEPS} steps {first:.3f}, last {EDGE_STEPS} steps {last:.3f}")
        for what in ("heldout_before", "heldout_after"):
            if summary[what] is not None:
                print(f"{what.replace('_', ' ')}: {summary[what]:.3f}")
        for what in ("model_dir", "wandb_dir", "plot"):
            if summary[what] is not None:
                print(f"{what.replace('_', ' ')}: {summary[what]}")
        print(json.dumps(summary), flush=True)

    def _draw(self, path: Path) -> Path:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        steps = range(1, len(self._rewards) + 1)
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(steps, self._rewards, marker="o", markersize=3, label="training prompts, sampled")
        if self._held_out:
            axes.plot(*zip(*self._held_out, strict=True), "s--", label="held-out prompts, sampled")
        axes.set(xlabel="optimizer step", ylabel="mean reward", title="Reward", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _wandb_dir(loggers: list[Logger]) -> str | None:
    """The run's folder that `wandb sync` takes."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            return str(Path(logger.experiment.dir).parent)
    return None
