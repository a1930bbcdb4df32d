"""Reward for mathematics: is the answer the same as the solution, however it is written?

Parsing and comparing is math-verify's work. It bounds its time by an alarm signal, which only the main thread of a
process can receive, while rewards run in threads; and an answer such as 9^{9^{9^9}} computes where no signal gets
through. So the checks run in worker processes, and one that takes too long is ended with its worker.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Sequence
from multiprocessing.pool import Pool
from typing import Any

from lit_rl.errors import RewardError
from lit_rl.rewards.numbers import completion_text
from lit_rl.types import PromptContent

logger = logging.getLogger(__name__)

COLUMNS = ("solution", "answer", "final_answer")
"""Where datasets have the right answer; the first one that is there counts."""

STEP_S = 5
"""Seconds for parsing the solution, parsing the answer, and comparing them, by math-verify's own alarm."""

CHECK_S = 20.0
"""Seconds after which a worker that no alarm reaches is ended."""

WORKERS = 2


def math_accuracy(completions: Sequence[PromptContent], **columns: Any) -> list[float | None]:
    """1 where the completion's answer equals the solution, 0 where not, None where the solution cannot be parsed.

    The answer is what stands in ``\\boxed{}``, else what can be read anyway. Several boxes are one answer of several
    parts, so guessing twice earns nothing. An answer that cannot be judged in time counts as wrong.

    Args:
        completions: One a rollout, text or messages.
        columns: The dataset's; ``solution``, ``answer`` or ``final_answer`` holds LaTeX, with or without ``$``.

    Raises:
        RewardError: no such column.
    """
    name = next((column for column in COLUMNS if column in columns), None)
    if name is None:
        raise RewardError(f"math_accuracy needs a column {', '.join(COLUMNS)}; the dataset has {sorted(columns)}")
    texts = [completion_text(completion) for completion in completions]
    return _WORKERS.judge([(str(gold), text) for gold, text in zip(columns[name], texts, strict=True)])


def verdict(gold: str, text: str) -> float | None:
    """One check, in a worker's main thread."""
    from math_verify import parse, verify

    written = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    solution = parse(written, parsing_timeout=STEP_S)
    if not solution:
        return None
    return float(verify(solution, parse(text, parsing_timeout=STEP_S), timeout_seconds=STEP_S))


class _Workers:
    """Processes that are started at the first check, and anew after one had to be ended."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._lock = threading.Lock()  # one group at a time: the rewards of several groups may run side by side

    def judge(self, checks: Sequence[tuple[str, str]]) -> list[float | None]:
        with self._lock:
            return [found for at in range(0, len(checks), WORKERS) for found in self._some(checks[at : at + WORKERS])]

    def _some(self, checks: Sequence[tuple[str, str]]) -> list[float | None]:
        """As many checks as there are workers, so that none waits behind another one."""
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(WORKERS)
        asked = [self._pool.apply_async(verdict, check) for check in checks]
        found: list[float | None] = []
        for (gold, text), answer in zip(checks, asked, strict=True):
            try:
                found.append(answer.get(CHECK_S))
            except multiprocessing.TimeoutError:
                logger.warning("no verdict within %g s on %r for the solution %r", CHECK_S, text[-200:], gold)
                found.append(0.0)
        if not all(answer.ready() for answer in asked):
            self.end()
        return found

    def end(self) -> None:
        """Ends the processes, whatever they are doing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()


_WORKERS = _Workers()
