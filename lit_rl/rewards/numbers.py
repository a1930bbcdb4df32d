"""Rewards for answers that are numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lit_rl.types import PromptContent

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def completion_text(completion: PromptContent) -> str:
    """What the model wrote: the text itself, or the contents of its assistant messages, joined."""
    if isinstance(completion, str):
        return completion
    written = [message.get("content") or "" for message in completion if message.get("role") == "assistant"]
    return "\n".join(str(content) for content in written)


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators allowed; None if there is none. ``"1,204 is it."`` is 1204."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def exact_number(completions: Sequence[PromptContent], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last number of the completion equals the ``answer`` column, else 0."""
    found = [last_number(completion_text(completion)) for completion in completions]
    return [float(number == float(wanted)) for number, wanted in zip(found, answer, strict=True)]
