"""Stop 14: how tensors lie in the byte stream that travels, the same at both ends.

All tensors stand one after the other, each at an aligned offset; the stream is cut into chunks of equal size without
regard to the tensors, so that a large embedding needs no buffer of its own and small norms share one.

Example: float32 tensors of 3 and 40 elements with chunks of 128 bytes lie at offsets 0 and 64 of a stream of 224 bytes;
the second one is complete when chunk 1 (bytes 128 to 224) has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. A view as any dtype needs the element size; a cache line keeps copies fast."""

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in the stream."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, stream: Tensor) -> Tensor:
        """The tensor inside ``stream``, a [total] uint8 tensor; shares its memory."""
        return stream[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies, and where the stream is cut.

    Attributes:
        slots: One per tensor, in the order of the metadata.
        total: Bytes of the stream.
        chunk_bytes: Bytes of a chunk; the last one may be shorter.
    """

    slots: tuple[Slot, ...]
    total: int
    chunk_bytes: int

    @classmethod
    def plan(
        cls, metadata: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], chunk_bytes: int = CHUNK_BYTES
    ) -> Layout:
        slots, end = [], 0
        for name, dtype, shape in metadata:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            nbytes = math.prod(shape) * dtype.itemsize
            slots.append(Slot(name, dtype, tuple(shape), offset, nbytes))
            end = offset + nbytes
        return cls(tuple(slots), end, chunk_bytes)

    @property
    def chunks(self) -> int:
        return -(-self.total // self.chunk_bytes)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First and last (exclusive) byte of a chunk."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total)

    def chunks_until(self, slot: Slot) -> int:
        """How many chunks must have arrived before the tensor is complete."""
        return -(-(slot.offset + slot.nbytes) // self.chunk_bytes)

    def to_json(self) -> dict[str, Any]:
        """What the other end needs to plan the same layout."""
        return {
            "names": [slot.name for slot in self.slots],
            "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in self.slots],
            "shapes": [list(slot.shape) for slot in self.slots],
            "chunk_bytes": self.chunk_bytes,
        }

    @classmethod
    def from_json(cls, names: list[str], dtypes: list[str], shapes: list[list[int]], chunk_bytes: int) -> Layout:
        metadata = [
            (name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        return cls.plan(metadata, chunk_bytes)
