"""Stop 14: the trainer's end of a weight transfer over NCCL, through vLLM's own engine for it.

vLLM's engine packs, broadcasts and drives the servers' routes, but it does not bound its waits: a broadcast whose peer
does not come blocks its thread, and nothing inside the process can interrupt it. So the engine runs in a thread of its
own. The calling thread hands it one tensor after the other and meanwhile watches the servers' answers and the
deadline; when either ends the sync, it aborts the communicator, which ends a blocked broadcast, and goes on without
waiting for the thread. Should NCCL not let go even so, that thread stays blocked until the process ends and keeps the
buffers of its transfer (at most ``packed_num_buffers`` of them) on the GPU.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lit_rl.engines.http import Background, Deadline
from lit_rl.engines.process import free_port, why_taken
from lit_rl.errors import ServerError, SyncError
from lit_rl.sync.client import POLL_S, Answers, WeightSyncClient
from lit_rl.sync.group import TransferBroken
from lit_rl.sync.sequence import CLEANUP_S, WORDS_S, ServerTransport, rank_offsets
from lit_rl.sync.transport import Metadata, Source, as_announced

T = TypeVar("T")

logger = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 2**20
"""Of a packed message. Two are on their way at a time, at both ends, beside whatever else fills the GPUs."""

RELEASE_S = 30.0
"""How long workers are given to take what they still wait for when the trainer's own tensors cannot come."""


class NCCLTransport(ServerTransport):
    """A ``Transport`` to servers on CUDA whose backend is ``nccl``, from a trainer on CUDA.

    Args:
        urls: The servers.
        timeout: Seconds that opening and each push may take.
        port: Where the servers find the trainer; 0 takes a free one.
        buffer_bytes: Size of a packed message; a larger tensor travels in one of its own size.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout: float = 1800.0, port: int = 0, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        super().__init__(urls, timeout=timeout, port=port)
        self._buffer_bytes = buffer_bytes
        self._link: _Link | None = None

    @property
    def connected(self) -> bool:
        return self._link is not None

    def _connect(self, worlds: Sequence[int], deadline: Deadline) -> None:
        engine, init_info = _vllm_engine()
        address, port = self._own_address(), self.port or free_port()
        # vLLM's meeting point would notice a taken port too, but only after the servers went to whoever listens there
        reason = why_taken(address, port)
        if reason is not None:
            raise self._port_taken(f"{reason} at {address}")
        device = _current_device()
        largest = max(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.metadata)
        info = init_info(
            rank=0,
            master_address=address,
            master_port=port,
            world_size=1 + sum(worlds),
            packed_buffer_size_bytes=max(self._buffer_bytes, largest),
        )
        given_up = threading.Event()
        servers = _Servers(rank_offsets(self.clients, worlds), given_up, deadline)
        feed = _Feed(self.metadata, device, given_up)
        meeting = Background(
            lambda: _on_device(device, lambda: engine.trainer_init(info, client=servers, source=feed)), "nccl begins"
        )
        try:
            while not meeting.done:
                servers.check()
                time.sleep(POLL_S)
            self._link = _Link(_met(meeting), servers, feed, device)
        except BaseException:
            # The meeting goes on in its thread, and the port stays taken, until vLLM gives up on it after 5 minutes.
            given_up.set()
            raise

    def _update(self, source: Source, label: str, deadline: Deadline) -> None:
        """vLLM's engine starts the update, sends, and finishes it; this thread feeds it and watches."""
        assert self._link is not None
        servers, feed = self._link.servers, self._link.feed
        servers.begin(label, deadline)
        sending = Background(self._link.send, "nccl sends")

        def check() -> None:
            servers.check()
            if sending.failure is not None:
                servers.wait_for_words()
                _raise_broken(sending.failure)

        try:
            for tensor in as_announced(source, self.metadata):
                feed.put(tensor, check)
            while not sending.done:
                check()
                time.sleep(POLL_S)
            check()
        except (ServerError, TransferBroken):
            raise
        except BaseException:
            self._release_workers(sending, deadline)
            raise

    def _release_workers(self, sending: Background[None], deadline: Deadline) -> None:
        """Lets the servers finish an update whose tensors cannot come: a gather failed, or the user interrupts.

        A worker that waits in NCCL waits for ever and its server would have to be restarted; so it gets zeros for what
        is missing. The server then has no usable policy until the next sync, which every run begins with.
        """
        assert self._link is not None
        self._link.servers.label = None  # these are not the weights of any version
        self._link.feed.fill_up()
        sending.wait(min(deadline.left, RELEASE_S))
        for client in self.clients:
            logger.warning("%s has incomplete weights until its next weight sync", client.url)

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.give_up()

    @staticmethod
    def _abort_update(client: WeightSyncClient) -> None:
        client.close_weight_update(CLEANUP_S)


@dataclass(frozen=True, slots=True)
class _Link:
    """What one meeting with the workers left: vLLM's engine with its communicator, and both that it works with."""

    engine: Any
    servers: _Servers
    feed: _Feed
    device: torch.device

    def send(self) -> None:
        _on_device(self.device, self.engine.send_weights)

    def give_up(self) -> None:
        """Ends the transfer that runs, if one does; aborting the communicator frees a thread that it blocks."""
        self.servers.given_up.set()
        Background(self.engine.shutdown, "nccl ends").wait(CLEANUP_S)


