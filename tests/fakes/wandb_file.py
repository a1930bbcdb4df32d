"""Reads the history out of an offline W&B run file (LevelDB log blocks of protobuf records; W&B ships no reader)."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as proto

_FILE_HEADER, _BLOCK, _RECORD_HEADER = 7, 32 * 1024, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history(folder: Path, timeout: float = 60.0) -> list[dict[str, Any]]:
    """The logged rows of the one run below ``folder``, in order.

    ``wandb.finish()`` returns before its service has written the file's last block, so the record of the run's exit,
    which is behind all rows, is waited for.

    Raises:
        TimeoutError: it is not there after ``timeout`` seconds; the run was never finished.
    """
    (path,) = folder.rglob("run-*.wandb")
    deadline = time.monotonic() + timeout
    while True:
        rows, finished = _read(path.read_bytes())
        if finished:
            return rows
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has {len(rows)} rows and no record of the run's exit after {timeout} s")
        time.sleep(0.05)


def _read(content: bytes) -> tuple[list[dict[str, Any]], bool]:
    """The rows, and whether the run's exit was recorded."""
    rows, finished = [], False
    for data in _records(content):
        record = proto.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        finished |= kind == "exit"
        if kind == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows, finished


def _records(content: bytes) -> Iterator[bytes]:
    """Whole records: a chunk per record, or a first, middle and last one; no chunk crosses a block."""
    place, parts = _FILE_HEADER, b""
    while place + _RECORD_HEADER <= len(content):
        if _BLOCK - place % _BLOCK < _RECORD_HEADER:  # the rest of a block is padding
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        parts += content[place + _RECORD_HEADER : place + _RECORD_HEADER + length]
        place += _RECORD_HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
