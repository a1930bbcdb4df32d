"""What connects the trainer process and the rollout process: two pipes, a failure pipe, and single-writer numbers.

No ``multiprocessing.Queue`` and no lock is shared: a process that is killed while it holds a shared lock, or in the
middle of a message, would leave the other one waiting for ever. Here every number has one writer, and each end closes
the other end's half of a pipe, so that a death shows as end-of-file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

from lit_rl.types import Position


class Redispatch(NamedTuple):
    """Command: sample this position again."""

    position: Position


class Release(NamedTuple):
    """Command: so many more groups may start under the current policy version."""

    groups: int


class Evaluate(NamedTuple):
    """Command: sample and score the evaluation set ``name``."""

    name: str


class Stop(NamedTuple):
    """Command: end."""


Command = Redispatch | Release | Evaluate | Stop


@dataclass
class Numbers:
    """Shared numbers (``multiprocessing.RawValue``), each with one writer.

    Attributes:
        version: The policy version; written by the parent.
        taken: Samples taken out of the rollout queue; written by the parent.
        stop: 1 = end; written by the parent.
        sent: Samples put on the rollout queue; written by the child.
        heartbeat: ``time.monotonic()`` of the child's last sign of life; written by the child's event loop.
    """

    version: Any
    taken: Any
    stop: Any
    sent: Any
    heartbeat: Any

    @classmethod
    def create(cls, context: SpawnContext) -> Numbers:
        version, taken, stop, sent = (context.RawValue("q", 0) for _ in range(4))
        return cls(version, taken, stop, sent, heartbeat=context.RawValue("d", time.monotonic()))

    @property
    def queue_size(self) -> int:
        """Samples on the rollout queue, in transit included."""
        return max(0, self.sent.value - self.taken.value)


@dataclass
class _Ends:
    commands: Connection
    messages: Connection
    failures: Connection
    numbers: Numbers

    def close(self) -> None:
        for end in (self.commands, self.messages, self.failures):
            end.close()


class ChildEnds(_Ends):
    """What the rollout process holds: commands in, messages and failures out.

    The parent closes its copies once the child has inherited them.
    """


class ParentEnds(_Ends):
    """What the trainer process holds: commands out, messages and failures in."""


def connect(context: SpawnContext) -> tuple[ParentEnds, ChildEnds]:
    """Both ends of a new connection."""
    numbers = Numbers.create(context)
    commands_in, commands_out = context.Pipe(duplex=False)
    messages_in, messages_out = context.Pipe(duplex=False)
    failures_in, failures_out = context.Pipe(duplex=False)
    parent = ParentEnds(commands_out, messages_in, failures_in, numbers)
    return parent, ChildEnds(commands_in, messages_out, failures_out, numbers)


@dataclass(frozen=True)
class Failure:
    """A child's last words.

    Attributes:
        error: The exception where it is one of lit_rl's own; None else.
        traceback: The whole traceback as text.
    """

    error: BaseException | None
    traceback: str