class _Servers:
    """All servers as the one client that vLLM's engine speaks to, with one deadline and one label.

    Called in the engine's thread, watched by ``check`` from another one.

    Args:
        offsets: The servers, and the rank of each one's first worker.
        given_up: Once set, a call that waits for an answer raises.
        deadline: Of the meeting.
    """

    def __init__(self, offsets: Mapping[WeightSyncClient, int], given_up: threading.Event, deadline: Deadline) -> None:
        self.given_up = given_up
        self.label: str | None = None
        self._clients, self._offsets = list(offsets), offsets
        self._deadline = deadline
        self._answers: Answers[None] | None = None

    def begin(self, label: str, deadline: Deadline) -> None:
        """What the next update is called and when it must be over."""
        self.label, self._deadline, self._answers = label, deadline, None

    def check(self) -> None:
        """Raises what the running call of a server raised, or ServerUnreachable when the deadline has passed."""
        answers = self._answers
        if answers is not None:
            answers.check(self._deadline)
        elif self._deadline.passed:
            raise TransferBroken(f"trainer and servers did not meet within {self._deadline.seconds:g} s")

    def wait_for_words(self) -> None:
        """A server whose worker failed says so a moment after NCCL; raises what it says."""
        if self._answers is not None:
            self._answers.wait_for_words(WORDS_S)

    # the four calls of vLLM's engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask(
            "init_weight_transfer_engine",
            lambda client: client.init_weight_transfer_engine(init_info | {"rank_offset": self._offsets[client]}),
        )

    def start_weight_update(self) -> None:
        self._ask("start_weight_update", WeightSyncClient.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._ask("update_weights", lambda client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """vLLM's engine gives no label."""
        self._ask("finish_weight_update", lambda client: client.finish_weight_update(self.label))

    def _ask(self, what: str, action: Callable[[WeightSyncClient], None]) -> None:
        self._answers = answers = Answers(self._clients, what, action)
        while not answers.done:
            answers.check(self._deadline)
            if self.given_up.wait(POLL_S):
                raise TransferBroken(f"/{what} was given up")
        answers.check(self._deadline)


class _Feed:
    """The trainer's tensors as the source that vLLM's engine iterates in its own thread, handed over one by one.

    Producing a tensor may be a collective of the trainer, so that happens in the calling thread.

    Args:
        announced: What each update consists of.
        device: The trainer's; tensors that are elsewhere are brought to it.
        given_up: Once set, the iteration raises.
    """

    def __init__(self, announced: Metadata, device: torch.device, given_up: threading.Event) -> None:
        self._announced, self._device, self._given_up = announced, device, given_up
        self._handed: queue.Queue[tuple[Tensor, torch.cuda.Event | None]] = queue.Queue(maxsize=1)
        self._filling = threading.Event()

    def put(self, tensor: Tensor, check: Callable[[], None]) -> None:
        """Hands a tensor over as soon as the one before it was taken; calls ``check`` while it waits."""
        tensor = tensor.detach().to(self._device)
        ready = torch.cuda.current_stream().record_event() if tensor.is_cuda else None
        while True:
            check()
            try:
                return self._handed.put((tensor, ready), timeout=POLL_S)
            except queue.Full:
                continue

    def fill_up(self) -> None:
        """Gives zeros for whatever has not been handed over."""
        self._filling.set()

    def metadata(self) -> list[Any]:
        """What vLLM's engine tells the servers to expect."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._announced]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in self._announced:
            yield name, self._taken(dtype, shape)

    def _taken(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        while not self._given_up.is_set():
            try:
                tensor, ready = self._handed.get(timeout=POLL_S)
            except queue.Empty:
                if self._filling.is_set():
                    return torch.zeros(*shape, dtype=dtype, device=self._device)
                continue
            if ready is not None:
                # The engine packs on a stream of its own, which knows nothing of the optimizer step or the gather
                # behind this tensor; and its memory must not be used anew before the packing has read it.
                stream = torch.cuda.current_stream()
                stream.wait_event(ready)
                tensor.record_stream(stream)
            return tensor
        raise TransferBroken("the transfer was given up")


def _vllm_engine() -> tuple[Any, Any]:
    """vLLM's engine for the sending side, and the class of what it is told when it begins."""
    try:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    except ImportError as cause:
        raise SyncError(
            f"the trainer sends weights to CUDA servers through vLLM, which it cannot import ({cause}); install "
            "lit_rl[gpu] where the trainer runs too"
        ) from cause
    return NCCLTrainerWeightTransferEngine, NCCLTrainerInitInfo


def _met(meeting: Background[Any]) -> Any:
    """vLLM's engine after the meeting; raises SyncError where there is none, or one that would send nothing."""
    if meeting.failure is not None:
        _raise_broken(meeting.failure)
    engine = meeting.result(0.0)
    if engine.model_update_group.disabled:  # what vLLM makes of a missing library: broadcasts that do nothing
        raise SyncError("vLLM could not load NCCL in the trainer's process, so nothing would be sent")
    return engine


def _raise_broken(failure: BaseException) -> NoReturn:
    """Raises an error of ours as it is, and any other (NCCL's, the meeting point's) as TransferBroken."""
    if isinstance(failure, (ServerError, SyncError)):
        raise failure
    words = str(failure).strip() or type(failure).__name__
    raise TransferBroken(f"the transfer broke off: {words.splitlines()[0]}") from failure


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _on_device(device: torch.device, work: Callable[[], T]) -> T:
    """``work()`` in a thread of its own: each thread has its own current device, and begins with the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return work()
