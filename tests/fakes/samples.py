"""Samples written by hand, and random ones for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from hypothesis import strategies as st

from lit_rl.types import Sample, Sequence


def sample(tokens: Many[int], trained: Many[int] | None = None, *, name: str = "r", group: int = 0) -> Sample:
    """A sample of these tokens, all of them trained unless told otherwise; token t's sampler log-prob is -t / 8."""
    mask = np.ones(len(tokens), bool) if trained is None else np.array(trained, bool)
    logprobs = np.where(mask, -np.arange(len(tokens)) / 8, 0.0).astype(np.float32)
    sequence = Sequence(np.array(tokens, np.int64), mask, logprobs)
    return Sample(sequence, advantage=1.0, reward=0.0, rollout_id=name, group_id=group, version_first=1)


def group_of(count: int, prompt: int, completion: int, *, group: int = 0) -> list[Sample]:
    """Rollouts of one prompt that part at their first generated token; only generated tokens are trained."""
    shared = [1000 * group + place for place in range(prompt)]
    mask = [0] * prompt + [1] * completion
    return [
        sample(
            [*shared, *range(500_000 + 1000 * i, 500_000 + 1000 * i + completion)],
            mask,
            name=f"{group}.{i}",
            group=group,
        )
        for i in range(count)
    ]


@st.composite
def forests(draw: st.DrawFn, *, vocabulary: int = 3, longest: int = 12, most: int = 7) -> list[Sample]:
    """Samples over few tokens, so that they share prefixes, repeat, end inside each other, and start differently.

    Half of them grow out of a prefix of an earlier one: free drawing alone seldom makes deep trees.
    """
    samples: list[Sample] = []
    for number in range(draw(st.integers(1, most))):
        start: list[int] = []
        if len(samples) > 0 and draw(st.booleans()):
            parent = draw(st.sampled_from(samples)).sequence.token_ids.tolist()
            start = parent[: draw(st.integers(0, len(parent)))]
        room = max(longest - len(start), 0)
        more = draw(st.lists(st.integers(0, vocabulary - 1), min_size=0 if start else 1, max_size=max(room, 1)))
        tokens = start + more
        trained = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        samples.append(sample(tokens, trained, name=f"r{number}", group=number % 3))
    return samples
