"""Reading a packed row back: the tokens of one of its samples, and a row that holds a single sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.tensors import LossTerms, PackedRow, TreeLayout


def sample_tokens(row: PackedRow, sample: int) -> Tensor:
    """Token ids of one sample up to its last trained token.

    Args:
        row: A packed row.
        sample: Index of a sample that has a loss term.

    Returns:
        [T] int64 on the CPU.
    """
    terms = (row.terms.sample_index == sample).nonzero().flatten()
    last = int(terms[int(row.tree.position_ids[row.terms.target_index[terms]].argmax())])
    place = int(row.terms.target_index[last])
    starts = row.tree.segment_starts.tolist()
    segment = int(torch.searchsorted(row.tree.segment_starts, place, right=True)) - 1
    pieces = [row.tree.token_ids[starts[segment] : place + 1]]
    while (segment := int(row.tree.segment_parents[segment])) >= 0:
        pieces.append(row.tree.token_ids[starts[segment] : starts[segment + 1]])
    return torch.cat([*reversed(pieces), row.terms.target_ids[last : last + 1]]).cpu()


def single_sequence_row(token_ids: Tensor) -> PackedRow:
    """A row of one sequence [T] in which every token after the first is scored ([T - 1] terms)."""
    count = token_ids.numel()
    tree = TreeLayout(
        token_ids=token_ids,
        position_ids=torch.arange(count),
        segment_starts=torch.tensor([0, count]),
        segment_parents=torch.tensor([-1]),
        subtree_ends=torch.tensor([count]),
    )
    terms = LossTerms(
        target_index=torch.arange(count - 1),
        target_ids=token_ids[1:],
        sampler_logprobs=torch.zeros(count - 1),
        advantages=torch.zeros(count - 1),
        sample_index=torch.zeros(count - 1, dtype=torch.int64),
    )
    return PackedRow(tree, terms, sample_ids=("probe",), group_ids=(0,), raw_tokens=count)
