"""Stop 7: the rollout process itself: its start, its signs of life, its way home and its end.

It ends when told to, when its parent is gone, and when something fails; a failure goes home as text first. The event
loop gives the heartbeat, so that a blocked loop counts as hung. A watching thread sees the parent's death even then.
Processes that rewards or hooks started end with it: they share its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from lit_rl.errors import LitRLError, SettingsError
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.rollout.wires import ChildEnds, Failure, Numbers, Stop
from lit_rl.settings import EndpointSpec, Reward, RolloutSettings
from lit_rl.types import SampleGroup

if TYPE_CHECKING:
    from lit_rl.rollout.loop import RolloutLoop

_WATCH_S = 0.5
_QUEUE_POLL_S = 0.005
_FLUSH_S = 2.0
_TRACEBACK_CHARS = 30_000  # with its frame well below the 64 KiB that a pipe takes without a reader


@dataclass
class ChildPlan:
    """Everything that the rollout process is made of; pickled by the parent (see ``RolloutHandle``)."""

    settings: RolloutSettings
    endpoint: EndpointSpec
    train: Any
    evals: dict[str, Any]
    rewards: list[Reward]
    tokenizer: str
    trust_remote_code: bool
    eos_token_ids: list[int]
    loop: str | type[RolloutLoop] | None
    start: LedgerStart

    def check(self) -> None:
        """Finds in the parent what would only fail in the child."""
        from lit_rl.rollout.loop import RolloutLoop
        from lit_rl.rollout.prompts import check_dataset
        from lit_rl.rollout.reward_functions import check_picklable, load_rewards

        check_dataset(self.train)
        for name, rows in self.evals.items():
            check_dataset(rows, f"data.eval.{name}")
        check_picklable(self.rewards)
        load_rewards(self.rewards)
        loop_class = import_loop(self.loop)
        if not self.rewards and loop_class is RolloutLoop:
            remedy = "nothing would score a rollout; give a reward function, or a loop that sets Rollout.reward"
            raise SettingsError("data.rewards", self.rewards, remedy)


def import_loop(loop: str | type[RolloutLoop] | None) -> type[RolloutLoop]:
    """The loop to run; raises SettingsError if it is none, or not one that another process can import."""
    from lit_rl.rollout.loop import RolloutLoop
    from lit_rl.rollout.reward_functions import import_object

    found = import_object(loop, "data.loop") if isinstance(loop, str) else loop or RolloutLoop
    if not isinstance(found, type) or not issubclass(found, RolloutLoop):
        raise SettingsError("data.loop", loop, "give a subclass of lit_rl.RolloutLoop, or its import path")
    if "<locals>" in found.__qualname__:
        remedy = "the loop is built in another process, which cannot import a class defined inside a function"
        raise SettingsError("data.loop", found.__qualname__, remedy)
    return found


def run_child(payload: bytes, ends: ChildEnds) -> None:
    """The whole life of the rollout process; never returns.

    Args:
        payload: The pickled ``ChildPlan``.
        ends: The way to the parent.
    """
    # A session of its own: Ctrl-C is for the trainer alone, and what rewards start here can be ended with this process.
    os.setsid()
    logging.basicConfig(format="[rollout] %(levelname)s %(message)s")
    sender = Sender(ends.messages)
    code = 0
    try:
        plan: ChildPlan = pickle.loads(payload)
        _watch_parent(plan.settings.parent_pid)
        # Not asyncio.run, which at its end waits for threads: a call that hangs in one would hold back the bad news.
        asyncio.new_event_loop().run_until_complete(_live(plan, ends, sender))
    except BaseException as error:  # noqa: BLE001  (it goes home, and this process ends)
        code = 1
        with contextlib.suppress(OSError):
            ends.failures.send(_last_words(error))
    sender.flush(_FLUSH_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit, which waits for threads too; the parent ends what is left of the group


async def _live(plan: ChildPlan, ends: ChildEnds, sender: Sender) -> None:
    stop = asyncio.Event()
    heart = asyncio.ensure_future(_beat(ends.numbers, plan.settings.heartbeat_s, stop))
    try:
        building = asyncio.ensure_future(asyncio.to_thread(_build, plan, ends, sender))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():  # the imports would go on for seconds; this process ends without them
            return
        loop = building.result()
        with Inbox(ends.commands, loop, stop) as inbox:
            await _first_done(loop.run(stop), inbox.failed)
    finally:
        heart.cancel()


async def _first_done(work: Any, failed: asyncio.Future[None]) -> None:
    """``work`` to its end, or the error that ``failed`` gets."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        failed.result()
    await task


