"""What counts as cut off, in which form a completion comes, and seeds of requests."""

import pytest

from lit_rl.rollout.turns import RolloutContext, as_completion, single_turn, truncated
from lit_rl.types import Position, Prompt, Rollout, TurnRecord
from tests.fakes.tiny import tiny_tokenizer

EOS = {2, 7}  # the model lists two; the tokenizer knows only 2, which is its pad id too


@pytest.mark.parametrize(
    ("output_ids", "finish_reason", "expected"),
    [
        ([5, 6, 7], "stop", False),
        ([5, 6, 2], "stop", False),
        ([5, 6, 9], "length", True),
        ([5, 6, 7], "length", False),  # the limit fell exactly on the end token: the answer is complete
        ([5, 6, 9], "stop", False),  # a stop string
        ([5, 6, 9], None, True),
        ([5, 6, 2], None, False),
        ([], "length", True),
    ],
)
def test_any_end_token_of_the_model_makes_an_answer_complete(output_ids, finish_reason, expected):
    turn = TurnRecord([1], output_ids, [-1.0] * len(output_ids), finish_reason=finish_reason)
    assert truncated(Rollout("", output_ids, [turn]), EOS) is expected


def test_the_last_turn_decides():
    cut, ended = (
        TurnRecord([1], [5], [-1.0], finish_reason="length"),
        TurnRecord([1], [2], [-1.0], finish_reason="stop"),
    )
    assert truncated(Rollout("", [5, 2], [cut, ended]), EOS) is False
    assert truncated(Rollout("", [2, 5], [ended, cut]), EOS) is True


def test_a_completion_has_the_form_of_its_prompt():
    assert as_completion("a text", "b") == "b"
    assert as_completion([{"role": "user", "content": "a"}], "b") == [{"role": "assistant", "content": "b"}]


def test_a_single_turn_is_decoded_without_its_end_token():
    tokenizer = tiny_tokenizer()
    turn = TurnRecord([3], [*tokenizer("ok")["input_ids"], tokenizer.eos_token_id], [-1.0] * 3)
    rollout = single_turn("prompt", turn, tokenizer)
    assert (rollout.completion, rollout.completion_ids, rollout.turns) == ("ok", turn.output_ids, [turn])


def test_each_request_has_a_seed_of_its_own_that_a_resumed_run_has_again():
    def seeds(index, generation, seed=42):
        prompt = Prompt(Position(0, index), index, "x", [1], {})
        context = RolloutContext(prompt, generation, "train", budget=10)
        return [context.take_request_seed(seed) for _ in range(2)]

    found = seeds(0, 0) + seeds(0, 1) + seeds(1, 0) + seeds(0, 0, seed=43)
    assert len(set(found)) == 8
    assert all(0 <= seed < 2**63 for seed in found)
    assert seeds(0, 0) == found[:2]
