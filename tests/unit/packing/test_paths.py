"""A packed row read back: each sample's tokens, and the row of one sequence."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.packing.paths import sample_tokens, single_sequence_row
from lit_rl.packing.trie import pack
from lit_rl.types import Sample, Sequence


def sample(ids: list[int]) -> Sample:
    """Everything after the first token is trained."""
    mask = np.array([False] + [True] * (len(ids) - 1))
    return Sample(Sequence(np.array(ids), mask, np.zeros(len(ids), np.float32)), 1.0, 1.0, str(ids), 0, 1)


def test_two_branches_come_back_whole():
    row = pack([sample([1, 2, 3]), sample([1, 2, 4, 5])])
    assert row.tree.num_tokens == 5
    assert sample_tokens(row, 0).tolist() == [1, 2, 3]
    assert sample_tokens(row, 1).tolist() == [1, 2, 4, 5]


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=6))
def test_every_sample_of_any_forest_comes_back(forest):
    row = pack([sample(ids) for ids in forest])
    assert [sample_tokens(row, i).tolist() for i in range(len(forest))] == forest


def test_a_single_sequence_scores_each_token_after_the_first():
    row = single_sequence_row(torch.tensor([7, 8, 9]))
    assert row.terms.target_index.tolist() == [0, 1]
    assert row.terms.target_ids.tolist() == [8, 9]
    assert row.tree.position_ids.tolist() == [0, 1, 2]
