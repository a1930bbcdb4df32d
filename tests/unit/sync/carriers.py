"""Both carriers of weights with the fake servers that receive from them, for tests of what they promise alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rl.sync.gloo import GlooTransport
from lit_rl.sync.nccl import NCCLTransport
from lit_rl.sync.sequence import ServerTransport
from lit_rl.sync.transport import Metadata
from tests.fakes.nccl import NCCLServer
from tests.fakes.server import FakeServer
from tests.fakes.worker import WeightServer

MESSAGE_BYTES = 256


def weights(value: float) -> dict[str, Tensor]:
    """A small tied model: 1 kB in several messages, two dtypes, a tensor that is larger than a message."""
    embed = torch.arange(120, dtype=torch.float32).reshape(12, 10) + value
    return {
        "model.embed_tokens.weight": embed,
        "model.layers.0.norm.weight": torch.full((8,), value, dtype=torch.bfloat16),
        "model.norm.weight": torch.full((16,), value, dtype=torch.bfloat16),
        "lm_head.weight": embed,
    }


def metadata() -> Metadata:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights(0.0).items()]


@dataclass(frozen=True)
class Carrier:
    """One way for weights to travel.

    Attributes:
        server: A fake server whose workers receive this way.
        transport: Takes the servers' addresses.
    """

    server: type[WeightServer] | type[NCCLServer]
    transport: Callable[..., ServerTransport]


GLOO = Carrier(WeightServer, partial(GlooTransport, chunk_bytes=MESSAGE_BYTES))
NCCL = Carrier(NCCLServer, partial(NCCLTransport, buffer_bytes=MESSAGE_BYTES))
"""vLLM's engine over a stand-in communicator; ``tests.fakes.nccl.install`` comes first."""


def held(server: Any) -> list[dict[str, Tensor]]:
    """Per worker the tensors of the last update that arrived."""
    return server.weights_held if isinstance(server, NCCLServer) else [server.weights_held]


def opened(carrier: Carrier, *servers: FakeServer, timeout: float = 20.0) -> ServerTransport:
    transport = carrier.transport([server.url for server in servers], timeout=timeout)
    transport.open(metadata())
    return transport


def holds(server: FakeServer, value: float) -> bool:
    wanted = weights(value).items()
    return all(torch.equal(worker[name], tensor) for worker in held(server) for name, tensor in wanted)


def left_usable(server: FakeServer) -> bool:
    """Not paused, no update open, no layer without memory."""
    return not (server.weights.paused or server.weights.updating or getattr(server, "half_loaded", False))


def leave_in_an_update(server: Any) -> None:
    """As a trainer does that is killed in a sync, and another one that starts again behind it."""
    server.weights.paused = server.weights.updating = True
    if isinstance(server, NCCLServer):
        server.half_loaded = True
    server.weights.initialised = {}
