"""NCCL's part of a weight transfer without a GPU: a stand-in communicator, and a fake server whose workers receive.

vLLM's own code runs at both ends (its trainer-side engine and its packing and unpacking); only the communicator, the
meeting and the CUDA streams are stand-ins. As NCCL does, a broadcast waits until every other rank takes part, however
long that is, unless the communicator is aborted; and an abort at one end says nothing to the others.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from aiohttp import web
from torch import Tensor

from tests.fakes.server import Call, FakeServer, _error

_POLL_S = 0.002


class Meeting:
    """Where ranks find each other, as behind an address and a port."""

    _all: ClassVar[dict[int, Meeting]] = {}

    def __init__(self) -> None:
        self.inboxes: dict[int, queue.Queue[Tensor]] = {}

    @classmethod
    def at(cls, port: int) -> Meeting:
        return cls._all.setdefault(port, cls())

    @classmethod
    def over(cls, port: int) -> None:
        """All have met; whoever comes to this port now comes to another meeting."""
        del cls._all[port]


class Communicator:
    """One rank's end.

    Attributes:
        disabled: As vLLM's says it: a communicator that does nothing.
    """

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        self.disabled = False
        self._inboxes, self._rank, self._world_size = meeting.inboxes, rank, world_size
        self._aborted = threading.Event()
        if rank:
            self._inboxes[rank] = queue.Queue(maxsize=1)
        while len(self._inboxes) < world_size - 1:
            self._wait_on("the meeting")

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        if self._rank == src:
            for rank in range(1, self._world_size):
                self._give(self._inboxes[rank], tensor.clone())
        else:
            tensor.copy_(self._take(self._inboxes[self._rank]))

    def destroy(self) -> None:
        self._aborted.set()

    def _give(self, inbox: queue.Queue[Tensor], tensor: Tensor) -> None:
        while True:
            try:
                return inbox.put(tensor, timeout=_POLL_S)
            except queue.Full:
                self._wait_on("a broadcast")

    def _take(self, inbox: queue.Queue[Tensor]) -> Tensor:
        while True:
            try:
                return inbox.get(timeout=_POLL_S)
            except queue.Empty:
                self._wait_on("a broadcast")

    def _wait_on(self, what: str) -> None:
        if self._aborted.wait(_POLL_S):
            raise RuntimeError(f"NCCL error: {what} was aborted")


class _Stream:
    def synchronize(self) -> None:
        """A CPU's work is done when the call returns."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes vLLM's engine meet and send through the stand-ins."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    def open_endpoint(info: Any) -> Communicator:
        end = Communicator(Meeting.at(info.master_port), 0, info.world_size)
        Meeting.over(info.master_port)
        return end

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_endpoint)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (_Stream(),) * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


class NCCLServer(FakeServer):
    """A fake server whose workers receive what is broadcast and keep it.

    Args:
        workers: How many it has, as under tensor parallelism.
        options: Of the fake server.

    Attributes:
        weights_held: Per worker the tensors of the last update, by name.
        fail_at: Name of a tensor at which loading fails.
        half_loaded: Whether layers are without memory, as after a failed update; a request would end the real engine.
    """

    def __init__(self, workers: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.workers = workers
        self.weights_held: list[dict[str, Tensor]] = [{} for _ in range(workers)]
        self.fail_at: str | None = None
        self.half_loaded = False
        self._ends: list[Communicator] = []
        self._info: dict[str, Any] = {}

    def stop(self) -> None:
        self._leave()
        super().stop()

    def _dev_routes(self) -> dict[tuple[str, str], Any]:
        size = {"world_size": self.workers}
        return super()._dev_routes() | {("GET", "/get_world_size"): lambda call: web.json_response(size)}

    async def _init_transfer(self, call: Call) -> web.Response:
        self._leave()
        self._info = info = call.body["init_info"]
        meeting, first = Meeting.at(info["master_port"]), info["rank_offset"]
        ranks = range(first, first + self.workers)
        self._ends = await asyncio.gather(
            *(asyncio.to_thread(Communicator, meeting, rank, info["world_size"]) for rank in ranks)
        )
        return super()._init_transfer(call)

    def _start_update(self, call: Call) -> web.Response:
        response = super()._start_update(call)
        self.half_loaded = self.half_loaded or response.status == 200
        return response

    def _finish_update(self, call: Call) -> web.Response:
        response = super()._finish_update(call)
        self.half_loaded = self.half_loaded and response.status != 200
        return response

    async def _update(self, call: Call) -> web.Response:
        response = super()._update(call)
        if response.status != 200:
            return response
        try:
            places = range(self.workers)
            await asyncio.gather(
                *(asyncio.to_thread(self._receive, place, call.body["update_info"]) for place in places)
            )
        except (ValueError, RuntimeError) as cause:
            self.weights.updating = False  # as vLLM's worker does
            return _error(500, f"Worker failed with error '{cause}'")
        return response

    def _receive(self, worker: int, update_info: dict[str, Any]) -> None:
        """What ``NCCLWeightTransferEngine.receive_weights`` does, into a dictionary."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        def expected() -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
            for name, dtype, shape in zip(
                *(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True
            ):
                yield name, (shape, getattr(torch, dtype))

        def load(tensors: list[tuple[str, Tensor]]) -> None:
            for name, tensor in tensors:
                if name == self.fail_at:
                    raise ValueError(f"There is no module or parameter named {name!r}")
                self.weights_held[worker][name] = tensor.clone()

        packed_nccl_broadcast_consumer(
            iterator=expected(),
            group=self._ends[worker],
            src=0,
            post_unpack_func=load,
            buffer_size_bytes=self._info["packed_buffer_size_bytes"],
            num_buffers=self._info["packed_num_buffers"],
            device=torch.device("cpu"),
        )

    def _leave(self) -> None:
        for end in self._ends:
            end.destroy()
        self._ends = []
