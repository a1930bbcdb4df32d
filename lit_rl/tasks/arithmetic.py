"""Sums of two small numbers, asked in words: a verifiable task that a small model learns in minutes on a CPU.

A pretrained 135M model computes such sums well but seldom says the result and stops; so the reward, which is 1 for a
right answer and 0 otherwise, starts low and has far to go. Train and held-out prompts never ask for the same sum.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lit_rl.errors import SettingsError
from lit_rl.rewards.numbers import completion_text
from lit_rl.types import PromptContent

if TYPE_CHECKING:
    from datasets import Dataset

WORDINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
)
REQUEST = "Reply with just the number."
SPLITS = ("train", "heldout")
HELDOUT_SHARE = 5
"""About one pair of operands in this many is held out. Not an option: the sets of any two calls have to be disjoint."""

_NUMBER = re.compile(r"(?:(?<!\w)-)?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_CLOSING = re.compile(r"\s*[^\W\d_]*\s*[.!]?\s*")
"""What may follow an answer: one word (its unit) and a full stop."""


def arithmetic(split: str = "train", size: int = 512, seed: int = 0, largest: int = 12) -> Dataset:
    """Distinct addition prompts with their answers.

    Pairs of operands, regardless of their order, are dealt out to the two splits once and for all: if ``3 + 4`` is
    held out, no training prompt asks for ``3 + 4`` or ``4 + 3`` in any wording.

    Args:
        split: ``train`` or ``heldout``.
        size: Rows wanted; all distinct.
        seed: Chooses and orders the rows within the split.
        largest: Operands go from 0 to this.

    Returns:
        Columns ``prompt`` (one user message) and ``answer`` (digits).

    Raises:
        SettingsError: unknown split, or fewer distinct prompts in it than ``size``.
    """
    from datasets import Dataset

    if split not in SPLITS:
        raise SettingsError("split", split, f"give one of {', '.join(SPLITS)}")
    rows = [
        {"prompt": [{"role": "user", "content": f"{wording.format(a=a, b=b)} {REQUEST}"}], "answer": str(a + b)}
        for a, b in operands(split, largest)
        for wording in WORDINGS
    ]
    if not 1 <= size <= len(rows):
        remedy = (
            f"{split} has {len(rows)} distinct prompts with operands up to {largest}; ask for 1 to {len(rows)} of them"
        )
        raise SettingsError("size", size, f"{remedy}, or raise largest")
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows[:size])


def operands(split: str, largest: int) -> list[tuple[int, int]]:
    """The ordered pairs of operands of a split; ``(3, 4)`` and ``(4, 3)`` are always in the same one."""
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    return [pair for pair in pairs if _held_out(*pair) == (split == "heldout")]


def _held_out(a: int, b: int) -> bool:
    """Of the pair alone, whatever the size, seed and largest operand of the set: a hash that is the same everywhere."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % HELDOUT_SHARE == 0


def right_answer(
    prompts: Sequence[PromptContent],
    completions: Sequence[PromptContent],
    answer: Sequence[str],
    truncated: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """1 where a finished completion gives the right answer and no other, else 0.

    Args:
        prompts: One a rollout; a completion may repeat their numbers (``3 + 4 = 7``).
        completions: One a rollout, text or messages.
        answer: The right number of each.
        truncated: Whether each was cut off, where known: what was cut off is no answer.
    """
    cut = [False] * len(completions) if truncated is None else truncated
    return [
        float(not is_cut and answers_with(completion_text(completion), wanted, asked=_question(prompt)))
        for prompt, completion, wanted, is_cut in zip(prompts, completions, answer, cut, strict=True)
    ]


def answers_with(text: str, wanted: str, *, asked: str = "") -> bool:
    """Whether a text says that the answer is ``wanted``, once and for all.

    The last number counts, and nothing but a unit and a full stop may follow it. The numbers before it must be numbers
    of the question, so trying several answers earns nothing: to ``3 + 4``, ``3 + 4 = 7`` is right, ``6, 7`` not.
    """
    found = list(_NUMBER.finditer(text))
    if not found or not _CLOSING.fullmatch(text, found[-1].end()):
        return False
    *before, last = [_value(match.group()) for match in found]
    known = {_value(number) for number in _NUMBER.findall(asked)} | {_value(wanted)}
    return last == _value(wanted) and known.issuperset(before)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _question(prompt: PromptContent) -> str:
    """The text of a prompt: itself, or what its last message says."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
