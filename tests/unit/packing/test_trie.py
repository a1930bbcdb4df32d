from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.errors import PackingError
from lit_rl.packing.trie import PrefixTrie, empty_row, pack
from lit_rl.tensors import PackedRow
from lit_rl.types import Sample, TokenSets
from tests.fakes.samples import forests, sample


def path_to(row: PackedRow, place: int) -> list[int]:
    """Tokens from the root to a place, read from segments and parents alone."""
    starts, tokens = row.tree.segment_starts.tolist(), row.tree.token_ids.tolist()
    segment = max(s for s in range(len(starts) - 1) if starts[s] <= place)
    path = tokens[starts[segment] : place + 1]
    while (segment := int(row.tree.segment_parents[segment])) >= 0:
        path = tokens[starts[segment] : starts[segment + 1]] + path
    return path


def test_two_rollouts_of_one_prompt_forward_seven_tokens_instead_of_ten() -> None:
    row = pack([sample([1, 2, 3, 11, 12], [0, 0, 0, 1, 1]), sample([1, 2, 3, 21, 22], [0, 0, 0, 1, 1])])

    assert row.tree.token_ids.tolist() == [1, 2, 3, 11, 12, 21, 22]
    assert row.tree.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert row.tree.segment_starts.tolist() == [0, 3, 5, 7]
    assert row.tree.segment_parents.tolist() == [-1, 0, 0]
    assert row.tree.subtree_ends.tolist() == [7, 5, 7]
    assert row.terms.target_index.tolist() == [2, 3, 2, 5]
    assert row.terms.target_ids.tolist() == [11, 12, 21, 22]
    assert row.terms.sample_index.tolist() == [0, 0, 1, 1]
    assert row.raw_tokens == 10
    assert row.attention_pairs == 1 + 2 + 3 + 2 * (4 + 5)


def test_the_longest_way_down_comes_first() -> None:
    row = pack([sample([1, 2, 3]), sample([1, 2, 4, 5])])

    assert row.tree.token_ids.tolist() == [1, 2, 4, 5, 3]
    assert row.tree.segment_starts.tolist() == [0, 2, 4, 5]
    assert row.tree.subtree_ends.tolist() == [5, 4, 5]


def test_no_path_ends_in_a_term_that_predicts_a_token_nobody_has() -> None:
    """One sample ends where the others branch, one is a duplicate, one is a single token."""
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 10, 11], [5, 6, 7], [5, 6, 7, 8, 9], [4]]
    row = pack([sample(tokens) for tokens in rows])

    terms_of = [(row.terms.sample_index == s).sum().item() for s in range(5)]
    assert terms_of == [len(tokens) - 1 for tokens in rows]
    assert row.tree.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 4]


def test_a_longer_sample_goes_on_in_the_run_of_the_shorter_one() -> None:
    row = pack([sample([1, 2]), sample([1, 2, 3, 4]), sample([1])])

    assert row.tree.segment_starts.tolist() == [0, 4]
    assert row.terms.target_index.tolist() == [0, 0, 1, 2]


def test_a_sample_that_ends_above_a_later_fork_keeps_its_terms() -> None:
    row = pack([sample([1, 2, 3, 4, 5, 6]), sample([1, 2]), sample([1, 2, 3, 4, 9])])

    second = row.terms.sample_index == 1
    assert row.terms.target_index[second].tolist() == [0]
    assert row.terms.target_ids[second].tolist() == [2]


def test_a_sample_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(PackingError, match="'lost' has no token"):
        PrefixTrie().would_add(sample([], name="lost"))


def test_a_cursor_from_before_another_insertion_is_refused() -> None:
    trie = PrefixTrie()
    stale = trie.would_add(sample([1, 2]))
    trie.add(sample([1, 3]))
    with pytest.raises(PackingError, match="older than the trie"):
        trie.insert(stale)


def test_a_row_without_samples_is_one_token_without_terms() -> None:
    for row in (empty_row(), PrefixTrie().layout()):
        assert row.tree.token_ids.tolist() == [0]
        assert row.tree.segment_starts.tolist() == [0, 1]
        assert len(row.terms) == 0


def test_a_long_common_prefix_is_found_to_the_token() -> None:
    tokens = np.arange(20_000)
    for fork in (1, 1023, 1024, 1025, 5119, 5120, 19_999):
        other = tokens.copy()
        other[fork] = 7_000_000
        trie = PrefixTrie()
        trie.add(sample(tokens.tolist()))
        assert trie.would_add(sample(other.tolist())).depth == fork


