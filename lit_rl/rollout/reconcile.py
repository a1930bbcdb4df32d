"""Stop 4: a rollout's turns become training sequences. Pure.

Each turn was sampled under its own prompt, and that prompt is the truth. A turn whose prompt begins with
all tokens of a held sequence extends it, the longest such one; the rest of the prompt is context. Any other turn,
however small the difference, begins a sequence of its own. So each sampled token is trained exactly once, under the
context it was sampled in::

    turn 0: [11, 12] -> [13]           held: 11 12 (13)
    turn 1: [11, 12, 13, 20] -> [21]   held: 11 12 (13) 20 (21)
    turn 2: [11, 12] -> [14]           held: 11 12 (13) 20 (21)  and  11 12 (14)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lit_rl.errors import ProducerError
from lit_rl.types import Sequence, TokenSets, TurnRecord


class Reconciled(NamedTuple):
    """What reconciling a rollout gives.

    Attributes:
        sequences: Those with at least one trained token.
        borders: Borders between turns.
        forks: Borders at which a new sequence began.
    """

    sequences: list[Sequence]
    borders: int
    forks: int


@dataclass
class _Held:
    """A sequence while it grows; all lists have one entry per token. Masks and candidates are None where none came."""

    token_ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampling_masks: list[Any] | None = None
    candidates: list[Any] | None = None

    def is_prefix_of(self, prompt: list[int]) -> bool:
        n = len(self.token_ids)
        # The last token differs first when a template renders a turn anew: look there before comparing all.
        return n <= len(prompt) and prompt[n - 1] == self.token_ids[-1] and prompt[:n] == self.token_ids

    def extend(self, turn: TurnRecord, mask: list[bool]) -> None:
        context, n = turn.prompt_ids[len(self.token_ids) :], len(turn.output_ids)
        self.token_ids += context + turn.output_ids
        self.trained += [False] * len(context) + mask
        self.log_probs += [0.0] * len(context) + (turn.output_log_probs or [0.0] * n)
        for held, given in (
            (self.sampling_masks, turn.output_sampling_mask),
            (self.candidates, turn.output_sampler_logprobs),
        ):
            if held is not None:
                held.extend([None] * len(context))
                held.extend(given or [None] * n)

    def sequence(self) -> Sequence:
        mask = np.array(self.trained, dtype=bool)
        return Sequence(
            token_ids=np.array(self.token_ids, dtype=np.int64),
            completion_mask=mask,
            sampler_logprobs=np.where(mask, np.array(self.log_probs, dtype=np.float32), np.float32(0)),
            sampling_masks=_sets(self.sampling_masks),
            sampler_candidates=_sets(self.candidates),
        )


def reconcile(turns: list[TurnRecord]) -> Reconciled:
    """The training sequences of a rollout's turns, in the order in which they began.

    Raises:
        ProducerError: a turn's lists do not fit together.
    """
    held: list[_Held] = []
    masks = any(turn.output_sampling_mask is not None for turn in turns)
    candidates = any(turn.output_sampler_logprobs is not None for turn in turns)
    for number, turn in enumerate(turns):
        mask = _trained(turn, number)
        fitting = [sequence for sequence in held if sequence.is_prefix_of(turn.prompt_ids)]
        if not fitting:
            held.append(_Held(sampling_masks=[] if masks else None, candidates=[] if candidates else None))
            fitting = [held[-1]]
        max(fitting, key=lambda sequence: len(sequence.token_ids)).extend(turn, mask)
    kept = [sequence.sequence() for sequence in held if any(sequence.trained)]
    return Reconciled(kept, borders=max(0, len(turns) - 1), forks=max(0, len(held) - 1))


def _trained(turn: TurnRecord, number: int) -> list[bool]:
    """Whether each output token is trained; refuses turns whose lists do not fit."""
    n = len(turn.output_ids)
    if not turn.prompt_ids:
        raise ProducerError(f"turn {number} of a rollout has no prompt_ids; it carries the whole prompt sent")
    mask = [True] * n if turn.output_mask is None else [bool(m) for m in turn.output_mask]
    needed: dict[str, list[Any] | None] = {"output_mask": mask, "output_sampling_mask": turn.output_sampling_mask}
    needed["output_sampler_logprobs"] = turn.output_sampler_logprobs
    if any(mask) or turn.output_log_probs:
        needed["output_log_probs"] = turn.output_log_probs
    for name, values in needed.items():
        if values is not None and len(values) != n:
            raise ProducerError(
                f"turn {number} of a rollout has {n} output_ids and {len(values)} {name}; give one each"
            )
    return mask


def _sets(values: list[Any] | None) -> TokenSets | None:
    """None where no token has one."""
    return TokenSets.of(values) if values is not None and any(value is not None for value in values) else None
