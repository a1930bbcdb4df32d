"""GRPO without score centering is TRL's asynchronous GRPO: the same loss, the same gradient of every parameter.

TRL 1.16.0 computes its side: its scoring of groups, its tree rows, its collator, its loss. What remains different is
written down as tests at the end.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_rollout_worker
from trl.experimental.async_grpo.async_grpo_trainer import _reduce_metric
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from lit_rl.maths.advantages import group_standardised
from lit_rl.metrics import Stats, merge_into, values
from lit_rl.packing.planner import StepPlan, TokenBudgetPlanner, Verdict
from lit_rl.policy.build import build_policy
from lit_rl.policy.forward import score_row
from lit_rl.train.objectives import GRPO
from lit_rl.types import Sample, Sequence
from tests.fakes.policies import scored_alone, tiny_model, tiny_policy
from tests.fakes.tiny import save_tiny_model
from tests.fakes.trl_trainers import async_grpo_trainer, collated, run_without_gpu

VOCABULARY = 19
TEMPERATURE = 0.7
REWARDS: list[list[float | None]] = [
    [1.0, 0.0, 0.0, 1.0, 0.5],
    [1.0, 1.0],  # nothing to learn; both sides keep it, and its terms count
    [0.25, None, -1.0, 2.0],
    [0.0, 1.0, 0.0],
]
MORE_REWARDS: list[list[float | None]] = [
    [None, None],
    [0.3],
    [0.1] * 8,  # equal decimals, whose mean may be off by a rounding
    [0.3] * 6,
    [0.9] * 3,
    [1e6, 1e6 + 1, 1e6 - 1],
    [float("nan"), 2.0, 3.0],
]
CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.1, 5.0)]


# TRL's side


def trl_scored(rewards: list[float | None]) -> list[float]:
    """The advantages of a group as TRL's worker scores it."""
    loop: Any = async_rollout_worker._AsyncRolloutLoop.__new__(async_rollout_worker._AsyncRolloutLoop)
    loop.reward_funcs, loop.reward_func_names = [lambda **_: rewards], ["given"]
    loop._env_reward_types, loop._provides_rollout_reward = [], False
    one = SimpleNamespace(input_ids=[1, 2], completion_mask=[0, 1], old_log_probs=[0.0, -1.0])
    count = len(rewards)
    group = async_rollout_worker.RolloutGroup(
        prompts=[[]] * count,
        reward_kwargs={},
        completions=[[]] * count,
        completions_ids=[[2]] * count,
        completions_sequences=[[one]] * count,
        tool_call_counts=[0] * count,
        tool_failure_counts=[0] * count,
        model_version=0,
        group_id=0,
        env_rewards=[None] * count,
        rollout_rewards=[None] * count,
    )
    return [sample.advantage for sample in asyncio.run(loop._score_group(group))]


@dataclass
class Float64Model:
    """Called as TRL's loss calls its model, and answers in float64, which TRL's own head does not."""

    model: PreTrainedModel
    temperature: float

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor, fused_lm_head: bool, **tree: Any
    ) -> SimpleNamespace:
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **tree)
        scores = (output.logits / self.temperature).log_softmax(-1)
        log_probs = scores.gather(2, shift_labels.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=log_probs, entropy=-(scores.exp() * scores).sum(-1).detach())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def trainer(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncGRPOTrainer]:
    with pytest.MonkeyPatch.context() as patch:
        run_without_gpu(patch)
        yield async_grpo_trainer(model_dir, tmp_path_factory.mktemp("trl"), temperature=TEMPERATURE)


def trl_step(
    trainer: AsyncGRPOTrainer, model: Any, micro_batches: list[list[Sample]], clip: tuple[float, float]
) -> tuple[float, dict[str, list[float]]]:
    """The step's loss and TRL's figures of each micro-batch; gradients are left in the model."""
    trainer.epsilon_low, trainer.epsilon_high = clip
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer._metrics["train"].clear()
    total = 0.0
    for samples in micro_batches:
        loss = trainer.compute_loss(model, collated(samples))
        loss.backward()
        total += loss.item()
    return total, dict(trainer._metrics["train"])


