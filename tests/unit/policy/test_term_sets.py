"""Candidates of the sampler and truncated sampling: log-probs of more tokens than the sampled one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from lit_rl.packing.trie import pack
from lit_rl.policy.forward import log_kept_mass, score_row
from lit_rl.tensors import TermSets
from lit_rl.types import Sample, TokenSets
from tests.fakes.policies import furthest, gradients, tiny_model, tiny_policy
from tests.fakes.samples import sample

KEPT = [None, [2, 7], [3, 1, 4], None, [5, 0]]
CANDIDATES = [None, {2: -0.1, 8: -2.0}, {1: -0.3, 3: -0.4, 4: -1.0}, {4: -0.2}, None]


def samples(*, kept: bool, candidates: bool) -> list[Sample]:
    """[1, 2, 3, 4, 5] with sets, and a fork of it without any."""
    made = sample([1, 2, 3, 4, 5])
    made.sequence.sampling_masks = TokenSets.of(KEPT) if kept else None
    made.sequence.sampler_candidates = TokenSets.of(CANDIDATES) if candidates else None
    return [made, sample([1, 2, 9])]


def by_hand(logits: Tensor, target: int, kept: list[int] | None) -> Tensor:
    """[V] log-probs over what was kept: everything else is masked before the softmax."""
    if kept is not None:
        masked = torch.ones_like(logits, dtype=torch.bool)
        masked[kept] = False
        logits = logits.masked_fill(masked, -torch.inf)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_sets_are_scored_as_if_their_logits_were_there(kept: bool, candidates: bool, chunk_bytes: int) -> None:
    policy, alone = tiny_policy(LlamaConfig), tiny_model(LlamaConfig)
    row = pack(samples(kept=kept, candidates=candidates))
    scores = score_row(policy, row, temperature=0.7, chunk_bytes=chunk_bytes)

    expected, of_candidates = [], []
    for one in samples(kept=False, candidates=False):
        tokens = torch.from_numpy(one.sequence.token_ids)
        logits = alone(input_ids=tokens[None], use_cache=False).logits[0] / 0.7
        first = len(tokens) == 5
        for place in range(1, len(tokens)):
            own = by_hand(logits[place - 1], int(tokens[place]), KEPT[place] if kept and first else None)
            expected.append(own[tokens[place]])
            of_candidates += [own[i] for i in (CANDIDATES[place] or {}) if candidates and first and own[i] > -torch.inf]
    torch.testing.assert_close(scores.logprobs, torch.stack(expected), rtol=1e-10, atol=1e-10)
    assert scores.entropy.shape == scores.logprobs.shape

    weights = torch.arange(1.0, 7.0)
    ours, theirs = (scores.logprobs * weights).sum(), (torch.stack(expected) * weights).sum()
    if not candidates:
        assert scores.candidate_logprobs is None
    elif not kept:
        assert scores.candidate_logprobs is not None
        torch.testing.assert_close(scores.candidate_logprobs, torch.stack(of_candidates), rtol=1e-10, atol=1e-10)
        ours, theirs = ours + scores.candidate_logprobs.exp().sum(), theirs + torch.stack(of_candidates).exp().sum()
    else:  # a candidate that was kept has the same log-prob in both
        assert row.terms.candidates is not None and scores.candidate_logprobs is not None
        ids = row.terms.candidates.ids.tolist()
        assert ids == [2, 8, 1, 3, 4, 4]
        found = scores.candidate_logprobs[[0, 2, 3, 4, 5]]
        torch.testing.assert_close(found, torch.stack(of_candidates), rtol=1e-10, atol=1e-10)
    assert furthest(gradients(policy, ours), gradients(alone, theirs)) < 1e-10


def test_what_was_kept_has_all_the_probability() -> None:
    made = sample([1, 2])
    made.sequence.sampling_masks = TokenSets.of([None, [2]])
    assert score_row(tiny_policy(LlamaConfig), pack([made])).logprobs.tolist() == pytest.approx([0.0], abs=1e-12)


def test_a_kept_set_that_the_policy_finds_very_unlikely_is_no_nan() -> None:
    """The exponential of -200 is 0 in float32; the second set is empty and stands for the vocabulary."""
    logprobs = torch.tensor([-200.0, -200.0, -1.0], requires_grad=True)
    kept = TermSets(torch.tensor([0, 2, 2, 3]), torch.tensor([4, 5, 6]))
    mass = log_kept_mass(logprobs, kept)
    assert mass.tolist() == pytest.approx([-200.0 + math.log(2), 0.0, -1.0])
    mass.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0.5, 0.5, 1.0])
