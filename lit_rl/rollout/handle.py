"""Stop 7: the trainer's end of the rollout process: start it, take its groups, ask for evaluations, stop it.

The child is spawned without CUDA and without the variables of a distributed launcher. It never ends by itself, so its
end is always an error here, and comes with its own words: an error of lit_rl as itself, anything else as
``ProducerDied`` with the child's traceback, or with the exit code where it left none.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from lit_rl.errors import LitRLError, ProducerDied, ProducerError, ProducerSilent, SettingsError
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.rollout.process import ChildPlan, run_child
from lit_rl.rollout.wires import Command, Evaluate, Failure, ParentEnds, Redispatch, Release, Stop, connect
from lit_rl.settings import EndpointSpec, Reward, RolloutSettings
from lit_rl.types import DroppedGroup, EvalResult, Position, RolloutReport, SampleGroup

if TYPE_CHECKING:
    from lit_rl.rollout.loop import RolloutLoop

Message = SampleGroup | DroppedGroup | RolloutReport

CHILD_ENV = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PMI_", "PMIX_")

_CHECK_S = 0.1
"""How often a waiting parent looks whether the child lives."""


@dataclass(frozen=True)
class _Lost:
    """The receiver thread's last word: the child's end of the pipe is closed."""


class RolloutHandle:
    """The rollout process as the trainer sees it; only global rank 0 has one.

    Args:
        settings: Everything about sampling and queues; ``parent_pid`` is filled in here.
        endpoint: The servers.
        train: The training prompts: a ``datasets.Dataset`` or a sequence of rows.
        evals: Evaluation prompts by name.
        rewards: The reward functions.
        tokenizer: Folder or hub id of the tokenizer.
        trust_remote_code: Whether the tokenizer may bring its own code.
        eos_token_ids: Every id that ends an answer: of generation config, config and tokenizer.
        loop: A ``RolloutLoop`` subclass or its import path; None = ``RolloutLoop``.
        start: What the ledger says must be dispatched.
        worker_timeout: Seconds without a heartbeat after which the child counts as hung.

    Raises:
        SettingsError: a reward or the loop cannot be sent to another process, and why.
        DataError: a dataset has no prompts.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        endpoint: EndpointSpec,
        *,
        train: Any,
        evals: Mapping[str, Any] | None = None,
        rewards: list[Reward],
        tokenizer: str,
        trust_remote_code: bool = False,
        eos_token_ids: list[int],
        loop: str | type[RolloutLoop] | None = None,
        start: LedgerStart | None = None,
        worker_timeout: float = 300.0,
    ) -> None:
        self._plan = ChildPlan(
            settings=replace(settings, parent_pid=os.getpid()),
            endpoint=endpoint,
            train=train,
            evals=dict(evals or {}),
            rewards=list(rewards),
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            eos_token_ids=list(eos_token_ids),
            loop=loop,
            start=start or LedgerStart(),
        )
        self._plan.check()
        self._worker_timeout = worker_timeout
        self._context = multiprocessing.get_context("spawn")
        self._process: BaseProcess | None = None
        self._ends: ParentEnds | None = None
        self._messages: queue.Queue[Message | _Lost] = queue.Queue()
        self._evaluations: queue.Queue[EvalResult] = queue.Queue()
        self._sending = threading.Lock()
        self._version = 0
        self._hung = False

    def start(self) -> None:
        """Spawns the child; returns at once. The child waits for ``set_policy_version(1)`` before it samples.

        Raises:
            SettingsError: something that the child needs cannot be pickled.
        """
        if self._process is not None:
            raise ProducerError("the rollout process was started before; make a new RolloutHandle")
        payload = _pickled(self._plan)
        ends, child_ends = connect(self._context)
        ends.numbers.version.value = self._version
        process = self._context.Process(target=run_child, args=(payload, child_ends), name="lit-rl-rollout")
        with _child_environment(), _main_module_hidden(unless=b"__main__" in payload), _deaf_to_ctrl_c():
            process.start()
        child_ends.close()
        self._process, self._ends = process, ends
        threading.Thread(target=self._receive, args=(ends,), name="lit-rl-rollout-receiver", daemon=True).start()
        # A non-daemonic child may start processes of its own (a reward's sandbox); an interpreter that exits would
        # wait for it, so stop it before that.
        atexit.register(self.stop)

    def set_policy_version(self, version: int) -> None:
        """Tells the child how many weight syncs are complete; groups that start from now on are stamped with it."""
        self._version = version
        if self._ends is not None:
            self._ends.numbers.version.value = version

    def get(self, timeout: float) -> Message | None:
        """The next group or report; None if there is none within ``timeout`` seconds.

        Woken by the receiver thread; looks after the child's health while it waits.

        Raises:
            LitRLError: the child failed with an error of lit_rl; raised as itself.
            ProducerDied: the child is gone; with its traceback or exit code.
            ProducerSilent: no heartbeat for ``worker_timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._check_alive()
            left = deadline - time.monotonic()
            try:
                message = self._messages.get(timeout=max(0.0, min(left, _CHECK_S)))
            except queue.Empty:
                if left <= 0:
                    return None
                continue
            if isinstance(message, _Lost):
                self._raise_death()
            if isinstance(message, SampleGroup):
                self._numbers.taken.value += len(message.samples)
            return message

    def redispatch(self, position: Position) -> None:
        """Has the child sample ``position`` again, before it draws anything new."""
        self._send(Redispatch(position))

    def release(self, groups: int = 1) -> None:
        """Lets so many more groups start under this policy version.

        Only matters with ``release_by_version``: where the trainer throws a group away that the step was to be filled
        with (an oversize sample), the step would otherwise never fill. Groups that the child drops release themselves.
        """
        self._send(Release(groups))

    def evaluate(self, name: str, deadline_s: float, look: Callable[[], None] = lambda: None) -> EvalResult:
        """Samples every prompt of ``evals[name]`` ``num_generations_eval`` times and scores it; blocks until done.

        No training rollout starts meanwhile; those in flight finish. ``look`` is asked while it waits, and raises what
        shall end the wait.

        Raises:
            KeyError: no such evaluation set.
            ProducerError: not done within ``deadline_s`` seconds; and everything that ``get`` raises.
        """
        if name not in self._plan.evals:
            raise KeyError(f"no evaluation set {name!r}; there are {sorted(self._plan.evals)}")
        self._send(Evaluate(name))
        deadline = time.monotonic() + deadline_s
        while True:
            self._check_alive()
            look()
            try:
                result = self._evaluations.get(timeout=max(0.0, min(deadline - time.monotonic(), _CHECK_S)))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    size = f"{len(self._plan.evals[name])} prompts x {self._plan.settings.num_generations_eval}"
                    raise ProducerError(
                        f"the evaluation of {name!r} ({size}) took more than {deadline_s:g} s; give it more time or "
                        "a smaller set"
                    ) from None
                continue
            if result.name == name:  # a result that came after an earlier deadline is of no use to anybody
                return result

    @property
    def queue_size(self) -> int:
        """Samples on the rollout queue."""
        return self._numbers.queue_size if self._ends is not None else 0

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._process.pid if self._process is not None else None

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the child: asks, and after ``timeout`` seconds terminates, then kills. Safe to call twice.

        Returns only when no child is left, nor what it started. Cannot hang: the receiver thread keeps taking messages
        until the end.
        """
        atexit.unregister(self.stop)
        process, ends = self._process, self._ends
        if process is None or ends is None:
            return
        ends.numbers.stop.value = 1
        with contextlib.suppress(OSError), self._sending:
            if _has_room(ends.commands):
                ends.commands.send(Stop())
        process.join(0.0 if self._hung else timeout)  # it would not hear
        for end_it in (process.terminate, process.kill):
            if process.is_alive():
                end_it()
                process.join(5.0)
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # what rewards started is in the child's group
            os.killpg(process.pid, signal.SIGKILL)
        self._process = None
        with contextlib.suppress(OSError):
            ends.commands.close()

    @property
    def _numbers(self) -> Any:
        if self._ends is None:
            raise ProducerError("the rollout process was not started; call start() first")
        return self._ends.numbers

    def _send(self, command: Command) -> None:
        """Sends a command; waits while the pipe is full, until the child reads, or is dead or silent."""
        while True:
            self._check_alive()
            assert self._ends is not None
            try:
                with self._sending:
                    if _has_room(self._ends.commands):
                        return self._ends.commands.send(command)
            except OSError:
                self._raise_death()
            time.sleep(_CHECK_S)

    def _receive(self, ends: ParentEnds) -> None:
        """Takes messages off the pipe as they come, so that the child never waits for a slow trainer here."""
        while True:
            try:
                message = ends.messages.recv()
            except (EOFError, OSError):
                self._messages.put(_Lost())
                return
            if isinstance(message, EvalResult):
                self._evaluations.put(message)
            else:
                self._messages.put(message)

    def _check_alive(self) -> None:
        if self._process is None:
            raise ProducerError("the rollout process is not running: it was not started, or was stopped")
        if not self._process.is_alive() or self._failed():
            self._raise_death()
        silent = time.monotonic() - self._numbers.heartbeat.value
        if silent > self._worker_timeout:
            self._hung = True
            raise ProducerSilent(
                f"the rollout process (pid {self.pid}) has given no sign of life for {silent:.0f} s; a hook or an "
                "async reward function that blocks its event loop does that. data.worker_timeout sets the limit"
            )

    def _failed(self) -> bool:
        assert self._ends is not None
        try:
            return self._ends.failures.poll()
        except OSError:
            return True

    def _raise_death(self) -> NoReturn:
        """Raises what ended the child."""
        assert self._process is not None and self._ends is not None
        failure: Failure | None = None
        with contextlib.suppress(EOFError, OSError):
            failure = self._ends.failures.recv() if self._ends.failures.poll() else None
        self._process.join(5.0)
        if failure is None:
            raise ProducerDied(f"the rollout process {_exit_words(self._process.exitcode)} and left no traceback")
        died = ProducerDied(f"the rollout process failed:\n{failure.traceback}")
        if isinstance(failure.error, LitRLError):
            raise failure.error from died
        raise died


