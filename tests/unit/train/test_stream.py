"""The stream: groups in, steps out; every prompt has exactly one outcome."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.metrics import Mean, values
from lit_rl.packing.planner import FixedCountPlanner, TokenBudgetPlanner
from lit_rl.rollout.ledger import Ledger
from lit_rl.train.callbacks.staleness import Staleness
from lit_rl.train.stream import RolloutStream, bounded_length
from lit_rl.types import DroppedGroup, DropReason, Position, Sample, SampleGroup, Sequence


def sample_group(index: int, *, size: int = 2, tokens: int = 4, version: int = 1, epoch: int = 0) -> SampleGroup:
    """A group of ``size`` samples [index, index + 1, ...] whose last two tokens are trained."""
    ids = np.arange(index, index + tokens, dtype=np.int64)
    mask = np.zeros(tokens, dtype=bool)
    mask[-2:] = True
    sequence = Sequence(ids, mask, np.full(tokens, -1.0, dtype=np.float32))
    samples = [Sample(sequence, 1.0, 1.0, f"g{index}r{i}", index, version) for i in range(size)]
    stats = {"reward": Mean(float(size), size)}
    return SampleGroup(Position(epoch, index), index, index, version, samples, stats=stats)


class Tape:
    """A producer that plays messages; a redispatched prompt comes again at the end, under the newest version."""

    def __init__(self, messages):
        self.messages = deque(messages)
        self.version = 1
        self.redispatched: list[Position] = []

    def get(self, timeout):
        return self.messages.popleft() if self.messages else None

    def redispatch(self, position):
        self.redispatched.append(position)
        self.messages.append(sample_group(position.index, version=self.version, epoch=position.epoch))

    def release(self, groups=1):
        pass

    @property
    def queue_size(self):
        return len(self.messages)


def stream_of(messages, prompts, *, planner=None, staleness=None, epochs=1, tape=None):
    tape = tape or Tape(messages)
    ledger = Ledger(prompts)
    stream = RolloutStream(
        producer=tape,
        planner=planner or FixedCountPlanner(2, ranks=1, micro_batches=1),
        ledger=ledger,
        max_epochs=epochs,
        length=100,
        policy_version=lambda: tape.version,
        staleness=staleness,
    )
    return stream, ledger, tape


def test_one_pass_over_the_stream_is_one_pass_over_the_prompts():
    stream, ledger, _ = stream_of([sample_group(i) for i in range(3)], prompts=3)
    steps = []
    for batch in stream:
        steps.append(batch.rows[0].sample_ids)
        stream.step_done()
    assert steps == [("g0r0", "g0r1"), ("g1r0", "g1r1"), ("g2r0", "g2r1")]
    assert ledger.epoch_done(0) and stream.finished


def test_a_group_counts_only_when_its_last_sample_was_trained():
    """Three samples a step, two a group: the first step trains one and a half groups."""
    stream, ledger, _ = stream_of(
        [sample_group(i) for i in range(3)], prompts=3, planner=FixedCountPlanner(3, ranks=1, micro_batches=1)
    )
    steps = iter(stream)
    next(steps)
    assert ledger.counted(0) == 0  # forwarded, not yet trained
    stream.step_done()
    assert ledger.counted(0) == 1
    next(steps)
    stream.step_done()
    assert ledger.counted(0) == 3


def test_the_last_step_is_short_and_trained():
    stream, ledger, _ = stream_of([sample_group(0)], prompts=1, planner=FixedCountPlanner(8, ranks=1, micro_batches=1))
    batches = []
    for batch in stream:
        batches.append(batch.totals.samples)
        stream.step_done()
    assert batches == [2] and ledger.epoch_done(0)


def test_dropped_groups_end_an_epoch_that_trains_nothing():
    messages = [DroppedGroup(Position(0, i), i, DropReason.EQUAL_REWARDS) for i in range(3)]
    stream, ledger, _ = stream_of(messages, prompts=3)
    assert list(stream) == []
    assert ledger.epoch_done(0)


def test_a_run_that_only_drops_says_so(caplog):
    messages = [DroppedGroup(Position(0, i), i, DropReason.EQUAL_REWARDS) for i in range(50)]
    stream, _, _ = stream_of(messages, prompts=50)
    list(stream)
    assert "50 groups in a row were dropped and none was trained (equal_rewards 50)" in caplog.text


def test_the_reward_of_dropped_groups_is_in_the_steps_figures():
    dropped = DroppedGroup(Position(0, 0), 0, DropReason.EQUAL_REWARDS, stats={"reward": Mean(0.0, 2)})
    stream, _, _ = stream_of([dropped, sample_group(1)], prompts=2)
    figures = values(next(iter(stream)).stats)
    assert figures["reward"] == 0.5
    assert figures["rollout/dropped_total/equal_rewards"] == 1


def test_a_stale_group_is_sampled_again_and_trained_once():
    stale = [sample_group(0, version=1), sample_group(1, version=3)]
    tape = Tape(stale)
    tape.version = 3
    stream, ledger, _ = stream_of(None, prompts=2, staleness=Staleness(max=1), tape=tape)
    trained = []
    for batch in stream:
        trained.append(batch.rows[0].group_ids[0])
        assert all(3 - v <= 1 for v in batch.sample_versions)
        stream.step_done()
    assert trained == [1, 0]
    assert tape.redispatched == [Position(0, 0)]
    assert ledger.epoch_done(0)


def test_without_the_staleness_callback_nothing_is_dropped():
    tape = Tape([sample_group(0, version=1)])
    tape.version = 99
    stream, _, _ = stream_of(None, prompts=1, staleness=None, tape=tape)
    assert next(iter(stream)).sample_versions == (1, 1)
    assert tape.redispatched == []


def test_samples_left_over_from_a_step_are_checked_again_at_the_next_one():
    """Step 1 takes three of four samples at version 1; the fourth is too old when step 2 runs at version 3.

    Its group was trained in part, so its prompt is not sampled again.
    """
    tape = Tape([sample_group(0, version=1), sample_group(1, version=1), sample_group(2, version=3)])
    rule = Staleness(max=1)
    planner = FixedCountPlanner(3, ranks=1, micro_batches=1)
    stream, ledger, _ = stream_of(None, prompts=3, planner=planner, staleness=rule, tape=tape)
    steps = iter(stream)
    assert next(steps).totals.samples == 3
    stream.step_done()
    tape.version = 3
    assert next(steps).sample_versions == (3, 3)
    stream.step_done()
    assert tape.redispatched == [] and ledger.epoch_done(0)
    assert rule._dropped == 1


def test_an_oversize_group_counts_for_the_epoch_and_is_not_sampled_again():
    messages = [sample_group(0, tokens=50), sample_group(1)]
    planner = TokenBudgetPlanner(20, ranks=1, micro_batches=1)
    stream, ledger, tape = stream_of(messages, prompts=2, planner=planner)
    figures = []
    for batch in stream:
        figures.append(values(batch.stats))
        stream.step_done()
    assert ledger.epoch_done(0) and tape.redispatched == []
    assert figures[0]["batch/dropped_oversize_total"] == 2
    assert figures[0]["rollout/dropped_total/oversize"] == 1


def test_groups_of_the_next_epoch_wait_for_the_next_pass():
    messages = [sample_group(0), sample_group(0, epoch=1), sample_group(1), sample_group(1, epoch=1)]
    stream, ledger, _ = stream_of(messages, prompts=2, epochs=2)
    passes = []
    for _ in range(2):
        passes.append(0)
        for _batch in stream:
            passes[-1] += 1
            stream.step_done()
    assert sum(passes) == 4 and passes[0] == 3  # the early group of the second epoch was next in line
    assert ledger.epoch_done(1) and stream.finished


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_prompt_has_exactly_one_outcome_whatever_the_order(data):
    """Random sizes, drops, versions and sync times: the epoch ends, and no group is trained twice."""
    prompts = data.draw(st.integers(1, 8))
    messages: list[SampleGroup | DroppedGroup] = []
    for i in data.draw(st.permutations(range(prompts))):
        if data.draw(st.booleans()):
            messages.append(sample_group(i, size=data.draw(st.integers(1, 4)), version=data.draw(st.integers(0, 2))))
        else:
            messages.append(DroppedGroup(Position(0, i), i, DropReason.UNSCORABLE))
    tape = Tape(messages)
    planner = FixedCountPlanner(data.draw(st.integers(1, 5)), ranks=1, micro_batches=data.draw(st.integers(1, 2)))
    stream, ledger, _ = stream_of(None, prompts, planner=planner, staleness=Staleness(max=1), tape=tape)
    seen: list[str] = []
    for batch in stream:
        seen += [name for row in batch.rows for name in row.sample_ids]
        assert all(tape.version - v <= 1 for v in batch.sample_versions)
        stream.step_done()
        tape.version += data.draw(st.integers(0, 1))
    assert ledger.epoch_done(0) and stream.finished
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("prompts", "max_steps", "done", "expected"), [(10, -1, 0, 80), (10, 5, 0, 5), (10, 5, 4, 1), (None, 7, 0, 7)]
)
def test_the_length_is_the_tighter_bound(prompts, max_steps, done, expected):
    assert bounded_length(prompts, 8, max_steps, done) == expected