@settings(max_examples=150, deadline=None)
@given(forests())
def test_a_row_holds_each_prefix_once_and_each_trained_token_under_its_own_context(samples: list[Sample]) -> None:
    row = pack(samples)
    sequences = [s.sequence.token_ids.tolist() for s in samples]
    prefixes = {tuple(tokens[: end + 1]) for tokens in sequences for end in range(len(tokens))}

    laid = [tuple(path_to(row, place)) for place in range(row.tree.num_tokens)]
    assert len(laid) == len(prefixes)
    assert set(laid) == prefixes
    assert row.tree.position_ids.tolist() == [len(path) - 1 for path in laid]
    assert row.attention_pairs == sum(len(path) for path in laid)

    wanted = [
        (
            tuple(s.sequence.token_ids[:t].tolist()),
            int(s.sequence.token_ids[t]),
            float(s.sequence.sampler_logprobs[t]),
            i,
        )
        for i, s in enumerate(samples)
        for t in range(1, len(s.sequence.token_ids))
        if s.sequence.completion_mask[t]
    ]
    terms = row.terms
    columns = zip(terms.target_index, terms.target_ids, terms.sampler_logprobs, terms.sample_index, strict=True)
    assert [(laid[at], int(token), float(logprob), int(index)) for at, token, logprob, index in columns] == wanted


@settings(max_examples=100, deadline=None)
@given(forests())
def test_subtrees_are_slices_and_segments_are_maximal(samples: list[Sample]) -> None:
    tree = pack(samples).tree
    starts, parents, ends = tree.segment_starts.tolist(), tree.segment_parents.tolist(), tree.subtree_ends.tolist()
    for segment, parent in enumerate(parents):
        below = [s for s in range(len(parents)) if starts[segment] <= starts[s] < ends[segment]]
        assert all(s == segment or parents[s] in below for s in below)
        assert parents.count(segment) != 1  # a single child would be the same run
        assert parent < segment


@settings(max_examples=100, deadline=None)
@given(forests())
def test_what_a_sample_would_add_is_what_it_adds(samples: list[Sample]) -> None:
    trie = PrefixTrie()
    for one in samples:
        before = trie.num_tokens, trie.num_terms, trie.num_pairs
        cursor = trie.would_add(one)
        assert (trie.num_tokens, trie.num_terms, trie.num_pairs) == before
        trie.insert(cursor)
        row = trie.layout()
        assert trie.num_tokens == before[0] + cursor.new_tokens == row.tree.num_tokens
        assert trie.num_terms == before[1] + cursor.new_terms == len(row.terms)
        assert trie.num_pairs == before[2] + cursor.new_pairs == int((row.tree.position_ids + 1).sum())


def test_sets_of_tokens_travel_with_their_loss_terms() -> None:
    """The second sample has none: its terms have empty ones. The first token of a sample predicts nothing."""
    first, second = sample([1, 2, 3], [1, 1, 1]), sample([1, 2, 4, 5], [0, 0, 1, 1])
    first.sequence.sampler_candidates = TokenSets.of([{1: -0.5}, {2: -0.25, 9: -2.0}, {7: -1.0}])
    first.sequence.sampling_masks = TokenSets.of([[1], None, [3, 7]])
    terms = pack([first, second]).terms
    assert terms.target_ids.tolist() == [2, 3, 4, 5]
    assert terms.candidates is not None and terms.kept is not None
    assert terms.candidates.offsets.tolist() == [0, 2, 3, 3, 3]
    assert terms.candidates.terms.tolist() == [0, 0, 1]
    assert terms.candidates.ids.tolist() == [2, 9, 7]
    assert terms.candidates.logprobs is not None and terms.candidates.logprobs.tolist() == [-0.25, -2.0, -1.0]
    assert terms.kept.offsets.tolist() == [0, 0, 2, 2, 2]
    assert (terms.kept.ids.tolist(), terms.kept.logprobs) == ([3, 7], None)


def test_a_row_without_sets_has_none() -> None:
    terms = pack([sample([1, 2, 3])]).terms
    assert terms.candidates is None and terms.kept is None


@settings(max_examples=60, deadline=None)
@given(samples=forests(), seed=st.integers(0, 9))
def test_each_loss_term_gets_the_set_of_its_own_token(samples: list[Sample], seed: int) -> None:
    draw = np.random.default_rng(seed)
    expected = []
    for number, one in enumerate(samples):
        sets = [draw.integers(0, 50, draw.integers(0, 4)).tolist() for _ in one.sequence.token_ids]
        if number % 3 == 2:
            sets = [[] for _ in sets]
        else:
            one.sequence.sampling_masks = TokenSets.of(sets)
        expected += [own for own, trained in list(zip(sets, one.sequence.completion_mask, strict=True))[1:] if trained]
    kept = pack(samples).terms.kept
    assert kept is not None
    assert [part.tolist() for part in kept.ids.tensor_split(kept.offsets[1:-1])][: len(expected)] == expected
    assert len(kept.offsets) == len(expected) + 1
