"""Reward functions of the tests, in a module of their own: the rollout process imports it, and must stay light."""


def share_of_letter(prompts, completions, letter, **columns):
    """How much of the completion is the wanted letter; length breaks ties, so that no group is equal throughout."""
    return [c.count(wanted) / max(len(c), 1) + 0.01 * len(c) for c, wanted in zip(completions, letter, strict=True)]


def always_half(completions, **columns):
    return [0.5] * len(completions)
