"""Stop 14, in the server: vLLM loads this in each of its processes (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

import os

BACKEND = "gloo"
"""The value for ``--weight-transfer-config '{"backend": ...}'``."""

SLEEP_VARIABLE = "LIT_RL_SERVER_SLEEPS"
"""Set to 1 for a server that shares its cores with the trainer."""


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
    """vLLM's processes wait for each other asleep instead of turning in a loop for the first second.

    While the worker computes, the engine core asks a flag in shared memory over and over and yields in between: that
    takes half of the core on which the trainer computes. Asleep it is woken by vLLM's own notification, 0.1 ms later.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0.0,)  # busy_loop_s
