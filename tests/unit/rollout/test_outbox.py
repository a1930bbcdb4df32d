"""The writing end of the rollout queue: whole groups, counted in samples; everything else passes at once."""

import asyncio
import multiprocessing

import numpy as np
import pytest

from lit_rl.rollout.process import PipeOutbox, Sender
from lit_rl.rollout.wires import Numbers
from lit_rl.types import DroppedGroup, DropReason, Position, RolloutReport, Sample, SampleGroup, Sequence


def group(size):
    sequence = Sequence(np.array([1, 2]), np.array([False, True]), np.zeros(2, dtype=np.float32))
    samples = [Sample(sequence, 1.0, 1.0, f"r{i}", 0, 1) for i in range(size)]
    return SampleGroup(Position(0, 0), 0, 0, 1, samples)


class Wire:
    """A queue of eight samples, with both of its ends."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.reader, writer = context.Pipe(duplex=False)
        self.sender, self.numbers = Sender(writer), Numbers.create(context)
        self.box = PipeOutbox(self.sender, self.numbers, maxsize=8)

    def take(self, samples):
        """What the trainer does."""
        self.numbers.taken.value += samples


@pytest.fixture
def wire():
    return Wire()


async def waits(box, message, moment=0.05):
    """Whether ``put`` still waits after a moment; leaves it waiting."""
    task = asyncio.ensure_future(box.put(message))
    await asyncio.sleep(moment)
    return None if task.done() else task


def test_groups_pass_while_there_is_room_for_all_of_their_samples(wire):
    async def story():
        await wire.box.put(group(4))
        await wire.box.put(group(4))
        assert wire.numbers.queue_size == 8
        waiting = await waits(wire.box, group(4))
        assert waiting is not None
        wire.take(3)
        assert await waits(wire.box, RolloutReport({})) is None
        assert not waiting.done()
        wire.take(1)
        await asyncio.wait_for(waiting, 1)

    asyncio.run(story())
    wire.sender.flush(5)
    kinds = [type(wire.reader.recv()).__name__ for _ in range(4)]
    assert kinds == ["SampleGroup", "SampleGroup", "RolloutReport", "SampleGroup"]


def test_a_group_larger_than_the_queue_passes_when_the_queue_is_empty(wire):
    async def story():
        await wire.box.put(group(1))
        waiting = await waits(wire.box, group(20))
        assert waiting is not None
        wire.take(1)
        await asyncio.wait_for(waiting, 1)
        assert wire.numbers.queue_size == 20

    asyncio.run(story())


def test_drops_and_reports_never_wait(wire):
    async def story():
        await wire.box.put(group(8))
        assert await waits(wire.box, DroppedGroup(Position(0, 1), 1, DropReason.REJECTED)) is None

    asyncio.run(story())


def test_the_time_that_a_full_queue_costs_is_counted_while_it_passes(wire):
    async def story():
        await wire.box.put(group(8))
        waiting = await waits(wire.box, group(1), moment=0.2)
        first = wire.box.take_blocked_seconds()
        wire.take(8)
        await waiting
        return first, wire.box.take_blocked_seconds()

    first, second = asyncio.run(story())
    assert first == pytest.approx(0.2, abs=0.1)
    assert second < 0.1
