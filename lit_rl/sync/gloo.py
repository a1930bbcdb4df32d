"""Stop 14: the trainer's end of a weight transfer over gloo.

One group spans the trainer (rank 0) and the workers of all servers (ranks 1, 2, ...): a tensor is packed and sent once
however many servers there are, and all of them get one policy or none of them resumes with a new label. The calling
thread packs and posts; gloo's threads send, and the servers load what has arrived meanwhile. The calling thread never
waits on gloo alone: it watches the chunks and the servers' answers to ``/update_weights`` together, so that a refusal
ends the push at once, in the server's words.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from lit_rl.engines.http import Background, Deadline
from lit_rl.sync.client import POLL_S, Answers, WeightSyncClient
from lit_rl.sync.group import Group, TransferBroken, all_are_coming, host_store
from lit_rl.sync.sequence import CLEANUP_S, WORDS_S, ServerTransport, rank_offsets
from lit_rl.sync.transport import Metadata, Source, as_announced
from lit_rl.sync.wire import CHUNK_BYTES, Layout

RING = 4
"""Chunks that the trainer holds while they are on their way; more would only wait for the servers' loading."""


class GlooTransport(ServerTransport):
    """A ``Transport`` to servers whose backend is ``gloo``.

    Args:
        urls: The servers.
        timeout: Seconds that opening and each push may take.
        port: Where the servers find the trainer; 0 takes a free one.
        chunk_bytes: Size of the pieces in which tensors travel.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout: float = 1800.0, port: int = 0, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(urls, timeout=timeout, port=port)
        self._chunk_bytes = chunk_bytes
        self._store: TCPStore | None = None
        self._sender: _Sender | None = None

    @property
    def connected(self) -> bool:
        return self._sender is not None

    def close(self) -> None:
        super().close()
        self._store = None

    def _connect(self, worlds: Sequence[int], deadline: Deadline) -> None:
        layout = Layout.plan(self.metadata, self._chunk_bytes)
        store = self._meeting_point()
        info = layout.to_json() | {
            "master_address": self._own_address(),
            "master_port": store.port,
            "group": f"lit_rl-{uuid.uuid4().hex}",
            "world_size": 1 + sum(worlds),
            "meet_timeout_s": deadline.seconds,
            "timeout_s": self.timeout,
        }
        offsets = rank_offsets(self.clients, worlds)
        answers = Answers(
            self.clients,
            "init_weight_transfer_engine",
            lambda client: client.init_weight_transfer_engine(info | {"rank_offset": offsets[client]}),
        )
        while not all_are_coming(store, info["group"], info["world_size"]):
            answers.check(deadline)
            time.sleep(POLL_S)
        meeting = Background(lambda: self._join(store, info), "gloo group begins")
        answers.wait(deadline, beside=[meeting])
        self._sender = _Sender(meeting.result(0.0), self.metadata, layout)

    def _join(self, store: TCPStore, info: dict[str, Any]) -> Group:
        return Group(
            store,
            info["group"],
            rank=0,
            size=info["world_size"],
            address=info["master_address"],
            meet_timeout=info["meet_timeout_s"],
            timeout=self.timeout,
        )

    def _meeting_point(self) -> TCPStore:
        if self._store is None:
            try:
                self._store = host_store(self.port, self.timeout)
            except RuntimeError as cause:  # torch's DistNetworkError
                raise self._port_taken(str(cause).splitlines()[0]) from cause
        return self._store

    def _disconnect(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.group.give_up()

    def _update(self, source: Source, label: str, deadline: Deadline) -> None:
        """Sends while the servers' calls run."""
        assert self._sender is not None
        self._everywhere("start_weight_update", WeightSyncClient.start_weight_update, deadline)
        answers = Answers(self.clients, "update_weights", lambda client: client.update_weights({"version": label}))
        try:
            self._sender.send(source, lambda: answers.check(deadline))
            answers.wait(deadline)
        except TransferBroken:
            answers.wait_for_words(WORDS_S)
            raise
        self._everywhere("finish_weight_update", lambda client: client.finish_weight_update(label), deadline)

    @staticmethod
    def _abort_update(client: WeightSyncClient) -> None:
        """A server may have ended the update by itself when it refused it; then it refuses the abort too, which does no
        harm, while a request on tensors that are half loaded would end its engine."""
        client.abort_weight_update(CLEANUP_S)


class _Sender:
    """Packs tensors into chunks and posts them; a ring of buffers lets packing run ahead of the wire."""

    def __init__(self, group: Group, metadata: Metadata, layout: Layout) -> None:
        self.group = group
        self._metadata, self._layout = metadata, layout
        size = min(layout.chunk_bytes, layout.total)
        self._ring = [torch.empty(size, dtype=torch.uint8) for _ in range(min(RING, layout.chunks))]

    def send(self, source: Source, check: Callable[[], None]) -> None:
        """Returns when every chunk has been sent.

        Args:
            source: The tensors, as the layout has them.
            check: Raises when the push has failed otherwise; called while waiting.

        Raises:
            SyncError: the source gives other tensors than were announced.
            TransferBroken: a server is gone.
        """
        layout, on_way = self._layout, deque[int]()
        chunk = filled = 0
        for piece in _pieces(as_announced(source, self._metadata), layout):
            while piece.numel():
                start, stop = layout.bounds(chunk)
                buffer = self._ring[chunk % len(self._ring)]
                taken = piece[: stop - start - filled]
                buffer[filled : filled + taken.numel()].copy_(taken)
                filled, piece = filled + taken.numel(), piece[taken.numel() :]
                if filled == stop - start:
                    on_way.append(self.group.post(buffer[:filled]))
                    chunk, filled = chunk + 1, 0
                    if len(on_way) == len(self._ring):  # the next chunk goes into the oldest one's buffer
                        self._await(on_way.popleft(), check)
        while on_way:
            self._await(on_way.popleft(), check)
        self.group.forget()

    def _await(self, number: int, check: Callable[[], None]) -> None:
        while not self.group.ended(number):
            check()
            time.sleep(POLL_S)
        self.group.wait(number)


def _pieces(tensors: Iterable[Tensor], layout: Layout) -> Iterable[Tensor]:
    """The stream as flat uint8 tensors, the gaps between tensors included."""
    end = 0
    for tensor, slot in zip(tensors, layout.slots, strict=True):
        if slot.offset > end:
            yield torch.zeros(slot.offset - end, dtype=torch.uint8)
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        end = slot.offset + slot.nbytes
