"""Turns become sequences: the longest fitting one is extended, and each sampled token is trained exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.errors import ProducerError
from lit_rl.rollout.reconcile import reconcile
from lit_rl.types import TurnRecord


def turn(prompt, output, log_probs=None, **fields):
    return TurnRecord(prompt, output, log_probs or [-i / 100 for i in output], **fields)


def trained(sequence):
    """(token, log-prob in hundredths) of the trained tokens."""
    mask = sequence.completion_mask
    ids, log_probs = sequence.token_ids[mask], sequence.sampler_logprobs[mask]
    return [(int(i), round(-100 * float(lp))) for i, lp in zip(ids, log_probs, strict=True)]


def test_a_plain_chain_stays_one_sequence():
    result = reconcile(
        [
            turn([1, 2], [3]),
            turn([1, 2, 3, 4], [5]),
            turn([1, 2, 3, 4, 5, 6], [7, 8]),
            turn([1, 2, 3, 4, 5, 6, 7, 8], [9]),
        ]
    )
    assert [s.token_ids.tolist() for s in result.sequences] == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert result.sequences[0].completion_mask.tolist() == [0, 0, 1, 0, 1, 0, 1, 1, 1]
    assert (result.borders, result.forks) == (3, 0)


def test_a_turn_extends_the_longest_held_sequence_that_it_continues():
    turns = [
        turn([11, 12], [13]),
        turn([11, 12, 13, 20], [21]),
        turn([11, 12], [13, 20, 21, 22]),  # the conversation goes back and says more
        turn([11, 12, 13, 20, 21, 22, 30], [31]),  # both held sequences begin it
    ]
    result = reconcile(turns)
    first, second = result.sequences
    assert first.token_ids.tolist() == [11, 12, 13, 20, 21]
    assert second.token_ids.tolist() == [11, 12, 13, 20, 21, 22, 30, 31]
    assert trained(first) == [(13, 13), (21, 21)]
    assert trained(second) == [(13, 13), (20, 20), (21, 21), (22, 22), (31, 31)]
    assert (result.borders, result.forks) == (3, 1)


def test_a_context_that_was_rendered_differently_begins_a_sequence_of_its_own():
    result = reconcile([turn([1, 2], [3, 4]), turn([1, 2, 3, 9, 5], [6])])
    assert [s.token_ids.tolist() for s in result.sequences] == [[1, 2, 3, 4], [1, 2, 3, 9, 5, 6]]
    assert [trained(s) for s in result.sequences] == [[(3, 3), (4, 4)], [(6, 6)]]


def test_masked_tokens_are_context_only():
    (sequence,) = reconcile([turn([1], [2, 3], output_mask=[0, 1])]).sequences
    assert sequence.completion_mask.tolist() == [False, False, True]
    assert sequence.sampler_logprobs.tolist() == pytest.approx([0, 0, -0.03])


def test_a_sequence_without_a_trained_token_vanishes():
    result = reconcile([turn([1], [2], output_mask=[0]), turn([9], [8])])
    assert [s.token_ids.tolist() for s in result.sequences] == [[9, 8]]


def test_an_empty_answer_trains_nothing():
    assert reconcile([TurnRecord([1, 2], [])]).sequences == []


def test_untrained_tokens_need_no_log_probs():
    assert reconcile([TurnRecord([1], [2, 3], output_mask=[0, 0])]).sequences == []


def test_candidates_and_masks_keep_their_places():
    first = turn([1], [2], output_sampling_mask=[[2, 5]], output_sampler_logprobs=[{2: -0.1}])
    (sequence,) = reconcile([first, turn([1, 2, 3], [4])]).sequences
    masks, candidates = sequence.sampling_masks, sequence.sampler_candidates
    assert masks is not None and candidates is not None and candidates.logprobs is not None
    assert (masks.offsets.tolist(), masks.ids.tolist(), masks.logprobs) == ([0, 0, 2, 2, 2], [2, 5], None)
    assert (candidates.offsets.tolist(), candidates.ids.tolist()) == ([0, 0, 1, 1, 1], [2])
    assert candidates.logprobs.tolist() == pytest.approx([-0.1])


def test_without_truncated_sampling_there_are_no_masks():
    (sequence,) = reconcile([turn([1], [2])]).sequences
    assert sequence.sampling_masks is None and sequence.sampler_candidates is None


def test_the_arrays_have_the_types_that_the_trainer_expects():
    (sequence,) = reconcile([turn([1], [2])]).sequences
    assert (sequence.token_ids.dtype, sequence.completion_mask.dtype) == (np.int64, np.bool_)
    assert sequence.sampler_logprobs.dtype == np.float32


@pytest.mark.parametrize(
    "fields",
    [
        {"output_log_probs": [-1.0]},
        {"output_mask": [1, 1, 1]},
        {"output_sampling_mask": [[5]]},
        {"output_sampler_logprobs": [{5: -1.0}] * 3},
    ],
)
def test_lists_that_do_not_fit_together_are_refused_by_name(fields):
    record = TurnRecord(**({"prompt_ids": [1], "output_ids": [5, 6], "output_log_probs": [-1.0, -1.0]} | fields))
    with pytest.raises(ProducerError, match=next(iter(fields))):
        reconcile([record])


tokens = st.integers(1, 2)


@st.composite
def conversations(draw):
    """Turns whose prompts often continue something held, over two tokens, so that prefixes abound."""
    turns: list[TurnRecord] = []
    held: list[list[int]] = [[]]
    number = 0
    for _ in range(draw(st.integers(1, 7))):
        base = draw(st.sampled_from(held))
        cut = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        prompt = cut + draw(st.lists(tokens, min_size=0 if cut else 1, max_size=3))
        output = draw(st.lists(tokens, min_size=1, max_size=3))
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=len(output), max_size=len(output)))
        log_probs = [-float(number + i + 1) for i in range(len(output))]  # each sampled token has one of its own
        number += len(output)
        turns.append(TurnRecord(prompt, output, log_probs, mask))
        held.append(prompt + output)
    return turns


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_each_trained_token_is_there_once_under_the_context_it_was_sampled_in(turns):
    expected = {}
    for record in turns:
        for i, log_prob in enumerate(record.output_log_probs):
            if record.output_mask is None or record.output_mask[i]:
                expected[log_prob] = record.prompt_ids + record.output_ids[: i + 1]
    found = {}
    result = reconcile(turns)
    for sequence in result.sequences:
        for place in np.flatnonzero(sequence.completion_mask):
            log_prob = float(sequence.sampler_logprobs[place])
            assert log_prob not in found
            found[log_prob] = sequence.token_ids[: place + 1].tolist()
    assert found == expected
    assert len(result.sequences) <= result.forks + 1 <= len(turns)
    assert result.borders == len(turns) - 1
