"""Stop 8: the rule that drops samples of a policy that is too old, and its figures."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_rl.metrics import Max, Mean, Sum
from lit_rl.settings import require
from lit_rl.tensors import StepBatch


class Staleness(pl.Callback):
    """Owns the staleness rule. Without this callback nothing is dropped as stale.

    Staleness is the policy version under which a step runs minus the version under which the group's first rollout
    started. The stream asks ``keep`` on rank 0, also for samples left over from an earlier step; the prompts of dropped
    groups are sampled again.

    Args:
        max: Largest staleness that is trained, in weight syncs. 0 trains only on the newest policy's samples.
    """

    def __init__(self, max: int = 4) -> None:
        require("staleness.max", max, max >= 0, "give a number of weight syncs, 0 or more")
        self.max = max
        self._dropped = 0

    def keep(self, version_first: int, policy_version: int) -> bool:
        """Whether a group that began under ``version_first`` may be trained under ``policy_version``."""
        return policy_version - version_first <= self.max

    def count_dropped(self, samples: int) -> None:
        """The stream reports how many samples it dropped on this rule's word."""
        self._dropped += samples

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.datamodule.staleness = self

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        dropped, self._dropped = self._dropped, 0
        pl_module.contribute({"sample/dropped_stale_total": Sum(dropped)})
        staleness = [batch.policy_version - version for version in batch.sample_versions]
        if staleness:
            pl_module.contribute(
                {
                    "sample/staleness_mean": Mean.of(staleness),
                    "sample/staleness_max": Max(float(max(staleness))),
                }
            )
