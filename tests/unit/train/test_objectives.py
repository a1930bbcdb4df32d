"""GRPO on hand-made rows: the loss, its metrics, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch

from lit_rl.errors import NonFiniteError, ProducerError, SettingsError
from lit_rl.metrics import values
from lit_rl.tensors import LossTerms, PackedRow, StepTotals, TermSets, TokenScores, TreeLayout
from lit_rl.train.objectives import GRPO


def row(sampler: list[float], advantages: list[float], samples: list[int]) -> PackedRow:
    n = len(sampler)
    tree = TreeLayout(
        torch.arange(n + 1), torch.arange(n + 1), torch.tensor([0, n + 1]), torch.tensor([-1]), torch.tensor([n + 1])
    )
    terms = LossTerms(
        torch.arange(n), torch.arange(1, n + 1), torch.tensor(sampler), torch.tensor(advantages), torch.tensor(samples)
    )
    return PackedRow(tree, terms, sample_ids=tuple(f"r{i}" for i in range(max(samples) + 1)))


def score(objective: GRPO, policy: list[float], packed: PackedRow):
    logprobs = torch.tensor(policy, requires_grad=True)
    n = len(policy)
    counts = StepTotals(n, samples=1, groups=1, rows_per_rank=1, micro_batch_terms=(n,))
    scores = TokenScores(logprobs, entropy=torch.full((n,), 0.5))
    loss, stats = objective.row_loss(scores, packed, counts, micro_batch=0, world_size=1)
    loss.backward()
    return loss.item(), logprobs.grad, values(stats)


def test_equal_policies_give_minus_the_mean_advantage():
    loss, gradient, stats = score(GRPO(), [-1.0, -2.0], row([-1.0, -2.0], [1.0, -3.0], [0, 1]))
    assert loss == pytest.approx(1.0)
    assert gradient.tolist() == pytest.approx([-0.5, 1.5])
    assert stats["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)
    assert stats["sampling/kl"] == 0.0
    assert stats["entropy"] == pytest.approx(0.5)


def test_clip_figures_are_shares_of_terms_and_extremes_over_samples():
    """Sample 0: one of two terms clipped above. Sample 1: one term clipped below."""
    policy = [math.log(0.5), math.log(0.9), math.log(0.1)]
    packed = row([math.log(0.25), math.log(0.9), math.log(0.5)], [1.0, 1.0, -1.0], [0, 0, 1])
    _, gradient, stats = score(GRPO(), policy, packed)
    assert gradient.tolist() == pytest.approx([0.0, -1 / 3, 0.0], abs=1e-6)
    assert stats["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    assert stats["clip_ratio/high_max"] == pytest.approx(1 / 2)
    assert stats["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert stats["clip_ratio/low_min"] == 0.0
    assert stats["clip_ratio/region_mean"] == pytest.approx(2 / 3)
    assert stats["sampling/importance_sampling_ratio/max"] == pytest.approx(2.0)
    assert stats["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(5))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_term_that_is_not_finite_stops_the_run_with_the_rollouts_name(bad):
    with pytest.raises(NonFiniteError, match="rollout r1"):
        score(GRPO(), [-1.0, bad], row([-1.0, -1.0], [1.0, 1.0], [0, 1]))
    with pytest.raises(NonFiniteError, match="rollout r0"):
        score(GRPO(), [-1.0, -1.0], row([bad, -1.0], [1.0, 1.0], [0, 1]))


@pytest.mark.parametrize("options", [{"epsilon": -0.1}, {"epsilon": 1.0}, {"epsilon_high": -1.0}])
def test_a_clip_that_cannot_work_is_refused_by_name(options):
    with pytest.raises(SettingsError, match=f"model.objective.{next(iter(options))}"):
        GRPO(**options)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"score_centering": True, "epsilon": 0.2}, "epsilon"),
        ({"score_centering": True, "epsilon_high": 0.3}, "epsilon_high"),
        ({"importance_clip_min": 0.5}, "importance_clip_min"),
        ({"importance_clip_max": 5.0}, "importance_clip_max"),
        ({"num_sampler_logprobs": 8}, "num_sampler_logprobs"),
        ({"out_of_band": "drop"}, "out_of_band"),
        ({"score_centering": True, "importance_clip_min": 1.0}, "importance_clip_min"),
        ({"score_centering": True, "importance_clip_max": 1.0}, "importance_clip_max"),
        ({"score_centering": True, "num_sampler_logprobs": 0}, "num_sampler_logprobs"),
        ({"score_centering": True, "out_of_band": "skip"}, "out_of_band"),
    ],
)
def test_an_option_of_the_other_loss_is_refused_and_so_is_a_bound_without_meaning(options, key):
    with pytest.raises(SettingsError, match=rf"model\.objective\.{key} = "):
        GRPO(**options)


def test_samples_without_candidates_cannot_be_centered():
    with pytest.raises(ProducerError, match="output_sampler_logprobs"):
        score(GRPO(score_centering=True), [-1.0], row([-1.0], [1.0], [0]))


def test_one_trained_token_without_candidates_is_noticed():
    packed = row([-1.0, -1.0], [1.0, 1.0], [0, 0])
    sets = TermSets(torch.tensor([0, 1, 1]), torch.tensor([3]), torch.tensor([-0.5]))
    packed = replace(packed, terms=replace(packed.terms, candidates=sets))
    scores = TokenScores(torch.tensor([-1.0, -1.0]), torch.zeros(2), candidate_logprobs=torch.tensor([-0.5]))
    counts = StepTotals(2, samples=1, groups=1, rows_per_rank=1, micro_batch_terms=(2,))
    with pytest.raises(ProducerError, match="trained tokens came without"):
        GRPO(score_centering=True).row_loss(scores, packed, counts, micro_batch=0, world_size=1)
