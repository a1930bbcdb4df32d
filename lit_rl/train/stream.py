"""Stop 10: the iterable that Lightning trains on: rollout groups in, one ``StepBatch`` per optimizer step out."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lit_rl.errors import SettingsError
from lit_rl.metrics import Last, Max, Mean, Stats, Sum, merge_into
from lit_rl.packing.deliver import deliver
from lit_rl.packing.planner import Planner, Verdict
from lit_rl.rollout.ledger import Ledger
from lit_rl.tensors import StepBatch
from lit_rl.types import DroppedGroup, DropReason, EvalResult, Position, RolloutReport, Sample, SampleGroup

if TYPE_CHECKING:
    from lit_rl.train.callbacks.staleness import Staleness


@dataclass(slots=True)
class _OpenGroup:
    """A group in the trainer whose samples do not all have their outcome."""

    remaining: int
    trained: bool = False
    reason: DropReason | None = None


logger = logging.getLogger(__name__)

DROPS_TOLD = (50, 500, 5_000, 50_000)

POLL_S = 0.2
"""How long one look into the queue lasts; between two looks the child's health is seen."""


class Producer(Protocol):
    """What the stream needs of the rollout process; ``RolloutHandle`` is the real one."""

    def get(self, timeout: float) -> SampleGroup | DroppedGroup | RolloutReport | None: ...
    def redispatch(self, position: Position) -> None: ...
    def release(self, groups: int = 1) -> None: ...
    @property
    def queue_size(self) -> int: ...


