"""Stop 14: what a weight transport is, whatever carries the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lit_rl.errors import SyncError

Metadata = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name, dtype and shape of each tensor, in the order in which they are sent."""

Source = Iterable[tuple[str, Tensor]]
"""The tensors themselves; iterated once, on the calling thread (gathering a shard may be a collective)."""


@dataclass(frozen=True, slots=True)
class SyncTimings:
    """Seconds of one push.

    Attributes:
        pause_s: Until all servers had paused.
        barrier_s: Waiting for other ranks of the trainer.
        transfer_s: Sending and loading, from the start of the update to its end.
        total_s: All of it, the resume included.
    """

    pause_s: float
    barrier_s: float
    transfer_s: float
    total_s: float


class Transport(Protocol):
    """Brings tensors to every server. ``open`` once, ``push`` for each policy version, ``close`` at the end."""

    def open(self, metadata: Metadata) -> None:
        """Connects to the servers and tells them what will come.

        Raises:
            SyncError: a server refused, or did not join in time; quotes it.
        """

    def push(self, source: Source, version: int) -> SyncTimings:
        """Pauses the servers, replaces their weights, labels them ``str(version)`` and resumes.

        Raises:
            SyncError: within the timeout, quoting the server that refused or naming the route that did not answer.
                The servers have been resumed as far as they answer, and the next push connects anew.
        """

    def close(self) -> None:
        """Disconnects; safe to call twice."""


def as_announced(source: Source, metadata: Metadata) -> Iterator[Tensor]:
    """The tensors of ``source``, each one compared with what the servers were told to expect.

    Raises:
        SyncError: another tensor came, one more, or one less; names it.
    """
    announced = iter(metadata)
    for name, tensor in source:
        expected = next(announced, None)
        if expected is None:
            raise SyncError(f"the policy has a tensor more than when the transfer was opened: {name!r}")
        if (name, tensor.dtype, tuple(tensor.shape)) != (expected[0], expected[1], tuple(expected[2])):
            raise SyncError(
                f"the policy's tensors changed since the transfer was opened: {expected[0]!r} {expected[1]} "
                f"{list(expected[2])} was announced, {name!r} {tensor.dtype} {list(tensor.shape)} came"
            )
        yield tensor
    missing = next(announced, None)
    if missing is not None:
        raise SyncError(f"the policy has a tensor less than when the transfer was opened: {missing[0]!r}")
