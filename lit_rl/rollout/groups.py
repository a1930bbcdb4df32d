"""Stop 4: rollouts come in one by one; when all of a prompt's are in, they are one ``RolloutGroup``.

A rollout whose requests failed for good is left out, and the reward columns with it; a streak of nothing but failures
ends the run with the server's words.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from lit_rl.errors import ServerError
from lit_rl.metrics import Max, Mean, Min, Stats, Sum
from lit_rl.rollout.reconcile import Reconciled, reconcile
from lit_rl.rollout.turns import truncated
from lit_rl.types import DroppedGroup, DropReason, Prompt, Rollout, RolloutGroup


@dataclass(frozen=True)
class FinishedRollout:
    """One rollout of a group, with what is known of it.

    Attributes:
        rollout: As ``generate_one`` returned it.
        reconciled: Its training sequences.
        truncated: Whether it was cut off.
        seconds: From its start to its end.
    """

    rollout: Rollout
    reconciled: Reconciled
    truncated: bool
    seconds: float

    @classmethod
    def of(cls, rollout: Rollout, eos_token_ids: Collection[int], seconds: float) -> FinishedRollout:
        return cls(rollout, reconcile(rollout.turns), truncated(rollout, eos_token_ids), seconds)


@dataclass
class PendingGroup:
    """The rollouts of one prompt while they run.

    Attributes:
        prompt: Their prompt.
        group_id: Counts groups in the rollout process.
        wanted: How many there are.
        version: The policy version when the first one started.
        finished: Those that ended well, by number.
        failures: Those that failed for good, by number.
    """

    prompt: Prompt
    group_id: int
    wanted: int
    version: int = 0
    finished: dict[int, FinishedRollout] = field(default_factory=dict)
    failures: dict[int, ServerError] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.finished) + len(self.failures) == self.wanted

    @property
    def survivors(self) -> list[FinishedRollout]:
        """In the order of their numbers."""
        return [self.finished[number] for number in sorted(self.finished)]

    def assemble(self) -> RolloutGroup:
        """The group of the survivors, ready to be scored."""
        done, prompt = self.survivors, self.prompt
        rollouts = [f.rollout for f in done]
        return RolloutGroup(
            prompts=[prompt.content] * len(done),
            reward_kwargs={name: [value] * len(done) for name, value in prompt.columns.items()},
            completions=[r.completion for r in rollouts],
            completions_ids=[r.completion_ids for r in rollouts],
            completions_sequences=[f.reconciled.sequences for f in done],
            tool_call_counts=[r.tool_call_count for r in rollouts],
            tool_failure_counts=[r.tool_failure_count for r in rollouts],
            model_version=self.version,
            group_id=self.group_id,
            row_index=prompt.row_index,
            env_rewards=[None] * len(done),
            rollout_rewards=[r.reward for r in rollouts],
            queued_at=time.monotonic(),
            position=prompt.position,
            rollout_ids=[r.rollout_id for r in rollouts],
            truncated=[f.truncated for f in done],
        )

    def as_failed(self) -> DroppedGroup:
        """The outcome of a group without survivors."""
        words = "; ".join(sorted({str(error) for error in self.failures.values()}))
        return DroppedGroup(self.prompt.position, self.prompt.row_index, DropReason.FAILED, words, dict(self.stats()))

    def stats(self) -> Stats:
        """Contributions of the group's rollouts."""
        stats: Stats = {"rollout/failed_total": Sum(len(self.failures))}
        return stats | rollout_stats(self.survivors) if self.finished else stats


def rollout_stats(done: list[FinishedRollout]) -> Stats:
    """Contributions of at least one finished rollout."""
    n = len(done)
    lengths = [len(f.rollout.completion_ids) for f in done]
    turns = [len(f.rollout.turns) for f in done]
    borders, forks = sum(f.reconciled.borders for f in done), sum(f.reconciled.forks for f in done)
    return {
        "completions/mean_length": Mean(sum(lengths), n),
        "completions/min_length": Min(min(lengths)),
        "completions/max_length": Max(max(lengths)),
        "completions/clipped_ratio": Mean(sum(f.truncated for f in done), n),
        "rollout/duration_s": Mean(sum(f.seconds for f in done), n),
        "rollout/turns_mean": Mean(sum(turns), n),
        "rollout/turns_max": Max(max(turns)),
        "rollout/samples_per_rollout": Mean(sum(len(f.reconciled.sequences) for f in done), n),
        "rollout/fork_frac": Mean(forks, borders),
    }


class FailureStreak:
    """Tells one bad prompt from a server that answers nobody.

    A streak is failures without a success between them. It ends the run when it is long enough, spans two groups (one
    prompt that is too long fails all of its rollouts at once), and no rollout that began before it is still on its way
    to a success; or when it is four times as long.

    Args:
        limit: Failures in a row that are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: dict[tuple[int, int], float] = {}
        self._failed = 0
        self._groups: set[int] = set()
        self._since = 0.0

    def started(self, group_id: int, number: int) -> None:
        self._running[group_id, number] = time.monotonic()

    def succeeded(self, group_id: int, number: int) -> None:
        del self._running[group_id, number]
        self._failed = 0
        self._groups.clear()

    def failed(self, group_id: int, number: int, error: ServerError) -> None:
        """Counts a failure; raises ServerError with the server's text when the streak is too long."""
        del self._running[group_id, number]
        if self._failed == 0:
            self._since = time.monotonic()
        self._failed += 1
        self._groups.add(group_id)
        long_enough = self._failed >= self._limit and len(self._groups) > 1
        hopeful = any(began < self._since for began in self._running.values())
        if (long_enough and not hopeful) or self._failed >= 4 * self._limit:
            raise ServerError(f"the last {self._failed} rollouts all failed; the last one: {error}") from error
