"""Floating-point operations of a packed row, for the utilisation of the training device (``perf/mfu_*``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lit_rl.policy.forward import output_head
from lit_rl.tensors import PackedRow

BACKWARD = 2
"""A product's backward is two products of its size; recomputed activations are no work of the model's."""


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Multiplications and additions of one forward, by what they are done for.

    Counted as in PaLM (arXiv 2204.02311, appendix B): matrix products only, two operations for each weight and token.
    A shared token is forwarded once, so it counts once, and attention counts the pairs that the tree really has.

    Attributes:
        per_token: In the layers, for each unique token.
        per_pair: In the attention of all layers, for each (query, key) pair.
        per_place: In the output head, for each place that predicts something.
    """

    per_token: int
    per_pair: int
    per_place: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> FlopCount | None:
        """The model's count; None for a mixture of experts whose config does not say how many of them a token meets."""
        head, config = output_head(model), model.config.get_text_config()
        matrices = [weight for module in model.modules() if module is not head for weight in _matrices(module)]
        dense = sum(weight.numel() for weight in matrices if weight.dim() == 2)
        experts = sum(weight.numel() for weight in matrices if weight.dim() == 3)
        share = _experts_met(config) if experts else 0.0
        if share is None:
            return None
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # scores and their product with the values, two operations each
        per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * width
        return cls(round(2 * (dense + share * experts)), per_pair, 2 * head.weight.numel())

    def forward(self, row: PackedRow) -> int:
        """Of one row's forward. A sliding window leaves pairs out; they are counted all the same."""
        places = row.terms.target_index.unique().numel()
        return self.per_token * row.tree.num_tokens + self.per_pair * row.attention_pairs + self.per_place * places

    def forward_and_backward(self, row: PackedRow) -> int:
        return (1 + BACKWARD) * self.forward(row)


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """The module's own weights by which tokens are multiplied; a lookup multiplies nothing."""
    return [] if isinstance(module, nn.Embedding) else list(module.parameters(recurse=False))


def _experts_met(config: Any) -> float | None:
    """Share of a layer's experts through which a token goes; model families name their number differently."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    met = getattr(config, "num_experts_per_tok", None)
    return met / experts if met and experts else None
