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


@pytest.fixture
def outbox():
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    sender = Sender(writer)
    box = PipeOutbox(sender, Numbers.create(context), maxsize=8)
    box.reader, box.sender = reader, sender
    yield box
    writer.close()


async def waits(box, message, moment=0.05):
    """Whether ``put`` still waits after a moment; leaves it waiting."""
    task = asyncio.ensure_future(box.put(message))
    await asyncio.sleep(moment)
    return None if task.done() else task


def test_groups_pass_while_there_is_room_for_all_of_their_samples(outbox):
    async def story():
        await outbox.put(group(4))
        await outbox.put(group(4))
        assert outbox._numbers.queue_size == 8
        waiting = await waits(outbox, group(4))
        assert waiting is not None
        outbox._numbers.taken.value += 3
        assert await waits(outbox, RolloutReport({})) is None
        assert not waiting.done()
        outbox._numbers.taken.value += 1
        await asyncio.wait_for(waiting, 1)

    asyncio.run(story())
    outbox.sender.flush(5)
    kinds = [type(outbox.reader.recv()).__name__ for _ in range(4)]
    assert kinds == ["SampleGroup", "SampleGroup", "RolloutReport", "SampleGroup"]


def test_a_group_larger_than_the_queue_passes_when_the_queue_is_empty(outbox):
    async def story():
        await outbox.put(group(1))
        waiting = await waits(outbox, group(20))
        assert waiting is not None
        outbox._numbers.taken.value += 1
        await asyncio.wait_for(waiting, 1)
        assert outbox._numbers.queue_size == 20

    asyncio.run(story())


def test_drops_and_reports_never_wait(outbox):
    async def story():
        await outbox.put(group(8))
        assert await waits(outbox, DroppedGroup(Position(0, 1), 1, DropReason.REJECTED)) is None

    asyncio.run(story())


def test_the_time_that_a_full_queue_costs_is_counted_while_it_passes(outbox):
    async def story():
        await outbox.put(group(8))
        waiting = await waits(outbox, group(1), moment=0.2)
        first = outbox.take_blocked_seconds()
        outbox._numbers.taken.value += 8
        await waiting
        return first, outbox.take_blocked_seconds()

    first, second = asyncio.run(story())
    assert first == pytest.approx(0.2, abs=0.1)
    assert second < 0.1
