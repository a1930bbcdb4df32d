"""Stop 14, in the server: vLLM's worker receives the trainer's tensors over gloo and loads them.

Imported by a vLLM worker only (see ``vllm_plugin``), so vLLM is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from lit_rl.sync.group import Group, Receiver, address_towards, announce, join_store
from lit_rl.sync.wire import Layout

logger = init_logger("vllm.lit_rl")  # the name by which vLLM shows a line


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """What the trainer says when it connects.

    Attributes:
        master_address: Where the trainer's meeting point is.
        master_port: Its port.
        group: Name of the meeting.
        rank_offset: Rank of this server's first worker.
        world_size: Trainer and all workers of all servers.
        meet_timeout_s: Seconds until all must be there.
        timeout_s: Seconds that a chunk may take.
        names: Of the tensors, in their order.
        dtypes: Of the tensors.
        shapes: Of the tensors.
        chunk_bytes: Size of a chunk.
    """

    master_address: str
    master_port: int
    group: str
    rank_offset: int
    world_size: int
    meet_timeout_s: float
    timeout_s: float
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    chunk_bytes: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """One update: the label of the weights that come; ``abort`` ends an update that was started instead."""

    version: str = ""
    abort: bool = field(default=False)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives checkpoint-format tensors as broadcasts from the trainer. Whatever fails, the model stays usable."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: Any = None
        self._group: Group | None = None
        self._receiver: Receiver | None = None
        _quiet_about_tensors_that_no_checkpoint_has()

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._store = join_store(init_info.master_address, init_info.master_port, init_info.meet_timeout_s)
        announce(self._store, init_info.group, rank)
        self._group = Group(
            self._store,
            init_info.group,
            rank,
            init_info.world_size,
            address=address_towards(init_info.master_address),
            meet_timeout=init_info.meet_timeout_s,
            timeout=init_info.timeout_s,
        )
        layout = Layout.from_json(init_info.names, init_info.dtypes, init_info.shapes, init_info.chunk_bytes)
        self._receiver = Receiver(self._group, layout)
        logger.info("joined the trainer at %s as rank %d", init_info.master_address, rank)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One update. The base class would synchronise an accelerator afterwards, which a CPU server has not."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # vLLM forgets the update but leaves tensors on `meta`, and the next request would kill the engine.
            self._put_back()
            raise

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if update_info.abort:
            raise RuntimeError("the trainer gave up this weight update; the weights from before it stay")
        if self._receiver is None:
            raise RuntimeError("no trainer is connected; ask /init_weight_transfer_engine first")
        started = time.perf_counter()
        self.model.load_weights(self._on_device(self._receiver.receive()))
        logger.info("loaded the weights of version %s in %.2f s", update_info.version, time.perf_counter() - started)

    def _on_device(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    @torch.no_grad()
    def _put_back(self) -> None:
        """Layers that are still waiting for tensors get those they had; complete ones keep the new values."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0  # "nothing came" makes vLLM restore the layer instead of loading half of it
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        group = self._group
        self._receiver = self._group = self._store = None
        if group is not None:
            group.give_up()


class _NoSuchTensor(logging.Filter):
    """Drops the warning that a rotary embedding got no weights: its table is computed, no checkpoint has it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.msg == "%s: Failed to load weights" and "RotaryEmbedding" in str(record.args))


def _quiet_about_tensors_that_no_checkpoint_has() -> None:
    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    if not any(isinstance(f, _NoSuchTensor) for f in reload_logger.filters):
        reload_logger.addFilter(_NoSuchTensor())
