"""Stop 14: the trainer's end of a weight transfer over gloo.

One group spans the trainer (rank 0) and the workers of all servers (ranks 1, 2, ...): a tensor is packed and sent once
however many servers there are, and all of them get one policy or none of them resumes with a new label. The calling
thread packs and posts; gloo's threads send, and the servers load what has arrived meanwhile. The calling thread never
waits on gloo alone: it watches the chunks and the servers' answers to ``/update_weights`` together, so that a refusal
ends the push at once, in the server's words.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import TCPStore

from lit_rl.engines.http import Background, Deadline
from lit_rl.errors import LitRLError, ServerError, SettingsError, SyncError
from lit_rl.sync.client import WeightSyncClient, everywhere, raise_failure
from lit_rl.sync.group import Group, TransferBroken, address_towards, all_are_coming, host_store
from lit_rl.sync.transport import Metadata, Source, SyncTimings
from lit_rl.sync.wire import CHUNK_BYTES, Layout

logger = logging.getLogger(__name__)

RING = 4
"""Chunks that the trainer holds while they are on their way; more would only wait for the servers' loading."""

MEET_TIMEOUT_S = 60.0
"""A server is deaf while it waits for the others to join, so that wait is short whatever the timeout of a sync is."""

CLEANUP_S = 3.0
"""How long each call of the clean-up after a failure may take."""

