"""Stop 2: when a group, and when a rollout, may start.

Asynchronously a rollout may start while fewer than ``cap`` are in flight and the first weights have arrived (policy
version 1). With ``release_by_version`` only so many groups start per policy version: what ``max_staleness = 0`` needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

POLL_S = 0.01
"""How often a waiter looks at the policy version, which another process writes without waking anybody."""


class Admission(Protocol):
    """The rule by which the loop starts work; ``cap`` may be changed while rollouts run."""

    cap: int

    def pause(self) -> None:
        """Nothing new starts until ``resume``; what is in flight goes on."""

    def resume(self) -> None:
        """Ends a pause."""

    async def group_may_start(self) -> None:
        """Waits until a group may start. Woken by finished rollouts, releases and new policy versions."""

    def start_group(self) -> None:
        """Counts a group that starts now."""

    async def start_rollout(self) -> None:
        """Waits until a rollout may start, and counts it as in flight. Woken by finished rollouts."""

    def finish_rollout(self) -> None:
        """A rollout is no longer in flight."""

    def release(self, groups: int = 1, version: int | None = None) -> None:
        """So many groups that started under ``version`` (None = this one) will not be trained: others may start."""


class AsyncAdmission:
    """Admits up to ``cap`` rollouts, whatever the trainer does meanwhile.

    Args:
        cap: Rollouts in flight at most.
        version: Reads the policy version.
        release_by_version: Groups that may start per policy version; 0 = no limit.
    """

    def __init__(self, cap: int, version: Callable[[], int], release_by_version: int = 0) -> None:
        self.cap = cap
        self.in_flight = 0
        self._version = version
        self._limit = release_by_version
        self._started_under = (0, 0)
        self._paused = False
        self._changed = asyncio.Event()
        self._busy = 0.0
        self._busy_since = time.monotonic()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._changed.set()

    async def group_may_start(self) -> None:
        while self._paused or not self._group_fits():
            await self._change()

    def start_group(self) -> None:
        version, started = self._started()
        self._started_under = (version, started + 1)

    async def start_rollout(self) -> None:
        while self._paused or self.in_flight >= self.cap:
            await self._change()
        self._count(+1)

    def finish_rollout(self) -> None:
        self._count(-1)
        self._changed.set()

    def release(self, groups: int = 1, version: int | None = None) -> None:
        current, started = self._started()
        if version is None or version == current:  # a step that went on without them does not need them any more
            self._started_under = (current, started - groups)
            self._changed.set()

    def take_busy_seconds(self) -> float:
        """Rollout-seconds in flight since the last call: their mean number is this over the time passed."""
        self._count(0)
        busy, self._busy = self._busy, 0.0
        return busy

    def _group_fits(self) -> bool:
        version, started = self._started()
        return version >= 1 and self.in_flight < self.cap and (self._limit == 0 or started < self._limit)

    def _started(self) -> tuple[int, int]:
        """The version now, and how many groups started under it."""
        version = self._version()
        return (version, self._started_under[1]) if version == self._started_under[0] else (version, 0)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._busy += self.in_flight * (now - self._busy_since)
        self._busy_since = now
        self.in_flight += change

    async def _change(self) -> None:
        """Until something may have changed, at most ``POLL_S`` seconds."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):  # not wait_for, which in Python 3.11 can lose a cancellation
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()