def _has_room(pipe: Connection) -> bool:
    """Whether a small message fits without waiting: a pipe counts as writable when 4 KiB are free."""
    return bool(select.select([], [pipe.fileno()], [], 0)[1])


def _exit_words(code: int | None) -> str:
    if code is None:
        return "closed its end of the pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by signal {-code}, {name}{hint},"


def _pickled(plan: ChildPlan) -> bytes:
    try:
        return pickle.dumps(plan)
    except (pickle.PicklingError, AttributeError, TypeError) as cause:
        remedy = f"the rollout process is another process and everything in it must be picklable: {cause}"
        raise SettingsError("data", type(plan.train).__name__, remedy) from cause


@contextlib.contextmanager
def _child_environment() -> Iterator[None]:
    """The environment that a child spawned inside inherits: one thread, no GPU, no rank."""
    before = dict(os.environ)
    doomed = [name for name in before if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES)]
    for name in doomed:
        del os.environ[name]
    os.environ.update(CHILD_ENV)
    try:
        yield
    finally:
        for name in CHILD_ENV:
            if name not in before:
                os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Lets a child spawned inside ignore Ctrl-C from its first instruction on; what is ignored stays so in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _main_module_hidden(unless: bool) -> Iterator[None]:
    """Keeps a child spawned inside from importing the main script again.

    ``spawn`` does that so that objects of the script can be unpickled, and with ``lit-rl`` as the script it would drag
    Lightning into the child. Nothing of the script is sent unless the pickled plan names ``__main__``.
    """
    main = sys.modules.get("__main__")
    if unless or main is None:
        yield
        return
    names: dict[str, Any] = main.__dict__
    hidden: dict[str, Any] = {name: names.pop(name) for name in ("__spec__", "__file__") if name in names}
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update(hidden)