# ours


def sampled(model: PreTrainedModel) -> list[Sample]:
    """Groups with shared prompts, context inside the completions, and a stale sampler: ratios from about 0.4 to 2.5."""
    draw = np.random.default_rng(0)
    samples = []
    for group, rewards in enumerate(REWARDS):
        prompt = draw.integers(3, VOCABULARY, 3 + 2 * group)
        given = np.array([np.nan if one is None else one for one in rewards])
        for place, (advantage, reward) in enumerate(zip(group_standardised(given), given, strict=True)):
            tokens = np.concatenate([prompt, draw.integers(3, VOCABULARY, draw.integers(4, 17))])
            trained = (np.arange(len(tokens)) >= len(prompt)) & (draw.random(len(tokens)) < 0.8)
            trained[-1] = True
            one = Sample(
                Sequence(tokens, trained, np.zeros(len(tokens), np.float32)),
                advantage=float(np.float32(advantage)),
                reward=float(reward),
                rollout_id=f"{group}.{place}",
                group_id=group,
                version_first=1,
            )
            with torch.no_grad():
                own = scored_alone(model, [one], TEMPERATURE)[0].numpy()
            one.sequence.sampler_logprobs[trained] = own + draw.normal(0.0, 0.4, len(own))
            samples.append(one)
    return samples


def planned(samples: list[Sample]) -> tuple[StepPlan, list[list[Sample]]]:
    """The planner's step of three micro-batches, and whose samples each holds."""
    planner = TokenBudgetPlanner(100, ranks=1, micro_batches=3)
    assert all(planner.offer(one) is Verdict.PLACED for one in samples)
    plan = planner.close(policy_version=1)
    by_name = {one.rollout_id: one for one in samples}
    return plan, [[by_name[name] for name in row.sample_ids] for row in plan.rows[0]]


def policy(model_dir: Path) -> PreTrainedModel:
    return build_policy(str(model_dir), attention="cpu", gradient_checkpointing=False)


def our_step(model: PreTrainedModel, plan: StepPlan, objective: GRPO) -> tuple[float, list[Stats]]:
    """The step's loss and what each micro-batch adds to our figures; gradients are left in the model."""
    total, added = 0.0, []
    for place, row in enumerate(plan.rows[0]):
        scores = score_row(model, row, temperature=TEMPERATURE)
        loss, stats = objective.row_loss(scores, row, plan.totals, micro_batch=place, world_size=1)
        loss.backward()
        total += loss.item()
        added.append(stats)
    return total, added


def objective(clip: tuple[float, float]) -> GRPO:
    return GRPO(score_centering=False, loss_average="micro_batch", epsilon=clip[0], epsilon_high=clip[1])


def assert_same_gradients(ours: PreTrainedModel, theirs: PreTrainedModel, tolerance: float) -> None:
    """Each parameter's gradient, relative to its own size."""
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted, got = expected.pop(name).grad, parameter.grad
        assert wanted is not None and got is not None and wanted.any(), name
        assert float((got - wanted).norm() / wanted.norm()) < tolerance, name
    assert not expected


@functools.cache
def steps(model_dir: Path) -> tuple[list[Sample], list[Sample]]:
    """Samples of the float32 model's policy, and of the float64 model's."""
    return sampled(AutoModelForCausalLM.from_pretrained(model_dir)), sampled(tiny_model(LlamaConfig))


# what is the same


@pytest.mark.parametrize("clip", CLIPS)
def test_loss_and_gradient_in_float64(trainer: AsyncGRPOTrainer, model_dir: Path, clip: tuple[float, float]) -> None:
    ours, model = tiny_policy(LlamaConfig, attention="cpu"), tiny_model(LlamaConfig)
    model.set_attn_implementation(TREE_ATTENTION)
    plan, micro_batches = planned(steps(model_dir)[1])

    theirs, _ = trl_step(trainer, Float64Model(model, TEMPERATURE), micro_batches, clip)
    mine, _ = our_step(ours, plan, objective(clip))

    assert mine == pytest.approx(theirs, rel=1e-12)
    assert_same_gradients(ours, model, 1e-12)


