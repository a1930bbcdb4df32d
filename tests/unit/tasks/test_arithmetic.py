"""The quickstart's task: its prompts, its two splits, and what counts as a right answer."""

import re

import pytest

from lit_rl.errors import SettingsError
from lit_rl.tasks.arithmetic import answers_with, arithmetic, operands, right_answer

QUESTION = [{"role": "user", "content": "What is 3 + 9? Reply with just the number."}]


def says(content):
    return [{"role": "assistant", "content": content}]


def sums(dataset):
    """The unordered operands that a dataset asks for."""
    return {tuple(sorted(map(int, re.findall(r"\d+", row["prompt"][0]["content"])))) for row in dataset}


def test_a_row_is_a_user_message_and_the_sum_as_text():
    row = arithmetic("train", 1)[0]
    (message,) = row["prompt"]
    a, b = map(int, re.findall(r"\d+", message["content"]))
    assert message["role"] == "user" and message["content"].endswith("? Reply with just the number.")
    assert row["answer"] == str(a + b)


def test_no_held_out_sum_is_asked_in_training_whatever_the_wording_order_seed_or_range():
    assert not sums(arithmetic("train", 500, seed=1)) & sums(arithmetic("heldout", 64))
    assert not sums(arithmetic("train", 1000, largest=20)) & sums(arithmetic("heldout", 64, seed=5))


def test_the_two_splits_together_are_all_pairs():
    assert sorted(operands("train", 3) + operands("heldout", 3)) == [(a, b) for a in range(4) for b in range(4)]


def test_every_prompt_is_asked_once():
    prompts = [row["prompt"][0]["content"] for row in arithmetic("train", 512)]
    assert len(set(prompts)) == 512


def test_the_seed_orders_the_rows_and_the_same_seed_orders_them_alike():
    first, again, other = arithmetic("train", 50), arithmetic("train", 50), arithmetic("train", 50, seed=1)
    assert list(first["prompt"]) == list(again["prompt"]) != list(other["prompt"])


def test_more_rows_than_there_are_is_refused_by_number_with_the_remedy():
    with pytest.raises(SettingsError, match=r"size = 5000: heldout has 140 distinct prompts .* raise largest"):
        arithmetic("heldout", 5000)


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(SettingsError, match="split = 'test': give one of train, heldout"):
        arithmetic("test", 4)


@pytest.mark.parametrize(
    "text", ["12", " 12\n", "12.", "12 apples", "3 + 9 = 12", "9+3=12.", "The answer is 12.", "12.0", "012", "12\n12"]
)
def test_right(text):
    assert answers_with(text, "12", asked=QUESTION[0]["content"])


@pytest.mark.parametrize("text", ["", "twelve", "112", "120", "-12", "1.2", "12.5", "1,212", "3 + 9 = 1", "3 + 9 = 2"])
def test_wrong(text):
    assert not answers_with(text, "12", asked=QUESTION[0]["content"])


@pytest.mark.parametrize("text", ["11, 12", "11,12", "12, 13", "10 11 12", "11 or 12", "3 + 9 = 11 = 12", "12 / 13"])
def test_trying_several_numbers_earns_nothing(text):
    assert not answers_with(text, "12", asked=QUESTION[0]["content"])


@pytest.mark.parametrize(
    "text", ["3 + 9 =", "12 and then we add", "12 + ", "3 + 9 = 12, so", "To add 3 and 9, we need to"]
)
def test_an_answer_that_goes_on_is_not_finished(text):
    assert not answers_with(text, "12", asked=QUESTION[0]["content"])


@pytest.mark.parametrize(("text", "wanted"), [("-3", "-3"), ("2 - 5 = -3", "-3"), ("1,200", "1200"), ("1200", "1,200")])
def test_signs_and_thousands_separators(text, wanted):
    assert answers_with(text, wanted, asked="What is 2 - 5?")


def test_an_operand_that_happens_to_be_the_answer_counts():
    assert answers_with("0 + 5 = 5", "5", asked="What is 0 + 5?")


def test_messages_and_plain_text_are_scored_alike():
    rewards = right_answer([QUESTION, QUESTION], [says("3 + 9 = 12"), says("13")], ["12", "12"], other_column=[1, 2])
    assert rewards == [1.0, 0.0]
    assert right_answer(["3 + 9 ="] * 2, [" 12", " 3"], ["12", "12"]) == [1.0, 0.0]


def test_an_answer_that_was_cut_off_earns_nothing_even_if_its_beginning_is_the_answer():
    completions = [says("3 + 9 = 12"), says("3 + 9 = 12")]
    assert right_answer([QUESTION] * 2, completions, ["12"] * 2, truncated=[True, False]) == [0.0, 1.0]
