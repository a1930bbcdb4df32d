"""Keeps freed memory in the process: on CPU, large tensors then reuse warm pages instead of faulting in fresh ones.

glibc maps every block above 32 MB anew and unmaps it when it is freed. A training step frees and allocates hundreds of
MB many times over, so that page faults cost more than the arithmetic: a log-softmax over 2000 x 49152 float32 logits
takes 1.0 s with them and 0.4 s without.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of malloc.h. A trim threshold of -1 never gives memory back; no mappings means that all blocks live in the heap."""


def keep_freed_memory() -> bool:
    """Sets the C library's allocator for this process; False where there is none to set, or the user has set it."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
