"""Stop 14: what a weight sync does around its bytes: pause, update, label, resume, and put right what a failure left.

Each carrier of the bytes (gloo, NCCL) is a subclass that connects and that does the middle part, the update itself.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lit_rl.engines.http import Background, Deadline
from lit_rl.errors import LitRLError, ServerError, SettingsError, SyncError
from lit_rl.sync.client import Answers, WeightSyncClient
from lit_rl.sync.group import address_towards
from lit_rl.sync.transport import Metadata, Source, SyncTimings

T = TypeVar("T")

logger = logging.getLogger(__name__)

MEET_TIMEOUT_S = 60.0
"""A server is deaf while it waits for the others to join, so that wait is short whatever the timeout of a sync is."""

CLEANUP_S = 3.0
"""How long each call of the clean-up after a failure may take."""

WORDS_S = 2.0
"""When the bytes stop, the server's reason is on its way too; it gets so long to arrive."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class ServerTransport(ABC):
    """A ``Transport`` to vLLM servers by their weight-update routes, whatever carries the bytes.

    Args:
        urls: The servers.
        timeout: Seconds that opening and each push may take.
        port: Where the servers find the trainer; 0 takes a free one.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float, port: int) -> None:
        self.clients = [WeightSyncClient(url, timeout) for url in urls]
        self.timeout, self.port = timeout, port
        self.metadata: Metadata = ()

    # ---- what a carrier does ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether trainer and workers have met and can go on to do so."""

    @abstractmethod
    def _connect(self, worlds: Sequence[int], deadline: Deadline) -> None:
        """Meets the workers of all servers; ``worlds`` says how many each has."""

    @abstractmethod
    def _update(self, source: Source, label: str, deadline: Deadline) -> None:
        """Starts the update, brings the tensors, and finishes it with the label."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Leaves the workers without waiting for them; may be called when not connected."""

    @staticmethod
    @abstractmethod
    def _abort_update(client: WeightSyncClient) -> None:
        """Leaves one server with whole layers and without an open update, whether it has one or not."""

    # ---- the sequence -----------------------------------------------------------------------------------------------

    def open(self, metadata: Metadata) -> None:
        self.metadata = metadata
        try:
            self._meet()
        except (ServerError, SyncError) as cause:
            self._disconnect()
            raise SyncError(f"no weight transfer could be opened: {cause}") from cause

    def push(self, source: Source, version: int) -> SyncTimings:
        started = time.perf_counter()
        deadline = Deadline(self.timeout)
        updating = False
        try:
            if not self.connected:
                self._meet()
            self._everywhere("pause", WeightSyncClient.pause, deadline)
            paused = time.perf_counter()
            updating = True
            self._update(source, str(version), deadline)
            updating = False
            loaded = time.perf_counter()
            self._everywhere("resume", WeightSyncClient.resume, deadline)
        except (ServerError, SyncError) as cause:
            self._abort(updating)
            raise SyncError(
                f"policy version {version} did not reach the server: {cause} "
                f"(weight_sync.timeout is {self.timeout:g} s)"
            ) from cause
        except BaseException:
            self._abort(updating)
            raise
        return SyncTimings(paused - started, 0.0, loaded - paused, time.perf_counter() - started)

    def close(self) -> None:
        connected = self.connected
        self._disconnect()
        if connected:  # a server that goes on frees its buffers; one that is being stopped need not answer
            _best_effort(lambda client: client.shutdown_weight_transfer_engine(timeout=CLEANUP_S), self.clients)

    def _meet(self) -> None:
        deadline = Deadline(min(MEET_TIMEOUT_S, self.timeout))
        worlds = self._everywhere("get_world_size", WeightSyncClient.world_size, deadline)
        self._recover_paused(deadline)
        self._connect(worlds, deadline)

    def _recover_paused(self, deadline: Deadline) -> None:
        """A trainer that was killed in a sync may have left a server paused in the middle of an update."""
        paused = self._everywhere("is_paused", WeightSyncClient.is_paused, deadline)
        left = [client for client, is_paused in zip(self.clients, paused, strict=True) if is_paused]
        for client in left:
            logger.warning("%s was paused, as by a run that was killed in a weight sync; resuming it", client.url)
        _best_effort(self._abort_update, left)
        _best_effort(lambda client: client.resume(CLEANUP_S), left)

    def _abort(self, updating: bool) -> None:
        """Leaves every server that still answers with whole layers, without an open update, and running."""
        self._disconnect()
        if updating:
            _best_effort(self._abort_update, self.clients)
        _best_effort(lambda client: client.resume(CLEANUP_S), self.clients)

    def _everywhere(self, what: str, action: Callable[[WeightSyncClient], T], deadline: Deadline) -> list[T]:
        answers = Answers(self.clients, what, action)
        try:
            return answers.wait(deadline)
        except BaseException:
            answers.let_end(CLEANUP_S)  # a pause on its way must not arrive after the resume that follows
            raise

    def _port_taken(self, reason: str) -> SettingsError:
        return SettingsError(
            "data.engine.transfer_port",
            self.port,
            f"the trainer cannot listen there ({reason}); is another run using it? Give another port",
        )

    def _own_address(self) -> str:
        """This machine as the servers see it: by loopback only when all of them are here."""
        hosts = [urlsplit(client.url).hostname or "" for client in self.clients]
        away = [host for host in hosts if host not in LOOPBACK]
        return address_towards(away[0]) if away else "127.0.0.1"


def rank_offsets(clients: Sequence[WeightSyncClient], worlds: Sequence[int]) -> dict[WeightSyncClient, int]:
    """Rank of each server's first worker; the trainer is rank 0. Servers of 2 and 1 workers begin at 1 and 3."""
    return {client: 1 + sum(worlds[:place]) for place, client in enumerate(clients)}


def _best_effort(action: Callable[[WeightSyncClient], Any], clients: Iterable[WeightSyncClient]) -> None:
    """All at once; what fails is logged, since an error is on its way already or the run is over."""
    calls = [(client, Background(partial(action, client), "clean-up " + client.url)) for client in clients]
    deadline = Deadline(CLEANUP_S + 0.5)
    for client, call in calls:
        try:
            call.result(deadline.left)
        except (LitRLError, TimeoutError) as failure:
            logger.warning("clean-up: %s", failure or f"{client.url} did not answer within {CLEANUP_S:g} s")
