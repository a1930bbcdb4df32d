"""Rewards and a loop for the tests of the rollout process, at module level as a user would have them."""

import asyncio
import os
import sys
import time

from lit_rl.rollout.loop import RolloutLoop


def by_length(completions, **columns):
    return [float(len(text)) + 0.001 * place for place, text in enumerate(completions)]


def raises(completions, **columns):
    raise ValueError("my reward is broken")


def exits(completions, **columns):
    os._exit(3)


def hangs(completions, **columns):
    time.sleep(600)


async def blocks_the_event_loop(completions, **columns):
    time.sleep(600)
    await asyncio.sleep(0)


def surroundings(completions, **columns):
    """1 for each rollout if the process looks as it should, and an error that says why if not."""
    unwanted = {"lightning", "vllm", "marker_of_the_main_script"} & set(sys.modules)
    environment = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK")}
    wanted = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RANK": None}
    if unwanted or environment != wanted:
        raise ValueError(f"modules {unwanted}, environment {environment}")
    return [1.0] * len(completions)


class Bonus(RolloutLoop):
    """Adds an option of its own to the rewards."""

    async def generate_one(self, prompt, tools, group_id=0):
        rollout = await super().generate_one(prompt, tools, group_id)
        rollout.reward = self.config.bonus
        return rollout
