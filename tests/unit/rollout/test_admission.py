"""When groups and rollouts may start."""

import asyncio

import pytest

from lit_rl.rollout.admission import AsyncAdmission


class Version:
    """Stands for the number that the trainer writes."""

    value = 1

    def __call__(self):
        return self.value


async def waits(work):
    """Whether ``work`` is still waiting after a moment."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.05)
    waiting = not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return waiting


def test_no_group_starts_before_the_first_weights_have_arrived():
    async def story():
        version = Version()
        version.value = 0
        admission = AsyncAdmission(4, version)
        assert await waits(admission.group_may_start())
        version.value = 1
        await asyncio.wait_for(admission.group_may_start(), 1)

    asyncio.run(story())


def test_no_more_rollouts_are_in_flight_than_the_cap():
    async def story():
        admission = AsyncAdmission(2, Version())
        await admission.start_rollout()
        await admission.start_rollout()
        assert await waits(admission.start_rollout())
        admission.finish_rollout()
        await asyncio.wait_for(admission.start_rollout(), 1)

    asyncio.run(story())


def test_nothing_starts_during_a_pause_and_what_runs_may_end():
    async def story():
        admission = AsyncAdmission(2, Version())
        await admission.start_rollout()
        admission.pause()
        assert await waits(admission.group_may_start())
        assert await waits(admission.start_rollout())
        admission.finish_rollout()
        admission.resume()
        await asyncio.wait_for(admission.group_may_start(), 1)

    asyncio.run(story())


def test_a_policy_version_releases_so_many_groups():
    async def story():
        version = Version()
        admission = AsyncAdmission(100, version, release_by_version=2)
        admission.start_group()
        admission.start_group()
        assert await waits(admission.group_may_start())
        version.value = 2
        await asyncio.wait_for(admission.group_may_start(), 1)

    asyncio.run(story())


def test_a_group_that_will_not_be_trained_makes_room_for_another():
    async def story():
        admission = AsyncAdmission(100, Version(), release_by_version=1)
        admission.start_group()
        admission.release(1, version=0)  # one of an earlier version: that step is over
        assert await waits(admission.group_may_start())
        admission.release(1, version=1)
        await asyncio.wait_for(admission.group_may_start(), 1)

    asyncio.run(story())


def test_the_cap_may_change_while_rollouts_run():
    async def story():
        admission = AsyncAdmission(1, Version())
        await admission.start_rollout()
        assert await waits(admission.start_rollout())
        admission.cap = 2
        await asyncio.wait_for(admission.start_rollout(), 1)

    asyncio.run(story())


def test_busy_seconds_add_up_over_rollouts():
    async def story():
        admission = AsyncAdmission(4, Version())
        await admission.start_rollout()
        await admission.start_rollout()
        await asyncio.sleep(0.1)
        admission.finish_rollout()
        return admission.take_busy_seconds()

    assert asyncio.run(story()) == pytest.approx(0.2, abs=0.1)