def test_the_step_that_is_compared_has_everything_in_it(trainer: AsyncGRPOTrainer, model_dir: Path) -> None:
    """Unequal micro-batches, shared prompts, equal rewards, unscored ones, and clips that act on both sides."""
    for samples in steps(model_dir):
        plan, micro_batches = planned(samples)
        assert len(set(plan.totals.micro_batch_terms)) == 3
        assert any(row.tree.num_tokens < row.raw_tokens for row in plan.rows[0])
        assert {one.advantage for one in samples if one.group_id == 1} == {0.0}
        assert [one.advantage for one in samples if np.isnan(one.reward)] == [0.0]
        assert sum(map(len, micro_batches)) == len(samples)
    _, added = our_step(policy(model_dir), planned(steps(model_dir)[0])[0], objective((0.2, 0.2)))
    figures = [values(stats) for stats in added]
    assert all(one["clip_ratio/low_mean"] > 0 and one["clip_ratio/high_mean"] > 0 for one in figures)


def test_figures_of_each_micro_batch(trainer: AsyncGRPOTrainer, model_dir: Path) -> None:
    plan, micro_batches = planned(steps(model_dir)[0])
    _, theirs = trl_step(trainer, trainer.model, micro_batches, (0.2, 0.28))
    _, mine = our_step(policy(model_dir), plan, objective((0.2, 0.28)))
    names = {
        "sampling/importance_sampling_ratio/mean": "ratio",
        "sampling/kl": "kl",
        "entropy": "entropy",
        "clip_ratio/low_mean": "clip_ratio/low_mean",
        "clip_ratio/low_min": "clip_ratio/low_min",
        "clip_ratio/high_mean": "clip_ratio/high_mean",
        "clip_ratio/high_max": "clip_ratio/high_max",
        "clip_ratio/region_mean": "clip_ratio/region_mean",
    }
    for place, figures in enumerate(map(values, mine)):
        for name, their_name in names.items():
            assert figures[name] == pytest.approx(theirs[their_name][place], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("rewards", [*REWARDS, *MORE_REWARDS])
def test_advantages_of_a_group(rewards: list[float | None]) -> None:
    given = np.array([np.nan if one is None else one for one in rewards])
    assert group_standardised(given).tolist() == pytest.approx(trl_scored(rewards), rel=1e-12, abs=0)


# what is not


def test_means_over_a_step_weigh_terms_here_and_micro_batches_there(trainer: AsyncGRPOTrainer, model_dir: Path) -> None:
    plan, micro_batches = planned(steps(model_dir)[0])
    _, theirs = trl_step(trainer, trainer.model, micro_batches, (0.2, 0.2))
    _, added = our_step(policy(model_dir), plan, objective((0.2, 0.2)))
    whole: Stats = {}
    for stats in added:
        merge_into(whole, stats)
    mine = values(whole)["sampling/importance_sampling_ratio/mean"]

    assert mine == pytest.approx(np.average(theirs["ratio"], weights=plan.totals.micro_batch_terms), rel=1e-5)
    assert mine != pytest.approx(_reduce_metric("ratio", theirs["ratio"]), rel=1e-5)


def test_a_ratio_beyond_e_to_the_20_is_bounded_here_and_not_there(trainer: AsyncGRPOTrainer, model_dir: Path) -> None:
    [one, *_] = steps(model_dir)[0]
    far = np.where(one.sequence.completion_mask, one.sequence.sampler_logprobs - 60, 0).astype(np.float32)
    extreme = replace(one, sequence=replace(one.sequence, sampler_logprobs=far), advantage=-1.0)
    plan, micro_batches = planned([extreme])

    theirs, _ = trl_step(trainer, trainer.model, [micro_batches[0]], (0.2, 0.2))
    mine, _ = our_step(policy(model_dir), plan, objective((0.2, 0.2)))

    assert mine == pytest.approx(np.exp(20.0), rel=1e-6)
    assert theirs > 1e24
