"""Stop 14, in the server: vLLM loads this in each of its processes (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

import os
import time

BACKEND = "gloo"
"""The value for ``--weight-transfer-config '{"backend": ...}'``."""

SLEEP_VARIABLE = "LIT_RL_SERVER_SLEEPS"
"""Set to 1 for a server that shares its cores with the trainer."""

LOOK_S = 0.0005
"""A decoding step takes a hundred times as long."""


def register() -> None:
    """Makes the weight-transfer backend ``gloo`` known; its class is imported by the worker that uses it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer: it refuses the backend by name, and other uses go on
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "lit_rl.sync.vllm_engine", "GlooWeightTransferEngine")
    if os.environ.get(SLEEP_VARIABLE) == "1":
        sleep_while_waiting()


def sleep_while_waiting() -> None:
    """vLLM's processes look for each other's messages every half millisecond instead of without a pause.

    While the worker computes, the engine core asks a flag in shared memory over and over and yields in between, which
    takes half of a core. (vLLM's own idle mode, which waits for a notification, loses some of them when it is entered
    at once: a pause then took 5 s.)
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(LOOK_S)
