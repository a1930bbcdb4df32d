"""Stop 3: the rollout loop: draws prompts, runs their rollouts, has groups scored, sends them home.

::

    _feed     admission -> draw -> filter_prompt -> a task per rollout       waits: admission, the end of the epochs
    _rollout  generate_one -> reconcile; the last of a group queues it       waits: servers, a full score queue
    _score    rewards -> compute_advantages -> samples or a drop -> outbox   waits: rewards, a full rollout queue
    _report   figures that belong to no group, every two seconds

A rollout keeps its place in flight until its group is in the score queue, so a full queue stops generation and nothing
else. To change a step, subclass ``RolloutLoop`` at module level and override its hook.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lit_rl.errors import DataError, ProducerError, ServerError
from lit_rl.maths.advantages import group_standardised
from lit_rl.metrics import Last, Mean, Stats, Sum
from lit_rl.rollout import evaluation
from lit_rl.rollout.admission import AsyncAdmission
from lit_rl.rollout.groups import FailureStreak, FinishedRollout, PendingGroup
from lit_rl.rollout.prompts import PromptSource, Rows, encode_prompt
from lit_rl.rollout.sampler import Sampler
from lit_rl.rollout.scoring import Scorer, timed_stats
from lit_rl.rollout.turns import RolloutContext, current_rollout, single_turn
from lit_rl.rollout.wires import Command, Evaluate, Redispatch, Release
from lit_rl.settings import RolloutSettings
from lit_rl.types import (
    DroppedGroup,
    DropReason,
    EvalResult,
    Prompt,
    PromptContent,
    Rollout,
    RolloutGroup,
    RolloutReport,
    SampleGroup,
    TurnRecord,
)

REPORT_S = 2.0
_SCORERS = 4
"""Groups that are scored at a time: asynchronous rewards overlap, synchronous ones take turns."""
_IDLE_S = 0.05
_CLOSE_S = 3.0
_TOLD = 5

_log = logging.getLogger("lit_rl.rollout")


class Outbox(Protocol):
    """The way home."""

    async def put(self, message: SampleGroup | DroppedGroup | RolloutReport | EvalResult) -> None:
        """Sends a message; for a ``SampleGroup``, waits while the rollout queue is full."""

    def take_blocked_seconds(self) -> float:
        """Seconds that ``put`` waited since the last call."""


@dataclass
class Parts:
    """What a loop works with; built in the rollout process."""

    sampler: Sampler
    source: PromptSource
    admission: AsyncAdmission
    scorer: Scorer
    outbox: Outbox
    version: Callable[[], int]
    eos_token_ids: frozenset[int]
    evals: Mapping[str, Rows]


class RolloutLoop:
    """Generates and scores rollouts; by default a single turn, and GRPO's advantages.

    For each prompt: ``filter_prompt``, then ``num_generations`` times ``generate_one`` (which calls
    ``generate_one_turn`` for each request), then the rewards, then ``compute_advantages``. ``setup`` and ``close`` run
    on the loop's event loop; make clients there, not in ``__init__``.

    Attributes:
        config: The settings; a subclass's own options are read as ``self.config.<name>``.
        tokenizer: The model's tokenizer.
    """

    def __init__(self, config: RolloutSettings, tokenizer: Any, parts: Parts) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._parts = parts
        self._queue: asyncio.Queue[tuple[RolloutGroup, Stats]] = asyncio.Queue(config.score_queue_maxsize)
        self._streak = FailureStreak(max(8, config.num_generations))
        self._group_ids = 0
        self._rejected: Counter[int] = Counter()
        self._blocked_s = 0.0
        self._told = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: asyncio.Future[None] | None = None
        self._evaluating = asyncio.Lock()

    # --- hooks

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether to sample a prompt; a rejected one counts as done for this epoch. Called once per dispatch.

        Args:
            row_index: The row's index in the dataset.
            row: The row.
            epoch: Passes over the dataset before this one.
        """
        return True

    async def generate_one(self, prompt: PromptContent, tools: list[Callable[..., Any]], group_id: int = 0) -> Rollout:
        """Generates one rollout; called ``num_generations`` times per prompt.

        Return every sampling request in ``Rollout.turns``: the training sequences are built from them.

        Args:
            prompt: The prompt as the dataset has it, a copy of the rollout's own.
            tools: Tools of this rollout.
            group_id: The group that the rollout belongs to.

        Raises:
            ServerError: the rollout counts as failed, and the run goes on without it; any other error ends the run.
        """
        turn = await self.generate_one_turn(self.encode(prompt))
        return single_turn(prompt, turn, self.tokenizer)

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Samples one answer with the configured sampling options.

        It may be as long as what the rollout has left of ``max_completion_length``; with nothing left it is empty and
        its finish reason ``length``.

        Args:
            prompt_ids: The whole prompt as tokens.
        """
        rollout = current_rollout.get()
        budget = self.config.max_completion_length if rollout is None else rollout.budget
        if budget <= 0:
            return TurnRecord(prompt_ids=list(prompt_ids), output_ids=[], finish_reason="length")
        turn = await self._parts.sampler.generate(prompt_ids, budget)
        if rollout is not None:
            rollout.budget -= len(turn.output_ids)
        return turn

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """[G] advantages of a group whose total rewards stand in ``group.rewards``; runs for every group.

        By default the rewards are standardised within the group. Groups with equal rewards are dropped whatever comes
        out here.
        """
        assert group.rewards is not None
        return group_standardised(group.rewards)

    async def setup(self) -> None:
        """Makes what other hooks need; before the first prompt."""

    async def close(self) -> None:
        """Releases what ``setup`` made; also after a failure."""

    # --- for hooks

    def encode(self, prompt: PromptContent) -> list[int]:
        """A prompt's tokens: text as it stands, messages through the chat template with a generation prompt."""
        rollout = current_rollout.get()
        if rollout is not None and prompt == rollout.prompt.content:
            return list(rollout.prompt.prompt_ids)
        return encode_prompt(self.tokenizer, prompt, self.config.chat_template_kwargs)

    # --- the drive

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set; raises what the first failing task raised."""
        self._crash = asyncio.get_running_loop().create_future()
        await self._parts.sampler.open()
        try:
            await self.setup()
            for work in (self._feed(), self._report(), *(self._score() for _ in range(_SCORERS))):
                self.spawn(work)
            stopping = asyncio.ensure_future(stop.wait())
            ends: set[asyncio.Future[Any]] = {stopping, self._crash}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if self._crash.done():
                self._crash.result()
        finally:
            await self._wind_up()

    async def _wind_up(self) -> None:
        """Ends all tasks and closes; whatever does not end within ``_CLOSE_S`` seconds is left behind."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        await self._parts.sampler.close()
        async with asyncio.timeout(_CLOSE_S):
            await self.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` beside the rest; if it fails, the whole loop fails with its error."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def obey(self, command: Command) -> None:
        """Does what the trainer asks."""
        match command:
            case Redispatch(position):
                self._parts.source.redispatch(position)
            case Release(groups):
                self._parts.admission.release(groups)
            case Evaluate(name):
                self.spawn(self._evaluate(name))
            case _:
                raise ProducerError(f"unknown command {command!r}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and self._crash is not None and not self._crash.done():
            self._crash.set_exception(error)

    async def _feed(self) -> None:
        source, admission = self._parts.source, self._parts.admission
        while True:
            await admission.group_may_start()  # before the draw, so that filter_prompt knows the newest
            prompt = source.draw()
            if prompt is None:  # all epochs are drawn; a redispatch may still come
                await asyncio.sleep(_IDLE_S)
            elif self.filter_prompt(prompt.row_index, _row(prompt), prompt.position.epoch):
                admission.start_group()
                await self._start_group(prompt)
            else:
                await self._reject(prompt)

    async def _start_group(self, prompt: Prompt) -> None:
        group = PendingGroup(prompt, self._group_ids, self.config.num_generations)
        self._group_ids += 1
        for number in range(group.wanted):
            await self._parts.admission.start_rollout()
            if number == 0:
                group.version = self._parts.version()
            self._streak.started(group.group_id, number)
            self.spawn(self._rollout(group, number))

    async def _reject(self, prompt: Prompt) -> None:
        epoch = prompt.position.epoch
        self._rejected[epoch] += 1
        if self._rejected[epoch] == len(self._parts.source):
            raise DataError(
                f"filter_prompt rejected all {len(self._parts.source)} prompts of epoch {epoch}; nothing would ever be "
                "trained. Loosen it"
            )
        await self._parts.outbox.put(DroppedGroup(prompt.position, prompt.row_index, DropReason.REJECTED))
        await asyncio.sleep(0)  # a long run of rejections must not hold up heartbeat and rollouts

    async def _rollout(self, group: PendingGroup, number: int) -> None:
        try:
            finished = await self.one_rollout(group.prompt, number, group.group_id, "train")
            if isinstance(finished, ServerError):
                self._tell(group, number, finished)
                group.failures[number] = finished
                self._streak.failed(group.group_id, number, finished)
            else:
                group.finished[number] = finished
                self._streak.succeeded(group.group_id, number)
            if group.complete:
                await self._hand_over(group)
        finally:
            self._parts.admission.finish_rollout()

    def _tell(self, group: PendingGroup, number: int, error: ServerError) -> None:
        """Logs the first few failures; all are counted in ``rollout/failed_total``."""
        self._told += 1
        if self._told <= _TOLD:
            _log.warning("rollout %d of row %d failed: %.300s", number, group.prompt.row_index, error)

    async def one_rollout(
        self, prompt: Prompt, number: int, group_id: int, stream: str
    ) -> FinishedRollout | ServerError:
        """Runs ``generate_one`` in a context of its own; a server that failed for good is a result, not an error."""
        current_rollout.set(RolloutContext(prompt, number, stream, self.config.max_completion_length))
        started = time.monotonic()
        try:
            rollout = await self.generate_one(copy.deepcopy(prompt.content), [], group_id)
        except ServerError as error:
            return error
        if not isinstance(rollout, Rollout):
            raise ProducerError(f"generate_one returned a {type(rollout).__name__}; return a lit_rl.Rollout")
        return FinishedRollout.of(rollout, self._parts.eos_token_ids, time.monotonic() - started)

    async def _hand_over(self, group: PendingGroup) -> None:
        if not group.finished:
            self._parts.admission.release(1, group.version)
            await self._parts.outbox.put(group.as_failed())
            return
        before = time.monotonic()
        await self._queue.put((group.assemble(), group.stats()))
        self._blocked_s += time.monotonic() - before

    async def _score(self) -> None:
        parts = self._parts
        while True:
            group, stats = await self._queue.get()
            started = time.monotonic()
            await parts.scorer.score(group)
            outcome = parts.scorer.judge(group, self.compute_advantages, stats | timed_stats(group, started))
            if isinstance(outcome, DroppedGroup):
                parts.admission.release(1, group.model_version)
            await parts.outbox.put(outcome)

    async def _evaluate(self, name: str) -> None:
        async with self._evaluating:
            self._parts.admission.pause()
            try:
                result = await evaluation.evaluate(self, name, self._parts)
            finally:
                self._parts.admission.resume()
        await self._parts.outbox.put(result)

    async def _report(self) -> None:
        sampler, admission, outbox = self._parts.sampler, self._parts.admission, self._parts.outbox
        since, tokens, retries = time.monotonic(), 0, 0
        while True:
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            stats: Stats = {
                "rollout/generated_tok_s": Mean(sampler.generated_tokens - tokens, now - since),
                "rollout/concurrency": Mean(admission.take_busy_seconds(), now - since),
                "rollout/concurrency_cap": Last(admission.cap),
                "rollout/score_queue_size": Last(self._queue.qsize()),
                "rollout/score_block_s": Sum(self._blocked_s),
                "rollout/backpressure_s": Sum(outbox.take_blocked_seconds()),
                "rollout/vllm_retry_total": Sum(sampler.retries - retries),
            }
            since, tokens, retries, self._blocked_s = now, sampler.generated_tokens, sampler.retries, 0.0
            await outbox.put(RolloutReport(dict(stats)))


def _row(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt.content, **prompt.columns}