POLL_S = 0.001
WORDS_S = 2.0
"""When a chunk fails, the server's reason is on its way too; it gets so long to arrive."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class GlooTransport:
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
        self._clients = [WeightSyncClient(url, timeout) for url in urls]
        self._timeout, self._port, self._chunk_bytes = timeout, port, chunk_bytes
        self._store: TCPStore | None = None
        self._layout: Layout | None = None
        self._sender: _Sender | None = None

    def open(self, metadata: Metadata) -> None:
        self._layout = Layout.plan(metadata, self._chunk_bytes)
        try:
            self._connect()
        except (ServerError, SyncError) as cause:
            self._disconnect()
            raise SyncError(f"no weight transfer could be opened: {cause}") from cause

    def push(self, source: Source, version: int) -> SyncTimings:
        started = time.perf_counter()
        deadline = Deadline(self._timeout)
        updating = False
        try:
            if self._sender is None:
                self._connect()
            self._everywhere(WeightSyncClient.pause, "pause", deadline)
            paused = time.perf_counter()
            updating = True
            self._everywhere(WeightSyncClient.start_weight_update, "start_weight_update", deadline)
            self._transfer(source, version, deadline)
            finish = lambda client: client.finish_weight_update(str(version))  # noqa: E731
            self._everywhere(finish, "finish_weight_update", deadline)
            loaded = time.perf_counter()
            updating = False
            self._everywhere(WeightSyncClient.resume, "resume", deadline)
        except (ServerError, SyncError) as cause:
            self._abort(updating)
            raise SyncError(
                f"policy version {version} did not reach the server: {cause} "
                f"(weight_sync.timeout is {self._timeout:g} s)"
            ) from cause
        except BaseException:
            self._abort(updating)
            raise
        return SyncTimings(paused - started, 0.0, loaded - paused, time.perf_counter() - started)

    def close(self) -> None:
        connected = self._sender is not None
        self._disconnect()
        self._store = None
        if connected:  # a server that goes on frees its buffers; one that is being stopped need not answer
            self._best_effort(lambda client: client.shutdown_weight_transfer_engine(timeout=CLEANUP_S), self._clients)

    # ---- connecting -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Meets the workers of all servers in a new group; a server that an earlier run left paused is resumed."""
        assert self._layout is not None, "open() comes first"
        deadline = Deadline(min(MEET_TIMEOUT_S, self._timeout))
        worlds = self._everywhere(WeightSyncClient.world_size, "get_world_size", deadline)
        self._recover_paused(deadline)
        store = self._meeting_point()
        info = self._layout.to_json() | {
            "master_address": self._own_address(),
            "master_port": store.port,
            "group": f"lit_rl-{uuid.uuid4().hex}",
            "world_size": 1 + sum(worlds),
            "meet_timeout_s": deadline.seconds,
            "timeout_s": self._timeout,
        }
        offsets = [1 + sum(worlds[:place]) for place in range(len(worlds))]
        answers = [
            Background(_bound(client.init_weight_transfer_engine, info | {"rank_offset": offset}), "init " + client.url)
            for client, offset in zip(self._clients, offsets, strict=True)
        ]
        while not all_are_coming(store, info["group"], info["world_size"]):
            _check(answers, self._clients, "init_weight_transfer_engine", deadline)
            time.sleep(POLL_S)
        meeting = Background(lambda: self._meet(store, info), "gloo group begins")
        _watch([meeting, *answers], self._clients, "init_weight_transfer_engine", deadline)
        self._sender = _Sender(meeting.result(0.0), self._layout)

    def _meet(self, store: TCPStore, info: dict[str, Any]) -> Group:
        return Group(
            store,
            info["group"],
            rank=0,
            size=info["world_size"],
            address=info["master_address"],
            meet_timeout=info["meet_timeout_s"],
            timeout=self._timeout,
        )

    def _meeting_point(self) -> TCPStore:
        if self._store is None:
            try:
                self._store = host_store(self._port, self._timeout)
            except RuntimeError as cause:  # torch's DistNetworkError
                raise SettingsError(
                    "data.engine.transfer_port",
                    self._port,
                    f"the trainer cannot listen there ({str(cause).splitlines()[0]}); is another run using it? Give "
                    "another port",
                ) from cause
        return self._store

    def _own_address(self) -> str:
        """This machine as the servers see it: by loopback only when all of them are here."""
        hosts = [urlsplit(client.url).hostname or "" for client in self._clients]
        away = [host for host in hosts if host not in LOOPBACK]
        return address_towards(away[0]) if away else "127.0.0.1"

    def _recover_paused(self, deadline: Deadline) -> None:
        """A trainer that was killed in a sync may have left a server paused in the middle of an update."""
        paused = self._everywhere(WeightSyncClient.is_paused, "is_paused", deadline)
        left = [client for client, is_paused in zip(self._clients, paused, strict=True) if is_paused]
        for client in left:
            logger.warning("%s was paused, as by a run that was killed in a weight sync; resuming it", client.url)
        self._best_effort(lambda client: client.abort_weight_update(CLEANUP_S), left)
        self._best_effort(lambda client: client.resume(CLEANUP_S), left)

    def _disconnect(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.group.give_up()

    # ---- transferring ---------------------------------------------------------------------------------------------

    def _transfer(self, source: Source, version: int, deadline: Deadline) -> None:
        """Sends while the servers' calls run; returns when all have loaded everything."""
        assert self._sender is not None
        info = {"version": str(version)}
        answers = [
            Background(_bound(client.update_weights, info), "update_weights " + client.url) for client in self._clients
        ]
        try:
            self._sender.send(source, lambda: _check(answers, self._clients, "update_weights", deadline))
            _watch(answers, self._clients, "update_weights", deadline)
        except TransferBroken:
            _wait_for_words(answers)
            raise_failure(answers)
            raise

    def _everywhere(self, action: Any, what: str, deadline: Deadline) -> list[Any]:
        return everywhere(self._clients, action, what, deadline)

    # ---- after a failure ------------------------------------------------------------------------------------------

    def _abort(self, updating: bool) -> None:
        """Leaves every server that still answers with whole layers, without an open update, and running.

        A server may have ended the update by itself when it refused it; then it refuses the abort too, which does no
        harm, while a request on tensors that are half loaded would end its engine.
        """
        self._disconnect()
        if updating:
            self._best_effort(lambda client: client.abort_weight_update(CLEANUP_S), self._clients)
        self._best_effort(lambda client: client.resume(CLEANUP_S), self._clients)

    @staticmethod
    def _best_effort(action: Any, clients: Iterable[WeightSyncClient]) -> None:
        """All at once; what fails is logged, since an error is on its way already or the run is over."""
        calls = [(client, Background(_bound(action, client), "clean-up " + client.url)) for client in clients]
        deadline = Deadline(CLEANUP_S + 0.5)
        for client, call in calls:
            try:
                call.result(deadline.left)
            except (LitRLError, TimeoutError) as failure:
                logger.warning("clean-up: %s", failure or f"{client.url} did not answer within {CLEANUP_S:g} s")


class _Sender:
    """Packs tensors into chunks and posts them; a ring of buffers lets packing run ahead of the wire."""

    def __init__(self, group: Group, layout: Layout) -> None:
        self.group = group
        self._layout = layout
        size = min(layout.chunk_bytes, layout.total)
        self._ring = [torch.empty(size, dtype=torch.uint8) for _ in range(min(RING, layout.chunks))]

    def send(self, source: Source, check: Any) -> None:
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
        for piece in _pieces(source, layout):
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

    def _await(self, number: int, check: Any) -> None:
        while not self.group.ended(number):
            check()
            time.sleep(POLL_S)
        self.group.wait(number)


def _pieces(source: Source, layout: Layout) -> Iterable[Tensor]:
    """The stream as flat uint8 tensors, the gaps between tensors included; checks the source against the layout."""
    end, slots = 0, iter(layout.slots)
    for name, tensor in source:
        slot = next(slots, None)
        if slot is None:
            raise SyncError(f"the policy has a tensor more than when the transfer was opened: {name!r}")
        if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
            raise SyncError(
                f"the policy's tensors changed since the transfer was opened: {slot.name!r} {slot.dtype} "
                f"{list(slot.shape)} was announced, {name!r} {tensor.dtype} {list(tensor.shape)} came"
            )
        if slot.offset > end:
            yield torch.zeros(slot.offset - end, dtype=torch.uint8)
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        end = slot.offset + slot.nbytes
    missing = next(slots, None)
    if missing is not None:
        raise SyncError(f"the policy has a tensor less than when the transfer was opened: {missing.name!r}")


def _bound(call: Any, *args: Any) -> Any:
    return lambda: call(*args)


def _check(
    answers: Sequence[Background[Any]], clients: Sequence[WeightSyncClient], what: str, deadline: Deadline
) -> None:
    """Raises the first failed answer's reason, or that the deadline passed before one."""
    raise_failure(answers)
    if deadline.passed:
        waiting = [
            client.url for client, answer in zip(clients, answers[-len(clients) :], strict=True) if not answer.done
        ]
        names = ", ".join(f"{url}/{what}" for url in waiting) or what
        raise SyncError(f"{names} gave no answer within {deadline.seconds:g} s")


def _watch(
    calls: Sequence[Background[Any]], clients: Sequence[WeightSyncClient], what: str, deadline: Deadline
) -> None:
    """Until all calls have ended well; raises as ``_check``. The servers' calls are the last ones."""
    while not all(call.done for call in calls):
        _check(calls, clients, what, deadline)
        time.sleep(POLL_S)
    raise_failure(calls)


def _wait_for_words(answers: Sequence[Background[Any]]) -> None:
    deadline = Deadline(WORDS_S)
    while not deadline.passed and not any(answer.failure for answer in answers):
        time.sleep(POLL_S)
