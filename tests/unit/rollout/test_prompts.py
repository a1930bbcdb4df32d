"""Dataset rows become prompts: in the ledger's order, templated or as they stand, refused with the row's number."""

import numpy as np
import pytest

from lit_rl.errors import DataError
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.rollout.prompts import (
    PromptSource,
    check_dataset,
    dataset_fingerprint,
    encode_prompt,
    longest_prompt,
    order_of_epoch,
    read_content,
)
from lit_rl.settings import RolloutSettings
from lit_rl.types import Position
from tests.fakes.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": f"row {i}", "answer": i} for i in range(4)]
CHAT = [{"role": "user", "content": "hi"}]


def source(start=None, **settings):
    return PromptSource(ROWS, TOKENIZER, RolloutSettings(**settings), start or LedgerStart())


def draw_rows(prompts, count):
    return [prompts.draw().row_index for _ in range(count)]


def test_rows_come_in_order_epoch_after_epoch():
    prompts = source()
    assert draw_rows(prompts, 6) == [0, 1, 2, 3, 0, 1]
    assert prompts.draw().position == Position(1, 2)


def test_a_shuffled_epoch_is_a_permutation_of_seed_and_epoch_alone():
    first, again = order_of_epoch(50, 7, 0, shuffle=True), order_of_epoch(50, 7, 0, shuffle=True)
    assert first.tolist() == again.tolist()
    assert sorted(first.tolist()) == list(range(50))
    assert first.tolist() != order_of_epoch(50, 7, 1, shuffle=True).tolist()
    assert first.tolist() != order_of_epoch(50, 8, 0, shuffle=True).tolist()


def test_a_resume_in_a_shuffled_epoch_goes_on_with_the_same_rows():
    whole = draw_rows(source(shuffle=True), 8)
    assert draw_rows(source(LedgerStart(1, 1), shuffle=True), 3) == whole[5:]


def test_open_places_come_before_new_ones():
    prompts = source(LedgerStart(1, 2, [Position(0, 3), Position(1, 0)]))
    assert [prompts.draw().position for _ in range(3)] == [Position(0, 3), Position(1, 0), Position(1, 2)]


def test_after_the_last_epoch_nothing_new_is_drawn_but_a_redispatch_is():
    prompts = source(max_epochs=1)
    draw_rows(prompts, 4)
    assert prompts.draw() is None
    prompts.redispatch(Position(0, 2))
    assert prompts.draw().position == Position(0, 2)
    assert prompts.draw() is None


def test_a_prompt_carries_its_other_columns_and_not_itself():
    prompt = source().draw()
    assert (prompt.content, prompt.columns) == ("row 0", {"answer": 0})


def test_text_is_encoded_as_it_stands():
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, "hi", {})) == "hi"


def test_messages_go_through_the_template_with_a_generation_prompt():
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, CHAT, {})) == "user\nhi</s>\nassistant\n"


def test_template_arguments_reach_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tone }} {{ messages[0]['content'] }}"
    assert tokenizer.decode(encode_prompt(tokenizer, CHAT, {"tone": "calm"})) == "calm hi"


def test_messages_without_a_template_are_refused_with_the_remedy():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="plain-text prompts"):
        encode_prompt(tokenizer, CHAT, {})


def test_what_the_template_refuses_is_told_in_its_words():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        encode_prompt(tokenizer, CHAT, {})


def test_keys_that_only_other_rows_have_do_not_reach_the_template():
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": "x"}
    assert read_content([message], 0) == [{"role": "assistant", "content": None, "name": "x"}]


@pytest.mark.parametrize("value", ["", [], 7, None, ["hi"], [{"role": "user"}], {"role": "user", "content": "x"}])
def test_a_prompt_of_the_wrong_shape_is_refused_with_its_row(value):
    with pytest.raises(DataError, match="row 3"):
        read_content(value, 3)


def test_the_longest_prompt_is_found_among_texts_and_messages():
    chat_length = len(encode_prompt(TOKENIZER, CHAT, {}))
    assert longest_prompt([{"prompt": "abc"}, {"prompt": CHAT}, {"prompt": "abcdef"}], TOKENIZER, {}) == chat_length
    assert longest_prompt([{"prompt": "abc"}, {"prompt": "abcdef"}], TOKENIZER, {}) == 6


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([{"question": "x"}], r"no column `prompt`; it has \['question'\]"),
        ([{"prompt": "x", "completions": 1}], "rename"),
        ([{"prompt": "x"}, {"prompt": 5}], "row 1"),
        (iter([{"prompt": "x"}]), "with a length"),
    ],
)
def test_a_dataset_that_cannot_work_is_refused_at_once(rows, words):
    with pytest.raises(DataError, match=words):
        check_dataset(rows)


def test_a_fingerprint_tells_datasets_apart():
    assert dataset_fingerprint(ROWS) == dataset_fingerprint([dict(row) for row in ROWS])
    assert dataset_fingerprint(ROWS) != dataset_fingerprint(ROWS[:3])
    assert dataset_fingerprint(ROWS) != dataset_fingerprint([*ROWS[:3], {"prompt": "row 3", "answer": 4}])


def test_the_order_is_an_array_of_row_numbers():
    assert order_of_epoch(3, 0, 0, shuffle=False).dtype == np.int64
