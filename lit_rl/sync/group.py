"""Stop 14: the process group between a trainer (rank 0) and the workers of its servers, over gloo; used at both ends.

torch's stores and groups directly, not ``torch.distributed``'s global state: trainer and server both have global groups
of their own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from lit_rl.engines.http import Background
from lit_rl.errors import SyncError
from lit_rl.sync.client import POLL_S
from lit_rl.sync.wire import Layout

THREADS = 2
"""Broadcasts that travel at the same time; one more than needed to keep the wire busy while another one ends."""


LOOK_S = 0.5
"""How often one who waits for a chunk asks whether the trainer is still there."""

END_POLL_S = 0.05


class TransferBroken(SyncError):
    """A chunk did not travel: the other end closed its connection, hung, or never joined."""


def address_towards(host: str) -> str:
    """The address of this machine from which ``host`` is reached; no packet is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def host_store(port: int, timeout: float) -> TCPStore:
    """The meeting point, held by the trainer. Port 0 takes a free one (``store.port``); raises where it is taken."""
    return TCPStore("0.0.0.0", port, None, True, timedelta(seconds=timeout), wait_for_workers=False)


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """The meeting point, seen from a server's worker."""
    return TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)


def announce(store: Store, name: str, rank: int) -> None:
    """A worker says that it comes to the meeting ``name``, before it goes there."""
    store.set(f"{name}/coming/{rank}", "1")


def all_are_coming(store: Store, name: str, size: int) -> bool:
    """Whether every worker has announced itself. The trainer goes only then: it could not leave before the timeout."""
    return store.check([f"{name}/coming/{rank}" for rank in range(1, size)])


class Group:
    """One trainer and its servers' workers. The constructor returns once all have met.

    Args:
        store: The meeting point.
        name: Of this meeting; a group that was given up is never met again.
        rank: 0 for the trainer.
        size: Trainer and workers.
        address: This end's own address, on the network of the others. ``GLOO_SOCKET_IFNAME`` wins over it.
        meet_timeout: Seconds until all must be there.
        timeout: Seconds that one chunk may take.

    Raises:
        TransferBroken: not all came in time.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, *, address: str, meet_timeout: float, timeout: float
    ) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to choose the address
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        options._devices = [
            ProcessGroupGloo.create_device(interface=interface.split(",")[0])
            if interface
            else ProcessGroupGloo.create_device(hostname=address)
        ]
        options._timeout = timedelta(seconds=meet_timeout)
        options._threads = THREADS
        self._store = store
        try:
            self._held: list[Any] = [ProcessGroupGloo(PrefixStore(name, store), rank, size, options)]
        except RuntimeError as cause:
            raise TransferBroken(f"trainer and servers did not meet: {_first_line(cause)}") from cause
        self._held[0].set_timeout(timedelta(seconds=timeout))
        store.set_timeout(timedelta(seconds=timeout))

    def post(self, chunk: Tensor) -> int:
        """Starts sending (rank 0) or receiving (others) a chunk, in gloo's own threads; returns its number."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._held.append(self._held[0].broadcast([chunk], options))
        return len(self._held) - 1

    def ended(self, number: int) -> bool:
        """Whether the chunk has travelled, or failed to."""
        return self._held[number].is_completed()

    def wait(self, number: int) -> None:
        """Until the chunk has travelled. Raises TransferBroken when it failed to, or at gloo's timeout.

        Gloo does not tell who waits for a chunk that its connection closed in the middle of it, so the meeting point,
        which lives and dies with the trainer, is asked beside it.
        """
        look = time.monotonic() + LOOK_S
        while not self.ended(number):
            if time.monotonic() >= look:
                self._look_for_trainer()
                look = time.monotonic() + LOOK_S
            time.sleep(POLL_S)
        try:
            self._held[number].wait()
        except RuntimeError as cause:
            raise TransferBroken(f"the transfer broke off: {_first_line(cause)}") from cause

    def _look_for_trainer(self) -> None:
        try:
            self._store.check(["trainer"])
        except RuntimeError as cause:  # torch's DistNetworkError
            raise TransferBroken("the transfer broke off: the trainer is gone") from cause

    def forget(self) -> None:
        """Lets go of the chunks that were posted; all of them must have ended."""
        del self._held[1:]

    def give_up(self) -> None:
        """Ends the group. The others see their connections close as soon as nothing of ours is on its way any more.

        That may take until gloo's timeout when a peer hangs, so it happens in a thread, which waits in Python: an
        interpreter that ends while a thread is inside gloo's destructor aborts the process. The connections live as
        long as any chunk is referenced: they are kept in one list here, and nowhere else, so that this can clear it.
        """
        held, self._held = self._held, []

        def end() -> None:
            while not all(chunk.is_completed() for chunk in held[1:]):
                time.sleep(END_POLL_S)
            held.clear()

        Background(end, "gloo group ends")


class Receiver:
    """A worker's end: memory for the whole stream, and the tensors in it as they arrive.

    All chunks are awaited at once and the memory is kept from update to update: a first use of fresh pages is three
    times slower, and loaders may hold views until a layer is complete.
    """

    def __init__(self, group: Group, layout: Layout) -> None:
        self._group, self._layout = group, layout
        self._stream = torch.empty(layout.total, dtype=torch.uint8).fill_(0)  # touches the pages

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the order of the layout, each as soon as its last chunk is there.

        Raises:
            TransferBroken: the trainer is gone or too slow.
        """
        layout = self._layout
        numbers = [self._group.post(self._stream[slice(*layout.bounds(chunk))]) for chunk in range(layout.chunks)]
        arrived = 0
        for slot in layout.slots:
            while arrived < layout.chunks_until(slot):
                self._group.wait(numbers[arrived])
                arrived += 1
            yield slot.name, slot.view(self._stream)
        self._group.forget()


def _first_line(cause: RuntimeError) -> str:
    """What gloo says, without its stack."""
    return str(cause).splitlines()[0]
