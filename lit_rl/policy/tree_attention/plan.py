"""Stop 11: what every attention backend derives from a row's layout, made once per row and handed to each layer.

The plan travels through ``model(..., tree=plan)``: transformers passes unknown keyword arguments on to the attention
function of every layer, under gradient checkpointing too, so that no state hangs on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TypeVar

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
        self._derived: dict[Hashable, object] = {}

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @cached_property
    def longest_path(self) -> int:
        """Tokens of the longest sample."""
        return int(self.layout.position_ids.max()) + 1

    @cached_property
    def run_ends(self) -> Tensor:
        """[N] int64, where the segment of each place ends."""
        starts = self.layout.segment_starts
        return torch.repeat_interleave(starts[1:], starts.diff(), output_size=self.num_tokens)

    @cached_property
    def subtree_end_of_place(self) -> Tensor:
        """[N] int64: places ``k ... subtree_end_of_place[k] - 1`` see place k, and no others do."""
        sizes = self.layout.segment_starts.diff()
        return torch.repeat_interleave(self.layout.subtree_ends, sizes, output_size=self.num_tokens)

    def binding(self, window: int | None) -> int | None:
        """The window where it cuts some sample of the row, else None."""
        return window if window is not None and window < self.longest_path else None

    def derived(self, key: Hashable, make: Callable[[], _Derived]) -> _Derived:
        """``make()``, called once per row and key however many layers ask."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[return-value]

    def mask(self, window: int | None = None) -> Tensor:
        """[N, N] bool, True where the row's token sees the column's token.

        Args:
            window: Sliding window: how many tokens up to itself a token sees, counted by depth in the tree.
        """
        window = self.binding(window)
        return self.derived(("mask", window), lambda: self._mask(window))

    def _mask(self, window: int | None) -> Tensor:
        places = torch.arange(self.num_tokens, device=self.layout.token_ids.device)
        seen = (places[:, None] >= places) & (places[:, None] < self.subtree_end_of_place)
        if window is not None:
            depth = self.layout.position_ids
            seen &= depth[:, None] - depth < window
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


def of_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands in autocast's type where it is on: rotated queries and keys are float32 there, values are not."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    lower = torch.get_autocast_dtype(kind)
    return query.to(lower), key.to(lower), value.to(lower)
