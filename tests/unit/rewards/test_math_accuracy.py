"""Mathematics judged by math-verify, from a thread as the rollout process does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lit_rl.errors import RewardError
from lit_rl.rewards import math_accuracy as module
from lit_rl.rewards.math_accuracy import math_accuracy


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    module._WORKERS.end()


CASES = [
    (r"\frac{1}{2}", r"So the answer is \boxed{0.5}.", 1.0),
    (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}, or perhaps \boxed{1}", 0.0),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
    ("7", "Adding them gives 7.", 1.0),
    ("7", "I do not know.", 0.0),
    (r"\{1, 2\}", r"The set is \boxed{\{2, 1\}}", 1.0),
    (r"$x^2 + 2x + 1$", r"\boxed{(x+1)^2}", 1.0),
    (r"\boxed{12}", "$12$", 1.0),
    ("", r"\boxed{1}", None),
]


def test_answers_are_compared_by_what_they_mean_also_in_a_thread() -> None:
    answers: list[list[float | None]] = []
    columns = {"solution": [gold for gold, _, _ in CASES], "difficulty": [1] * len(CASES)}
    thread = threading.Thread(target=lambda: answers.append(math_accuracy([text for _, text, _ in CASES], **columns)))
    thread.start()
    thread.join(120)
    assert answers == [[wanted for _, _, wanted in CASES]]


def test_messages_and_the_column_of_other_datasets() -> None:
    wrote = [{"role": "assistant", "content": r"\boxed{3}"}]
    assert math_accuracy([wrote, wrote], answer=["3", "4"]) == [1.0, 0.0]
    assert math_accuracy([wrote], final_answer=["3"]) == [1.0]


def test_without_a_column_the_error_names_what_there_is() -> None:
    with pytest.raises(RewardError, match=r"solution, answer, final_answer; the dataset has \['gold'\]"):
        math_accuracy([r"\boxed{1}"], gold=["1"])


def test_an_answer_that_computes_for_ever_is_wrong_and_the_next_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 10.0)
    started = time.monotonic()
    for_ever = r"\boxed{9^{9^{9^{9}}}}"
    assert math_accuracy([for_ever, r"\boxed{2}"], solution=["2", "2"]) == [0.0, 1.0]
    assert time.monotonic() - started < 60
    assert math_accuracy([r"\boxed{2}"], solution=["2"]) == [1.0]
