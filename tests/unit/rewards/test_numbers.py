"""Rewards for answers that are numbers."""

import pytest

from lit_rl.rewards.numbers import completion_text, exact_number, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4.0),
        ("2 + 2 is 4.", 4.0),
        ("It costs 1,204 coins", 1204.0),
        ("-3.5", -3.5),
        ("The answer is 12.\n", 12.0),
        ("no idea", None),
    ],
)
def test_the_last_number_of_a_text_counts(text, number):
    assert last_number(text) == number


def test_answers_are_right_or_wrong_as_text_and_as_messages():
    chat = [{"role": "assistant", "content": "so 7"}]
    assert exact_number(["it is 7", "8", "none", chat], [7, "7", 7, 7]) == [1.0, 0.0, 0.0, 1.0]


def test_only_what_the_model_wrote_is_read():
    turns: list[dict] = [
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": None},
    ]
    assert completion_text(turns) == "1\n"