def _build(plan: ChildPlan, ends: ChildEnds, sender: Sender) -> RolloutLoop:
    """The loop with its parts; slow (the tokenizer's imports), so it runs beside the heartbeat."""
    from transformers import AutoTokenizer

    from lit_rl.rollout.admission import AsyncAdmission
    from lit_rl.rollout.loop import Parts
    from lit_rl.rollout.prompts import PromptSource
    from lit_rl.rollout.reward_functions import load_rewards
    from lit_rl.rollout.sampler import Sampler
    from lit_rl.rollout.scoring import Scorer

    settings, numbers = plan.settings, ends.numbers

    def version() -> int:
        return numbers.version.value

    tokenizer = AutoTokenizer.from_pretrained(plan.tokenizer, trust_remote_code=plan.trust_remote_code)
    parts = Parts(
        sampler=Sampler(plan.endpoint, settings),
        source=PromptSource(plan.train, tokenizer, settings, plan.start),
        admission=AsyncAdmission(settings.max_concurrent_rollouts, version, settings.release_by_version),
        scorer=Scorer(load_rewards(plan.rewards), settings.drop_equal_rewards),
        outbox=PipeOutbox(sender, numbers, settings.queue_maxsize),
        version=version,
        eos_token_ids=frozenset(plan.eos_token_ids),
        evals=plan.evals,
    )
    return import_loop(plan.loop)(settings, tokenizer, parts)


class Sender:
    """Writes messages to the pipe from a thread of its own, so that a slow reader never blocks the event loop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._given = self._written = 0
        threading.Thread(target=self._run, name="lit-rl-sender", daemon=True).start()

    def send(self, message: Any) -> None:
        self._given += 1
        self._waiting.put(message)

    def flush(self, timeout: float) -> None:
        """Waits until everything is written, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self._written < self._given and time.monotonic() < deadline:
            time.sleep(_QUEUE_POLL_S)

    def _run(self) -> None:
        while True:
            message = self._waiting.get()
            with contextlib.suppress(OSError):  # the parent is gone; the watcher ends this process
                self._pipe.send(message)
            self._written += 1


class PipeOutbox:
    """The rollout queue's writing end.

    A group waits while the queue holds samples and has no room for all of its own; so whole groups travel, and one that
    is larger than the queue passes when the queue is empty. Everything else travels at once.

    Args:
        sender: Writes.
        numbers: The shared counters.
        maxsize: Samples that the queue holds.
    """

    def __init__(self, sender: Sender, numbers: Numbers, maxsize: int) -> None:
        self._sender, self._numbers, self._maxsize = sender, numbers, maxsize
        self._waiting: dict[object, float] = {}
        self._blocked_s = 0.0

    async def put(self, message: Any) -> None:
        """Sends ``message``; its wake-up is the trainer taking samples, seen by looking at its counter."""
        if isinstance(message, SampleGroup):
            await self._room_for(len(message.samples))
            self._numbers.sent.value += len(message.samples)
            message.queued_at = time.time()
        self._sender.send(message)

    def take_blocked_seconds(self) -> float:
        now = time.monotonic()
        blocked = self._blocked_s + sum(now - since for since in self._waiting.values())
        self._blocked_s, self._waiting = 0.0, dict.fromkeys(self._waiting, now)
        return blocked

    async def _room_for(self, samples: int) -> None:
        if self._fits(samples):
            return
        me = object()
        self._waiting[me] = time.monotonic()
        try:
            while not self._fits(samples):
                await asyncio.sleep(_QUEUE_POLL_S)
        finally:
            self._blocked_s += time.monotonic() - self._waiting.pop(me)

    def _fits(self, samples: int) -> bool:
        held = self._numbers.queue_size
        return held == 0 or held + samples <= self._maxsize


class Inbox:
    """Hands the parent's commands to the loop as they come; a closed pipe means that the parent is gone."""

    def __init__(self, pipe: Connection, loop: RolloutLoop, stop: asyncio.Event) -> None:
        self._pipe, self._loop, self._stop = pipe, loop, stop
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Inbox:
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self.failed.cancel()

    def _read(self) -> None:
        try:
            command = self._pipe.recv()
        except (EOFError, OSError):
            command = Stop()
        if isinstance(command, Stop):
            self._stop.set()
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            return
        try:
            self._loop.obey(command)
        except Exception as error:  # noqa: BLE001  (ends the loop with it)
            if not self.failed.done():
                self.failed.set_exception(error)


async def _beat(numbers: Numbers, every_s: float, stop: asyncio.Event) -> None:
    while True:
        numbers.heartbeat.value = time.monotonic()
        if numbers.stop.value:
            stop.set()
        await asyncio.sleep(every_s)


def _watch_parent(parent_pid: int) -> None:
    """Ends this process, and what it started, within a second or two of its parent's death, whatever the loop does."""
    original = os.getppid()

    def gone() -> bool:
        if os.getppid() != original:
            return True
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            return True
        return False

    def watch() -> None:
        while not gone():
            time.sleep(_WATCH_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lit-rl-parent-watch", daemon=True).start()


def _last_words(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    if len(text) > _TRACEBACK_CHARS:
        text = text[: _TRACEBACK_CHARS // 2] + "\n[...]\n" + text[-_TRACEBACK_CHARS // 2 :]
    return Failure(error if isinstance(error, LitRLError) and _survives_pickling(error) else None, text)


def _survives_pickling(error: LitRLError) -> bool:
    try:
        data = pickle.dumps(error)
        return len(data) < _TRACEBACK_CHARS and type(pickle.loads(data)) is type(error)
    except Exception:  # noqa: BLE001  (whatever it is, the traceback goes home as text)
        return False
