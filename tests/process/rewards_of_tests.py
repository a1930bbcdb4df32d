"""Reward functions of the tests, in a module of their own: the rollout process imports it, and must stay light."""

import asyncio
import os
import subprocess
import sys
import time


def share_of_letter(prompts, completions, letter, **columns):
    """How much of the completion is the wanted letter; length breaks ties, so that few groups are equal throughout."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [
        text.count(wanted) / max(len(text), 1) + 0.01 * len(text) for text, wanted in zip(texts, letter, strict=True)
    ]


def always_half(completions, **columns):
    return [0.5] * len(completions)


def length_of_answer(completions, **columns):
    """Tells almost any two completions apart, whatever the model can."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [len(text) + text.count("e") / 10 for text in texts]


def leaves_a_process(prompts, completions, letter, **columns):
    """As a sandbox would that runs answers, and that nobody ends."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return share_of_letter(prompts, completions, letter)


def takes_half_a_second(prompts, completions, letter, **columns):
    time.sleep(0.5)
    return share_of_letter(prompts, completions, letter)


def exits(completions, **columns):
    print("now", file=sys.stderr, flush=True)
    os._exit(3)


async def blocks_the_event_loop(completions, **columns):
    time.sleep(600)
    await asyncio.sleep(0)
