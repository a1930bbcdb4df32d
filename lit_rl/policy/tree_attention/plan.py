"""Stop 11: what every attention backend derives from a row's layout, made once per row and handed to each layer.

The plan travels through ``model(..., tree=plan)``: transformers passes unknown keyword arguments on to the attention
function of every layer, under gradient checkpointing too, so that no state hangs on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_rl.errors import PackingError
from lit_rl.tensors import TreeLayout

_Derived = TypeVar("_Derived")


class TreePlan:
    """A row's layout and what backends have made of it so far.

    Args:
        layout: The row's segments; may lie on any device.
    """

    def __init__(self, layout: TreeLayout) -> None:
        self.layout = layout
        self._masks: dict[tuple[int | None, torch.device], Tensor] = {}
        self._derived: dict[Callable[[TreePlan], Any], Any] = {}

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @cached_property
    def longest_path(self) -> int:
        """Tokens of the longest sample."""
        return int(self.layout.position_ids.max()) + 1

    def derived(self, make: Callable[[TreePlan], _Derived]) -> _Derived:
        """``make(plan)``, made once per row however many layers ask."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return self._derived[make]

    def mask(self, device: torch.device, window: int | None = None) -> Tensor:
        """[N, N] bool, True where the row's token sees the column's token; made once per window.

        Args:
            device: Where the mask is needed.
            window: Sliding window: how many tokens up to itself a token sees, counted by depth in the tree.
        """
        key = (window, device)
        if key not in self._masks:
            self._masks[key] = ancestor_mask(self.layout.to(device), window)
        return self._masks[key]


def ancestor_mask(layout: TreeLayout, window: int | None = None) -> Tensor:
    """[N, N] bool: a token sees itself and the tokens above it.

    In depth-first order that is one interval per column: places ``k ... subtree_end(k) - 1`` see place k.
    """
    lengths = layout.segment_starts.diff()
    places = torch.arange(layout.num_tokens, device=layout.token_ids.device)
    last = torch.repeat_interleave(layout.subtree_ends, lengths)
    seen = (places[:, None] >= places[None, :]) & (places[:, None] < last[None, :])
    if window is not None:
        depth = layout.position_ids
        seen &= depth[:, None] - depth[None, :] < window
    return seen


def required(plan: TreePlan | None, attention_mask: Tensor | None, query: Tensor) -> TreePlan:
    """The plan, or an error that says how the model was called wrongly."""
    if plan is None:
        raise PackingError("tree attention was called without a row's layout; use lit_rl.policy.forward.score_row")
    if attention_mask is not None:
        raise PackingError("tree attention takes no attention mask: the row's layout says what each token sees")
    if query.shape[0] != 1 or query.shape[2] != plan.num_tokens:
        raise PackingError(f"queries of shape {tuple(query.shape)} do not fit a row of {plan.num_tokens} tokens")
    return plan
