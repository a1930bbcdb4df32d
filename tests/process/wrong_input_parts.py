"""What the table of wrong input names by import path: datasets, rewards and an engine that a run can have."""

import os

from lit_rl.errors import SettingsError
from tests.fakes.engine import TinyEngine


class Engine(TinyEngine):
    """The tiny engine as YAML can name it: a run with it comes as far as the first rewards."""

    def __init__(self) -> None:
        super().__init__()

    def start(self, needs):
        print("the engine was started", flush=True)
        return super().start(needs)


def prompts(size=6):
    return [{"prompt": f"say {letter}{letter}.", "letter": letter} for letter in "abcdefghij"[:size]]


def chats():
    return [{"prompt": [{"role": "user", "content": "say a."}], "letter": "a"}] * 4


def questions():
    return [{"question": "say a.", "letter": "a"}] * 4


def numbers():
    return [{"prompt": 5, "letter": "a"}] * 4


def reserved():
    return [{"prompt": "say a.", "completions": "b"}] * 4


def generator():
    return (row for row in prompts())


def broken_set():
    raise KeyError("my dataset is broken")


def refused_set():
    raise SettingsError("size", 0, "ask for 1 or more")


no_function = 5


def by_length(completions, **columns):
    return [float(len(text)) + 0.001 * place for place, text in enumerate(completions)]


def too_few(completions, **columns):
    return [1.0]


def words(completions, **columns):
    return ["good"] * len(completions)


def raises(completions, **columns):
    raise ValueError("my reward is broken")


def exits(completions, **columns):
    os._exit(3)


def needs_answer(completions, answer):
    return [0.0] * len(completions)
