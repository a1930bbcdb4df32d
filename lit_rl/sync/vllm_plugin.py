"""Stop 14, in the server: vLLM loads this in each of its processes (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

BACKEND = "gloo"
"""The value for ``--weight-transfer-config '{"backend": ...}'``."""


def register() -> None:
    """Makes the weight-transfer backend ``gloo`` known; its class is imported by the worker that uses it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer: it refuses the backend by name, and other uses go on
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "lit_rl.sync.vllm_engine", "GlooWeightTransferEngine")
