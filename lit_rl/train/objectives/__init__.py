"""Stop 12: what YAML names under ``model.objective``: small frozen classes that choose among the pure functions.

An objective turns the scores of one row into the row's share of the step's loss and its metric contributions. It also
states what it asks of the rest: whether groups of equal rewards are dropped, and how many of its most likely tokens the
sampler must tell.
"""

from lit_rl.train.objectives.base import Objective, check_finite
from lit_rl.train.objectives.grpo import GRPO

__all__ = ["GRPO", "Objective", "check_finite"]