class RolloutStream:
    """One item is one optimizer step; one pass over the iterable is one pass over the prompts.

    Lightning looks one batch ahead of an iterable without a length, which deadlocks strict on-policy training and loses
    a batch at each checkpoint; so the stream has a length, an upper bound, and ends by StopIteration where the ledger
    says that every prompt of the epoch has its outcome.

    Args:
        producer: Where groups come from.
        planner: Packs samples into the rows of a step.
        ledger: Every prompt's outcome.
        max_epochs: Passes over the prompts; None where ``max_steps`` ends training.
        length: Upper bound of steps in one pass.
        policy_version: Reads the current version.
        staleness: The rule; None keeps everything.
        look: Asked while the stream waits; raises what shall end the wait.
    """

    def __init__(
        self,
        *,
        producer: Producer,
        planner: Planner,
        ledger: Ledger,
        max_epochs: int | None,
        length: int,
        policy_version: Callable[[], int],
        staleness: Staleness | None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._producer, self._planner, self._ledger = producer, planner, ledger
        self._max_epochs, self._length = max_epochs, length
        self._policy_version, self._staleness, self._look = policy_version, staleness, look
        self._epoch = 0
        self._waiting: deque[tuple[Sample, Position]] = deque()
        self._open: dict[Position, _OpenGroup] = {}
        self._in_step: list[tuple[Sample, Position]] = []
        self._stats: Stats = {}
        self._wait_s = 0.0
        self._dropped_in_a_row: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[StepBatch]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        while not self._ledger.epoch_done(epoch):
            batch = self._next_step()
            if batch is None:
                return
            yield batch

    @property
    def finished(self) -> bool:
        """Whether every prompt of every epoch has its outcome."""
        return self._max_epochs is not None and self._ledger.epoch_done(self._max_epochs - 1) and not self._open

    def step_done(self) -> None:
        """The optimizer has moved: the samples of the step are trained, and a group with its last sample is too."""
        self._dropped_in_a_row.clear()
        for _, position in self._in_step:
            self._settle(position, None)
        self._in_step = []

    # ---- one step -----------------------------------------------------------------------------------------------

    def _next_step(self) -> StepBatch | None:
        """Fills the row slots of one step; None when nothing is left to train."""
        version = self._policy_version()
        self._drop_stale(version)
        while not self._planner.full:
            if not self._waiting and not self._fetch(version):
                break
            self._place_waiting()
        if self._planner.empty:
            return None
        plan = self._planner.close(version)
        stats, self._stats = self._stats, {}
        wait_s, self._wait_s = self._wait_s, 0.0
        merge_into(stats, plan.stats)
        merge_into(
            stats,
            {
                "perf/rollout_wait_s": Mean(wait_s),
                "sample/rollout_queue_size": Last(float(self._producer.queue_size)),
            },
        )
        return replace(deliver(plan, rank=0, world_size=1), stats=stats)

    def _place_waiting(self) -> None:
        """Offers waiting samples to the rows of the step until it is full."""
        while self._waiting:
            sample, position = self._waiting[0]
            verdict = self._planner.offer(sample)
            if verdict is Verdict.FULL:
                return
            self._waiting.popleft()
            if verdict is Verdict.PLACED:
                self._in_step.append((sample, position))
            else:
                self._settle(position, DropReason.OVERSIZE)

    def _fetch(self, version: int) -> bool:
        """Waits for one group that may be trained; False when no more will come.

        Woken by the rollout process. Raises ProducerDied or ProducerSilent through ``get``, and what ``look`` raises.
        """
        started = time.perf_counter()
        try:
            while self._ledger.outstanding(self._max_epochs, buffered=len(self._open)) > 0:
                self._look()
                message = self._producer.get(timeout=POLL_S)
                if message is None:
                    continue
                merge_into(self._stats, message.stats)
                if isinstance(message, DroppedGroup):
                    self._drop(message.position, message.reason)
                elif isinstance(message, SampleGroup):
                    self._open[message.position] = _OpenGroup(len(message.samples))
                    self._waiting.extend((sample, message.position) for sample in message.samples)
                    self._count_arrival(message)
                    if self._drop_stale(version):
                        continue
                    return True
            return False
        finally:
            self._wait_s += time.perf_counter() - started

    def _drop_stale(self, version: int) -> bool:
        """Drops waiting samples that are too stale for a step under ``version``; True when none is left waiting."""
        if self._staleness is not None:
            keep = self._staleness.keep
            stale = [position for sample, position in self._waiting if not keep(sample.version_first, version)]
            self._waiting = deque(item for item in self._waiting if keep(item[0].version_first, version))
            self._staleness.count_dropped(len(stale))
            for position in stale:
                self._settle(position, DropReason.STALE)
        return not self._waiting

    # ---- outcomes -----------------------------------------------------------------------------------------------

    def _settle(self, position: Position, dropped: DropReason | None) -> None:
        """One sample has its outcome: trained (None) or dropped. With its last sample the group has one too.

        A group of which any sample was trained counts as trained, so that its prompt is not sampled again.
        """
        group = self._open[position]
        group.remaining -= 1
        if dropped is None:
            group.trained = True
        elif group.reason is not DropReason.STALE:  # a stale prompt is sampled again, whatever else befell the group
            group.reason = dropped
        if group.remaining:
            return
        del self._open[position]
        if group.trained:
            self._ledger.trained(position)
        else:
            assert group.reason is not None
            self._drop(position, group.reason)

    def _drop(self, position: Position, reason: DropReason) -> None:
        self._ledger.dropped(position, reason)
        self._tell_of_drops(reason)
        merge_into(self._stats, {f"rollout/dropped_total/{reason.value}": Sum(1)})
        if not reason.counts_for_epoch:
            self._producer.redispatch(position)
        elif reason is DropReason.OVERSIZE:  # the child does not know that this group filled no step
            self._producer.release()

    def _tell_of_drops(self, reason: DropReason) -> None:
        """A run that drops every group waits for ever without an error: say so, at 50, 500, ... drops in a row."""
        self._dropped_in_a_row[reason.value] += 1
        dropped = self._dropped_in_a_row.total()
        if dropped in DROPS_TOLD:
            logger.warning(
                "%d groups in a row were dropped and none was trained (%s). equal_rewards: the reward tells no "
                "rollouts of a prompt apart; unscorable: it gave None; stale: raise staleness.max or sync less often.",
                dropped,
                ", ".join(f"{name} {count}" for name, count in self._dropped_in_a_row.items()),
            )

    # ---- figures ------------------------------------------------------------------------------------------------

    def _count_arrival(self, group: SampleGroup) -> None:
        lengths = [len(sample.sequence.token_ids) for sample in group.samples]
        merge_into(
            self._stats,
            {
                "sample/forwarded_tokens_mean": Mean.of(lengths),
                "sample/forwarded_tokens_max": Max(float(max(lengths))),
                "sample/trained_tokens_mean": Mean.of(int(s.sequence.completion_mask.sum()) for s in group.samples),
                "sample/time_in_queue_s": Mean(max(time.time() - group.queued_at, 0.0) * len(lengths), len(lengths)),
                "reward_group_std": Mean(group.reward_group_std * len(lengths), len(lengths)),
            },
        )
        for func, (_, std) in group.func_group_stats.items():
            merge_into(self._stats, {f"rewards/{func}/group_std": Mean(std * len(lengths), len(lengths))})


class EvalStream:
    """One item: the evaluation of one held-out set by the rollout process, at the server's current policy.

    Args:
        evaluate: Samples and scores the set; blocks, with a deadline of its own.
    """

    def __init__(self, evaluate: Callable[[], EvalResult]) -> None:
        self._evaluate = evaluate

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvalResult]:
        yield self._evaluate()


def bounded_length(prompts: int | None, num_generations: int, max_steps: int, steps_done: int) -> int:
    """Upper bound of the steps of one pass: each trains at least one sample, and ``max_steps`` ends it.

    Raises:
        SettingsError: neither bound is known.
    """
    bounds = [prompts * num_generations] if prompts is not None else []
    if max_steps != -1:
        bounds.append(max(max_steps - steps_done, 0))
    if not bounds:
        raise SettingsError("trainer.max_steps", max_steps, "give a number of steps: the dataset has no known length")
    return min(bounds)
