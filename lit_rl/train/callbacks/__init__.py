"""The callbacks that users name, and those that training cannot do without."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl

from lit_rl.train.callbacks.epochs import Epochs
from lit_rl.train.callbacks.export import Export
from lit_rl.train.callbacks.metrics import Metrics
from lit_rl.train.callbacks.report import RunReport
from lit_rl.train.callbacks.staleness import Staleness
from lit_rl.train.callbacks.weight_sync import WeightSync

__all__ = ["Epochs", "Export", "Metrics", "RunReport", "Staleness", "WeightSync", "missing_defaults"]


def missing_defaults(present: Iterable[pl.Callback]) -> list[pl.Callback]:
    """The default callbacks of which no instance is present, in the order in which they must run."""
    present = list(present)
    defaults = (WeightSync, Staleness, Epochs, Metrics)
    return [cls() for cls in defaults if not any(isinstance(callback, cls) for callback in present)]
