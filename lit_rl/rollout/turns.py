"""Stop 3: one conversation: which requests it makes and what comes of them.

The default is a single turn. What a rollout knows of itself (its prompt, its number, how many tokens it may still
generate) travels in a context variable, so that ``generate_one_turn(prompt_ids)`` needs no other argument however a
hook calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lit_rl.types import Prompt, PromptContent, Rollout, TurnRecord


@dataclass
class RolloutContext:
    """One rollout while it runs.

    Attributes:
        prompt: Its prompt.
        generation: Its number within the group.
        stream: Names the dataset in request seeds (``train``, or an evaluation set).
        budget: Tokens that it may still generate.
        requests: Sampling requests so far.
    """

    prompt: Prompt
    generation: int
    stream: str
    budget: int
    requests: int = 0

    def take_request_seed(self, seed: int) -> int:
        """A seed of this request's own: a function of run seed, position, generation and turn."""
        self.requests += 1
        name = f"{seed}/{self.stream}/{self.prompt.position}/{self.generation}/{self.requests}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1  # int64 at the server


current_rollout: ContextVar[RolloutContext | None] = ContextVar("lit_rl_rollout", default=None)
"""The rollout whose task is running; None outside one."""


def as_completion(prompt: PromptContent, text: str) -> PromptContent:
    """Generated text in the prompt's own form: text for text, one assistant message for messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def single_turn(prompt: PromptContent, turn: TurnRecord, tokenizer: Any) -> Rollout:
    """The rollout that one request makes."""
    text = tokenizer.decode(turn.output_ids, skip_special_tokens=True)
    return Rollout(completion=as_completion(prompt, text), completion_ids=list(turn.output_ids), turns=[turn])


def truncated(rollout: Rollout, eos_token_ids: Collection[int]) -> bool:
    """Whether a rollout was cut off by its token limit.

    The rule: its last turn's last token decides. Any of the model's end tokens there means complete, also when the
    server says ``length`` because the limit fell exactly on it. Otherwise the server's finish reason decides, and where
    there is none, a rollout that does not end in an end token was cut off.
    """
    if not rollout.turns:
        return False
    last = rollout.turns[-1]
    if last.output_ids and last.output_ids[-1] in eos_token_ids:
        return False
    return last.finish_reason in ("length", None)
