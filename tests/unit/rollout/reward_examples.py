"""Module-level rewards and loops for the tests, as a user would write them."""

import functools

from lit_rl.rollout.loop import RolloutLoop


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def correct(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


async def judged(completions, **columns):
    return [1.0 for _ in completions]


class Threshold:
    """A callable object, which pickles."""

    def __init__(self, limit):
        self.limit = limit

    def __call__(self, completions, **columns):
        return [float(len(text) > self.limit) for text in completions]


def scaled(completions, factor, **columns):
    return [factor * len(text) for text in completions]


doubled = functools.partial(scaled, factor=2.0)
anonymous = lambda completions, **columns: [0.0 for _ in completions]  # noqa: E731
not_a_function = 7


class Quiet(RolloutLoop):
    """A loop that can be imported."""
