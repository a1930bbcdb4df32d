"""Whole fits in the Python way: a real trainer, a real rollout process, a tiny model behind the server's routes."""

import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_rl import GRPO, PolicyModule, RolloutDataModule, Sampling, callbacks
from lit_rl.errors import ReceiptError
from tests.fakes.engine import TinyEngine
from tests.process.rewards_of_tests import always_half, share_of_letter

PROMPTS = [{"prompt": f"say {word}.", "letter": word[0]} for word in ("abc", "bcd", "cde", "def", "efg", "fgh")]


class History(pl.Callback):
    """What a user's own callback sees after each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append((trainer.global_step, trainer.datamodule.policy_version, batch))


def fit(
    model, tmp_path, *, engine=None, rewards=None, lr=1e-3, steps=3, extra=(), trainer=None, objective=None, **data
):
    engine = engine or TinyEngine()
    optimizer = {"optimizer": lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.0)}
    module = PolicyModule(model, objective or GRPO(), gradient_checkpointing=False, **optimizer)
    options = {"num_generations": 4, "samples_per_rank": 8, "token_budget": 0, "max_completion_length": 6, **data}
    datamodule = RolloutDataModule(
        data.pop("train", PROMPTS), rewards or [share_of_letter], engine=engine, worker_timeout=60, **options
    )
    history = History()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=CSVLogger(tmp_path),
        default_root_dir=tmp_path,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[history, *extra],
        **(trainer or {}),
    )
    trainer.fit(module, datamodule)
    return trainer, history, engine


def test_three_steps_move_the_servers_model_with_the_policy(tiny_model, tmp_path):
    trainer, history, engine = fit(tiny_model, tmp_path)
    assert [step for step, _, _ in history.steps] == [1, 2, 3]
    assert [version for _, version, _ in history.steps] == [1, 2, 3]  # the sync comes after a user's callback
    assert trainer.datamodule.policy_version == 4
    policy = trainer.lightning_module.policy.state_dict()
    served = engine.started[0].model.state_dict()
    assert all(torch.equal(policy[name], served[name]) for name in served)


def test_score_centering_asks_for_candidates_and_trains_on_them(tiny_model, tmp_path):
    """The policy of the first step is the sampler: every ratio is 1, and the candidates' mass is the policy's too."""
    _, history, engine = fit(
        tiny_model, tmp_path, objective=GRPO(score_centering=True, num_sampler_logprobs=5), steps=2
    )
    asked = {call.sampling["logprobs"] for call in engine.started[0].server.calls("/inference/v1/generate")}
    assert 6 in asked  # one more than is kept: the sampled token may be none of the five
    for _, _, batch in history.steps:
        for row in batch.rows:
            assert row.terms.candidates is not None
            assert row.terms.candidates.offsets.diff().tolist() == [5] * len(row.terms)
            assert (row.terms.candidates.logprobs.exp() > 0).all()
    first, _ = read_csv(tmp_path)
    assert float(first["sampling/masked_mean"]) == 0
    assert 0.1 < float(first["sampling/sampler_mass"]) <= 1
    assert float(first["sampling/importance_sampling_ratio/mean"]) == pytest.approx(1.0, abs=1e-4)
    assert "clip_ratio/low_mean" not in first


def test_every_logged_figure_is_there_and_adds_up(tiny_model, tmp_path):
    _, history, _ = fit(tiny_model, tmp_path)
    rows = list(read_csv(tmp_path))
    assert len(rows) == 3
    for row, (_, _, batch) in zip(rows, history.steps, strict=True):
        assert float(row["batch/samples_per_step"]) == 8
        forwarded = sum(r.tree.num_tokens for r in batch.rows)
        assert float(row["batch/forwarded_tokens_per_step"]) == forwarded
        assert float(row["batch/trained_tokens_per_step"]) == sum(len(r.terms) for r in batch.rows)
        raw = sum(r.raw_tokens for r in batch.rows)
        assert float(row["batch/packing_ratio"]) == pytest.approx(raw / forwarded)
        assert float(row["perf/step_s"]) >= float(row["perf/fwd_bwd_s"]) >= float(row["perf/fwd_s"]) > 0
        assert 0 <= float(row["completions/clipped_ratio"]) <= 1
        assert "perf/mfu_fwd_bwd" not in row  # nobody knows the peak of a CPU
    assert all(float(row["sync/receipt_error"]) < 1e-4 for row in rows[1:])  # of the sync before
    assert float(rows[-1]["num_tokens"]) == sum(float(r["batch/forwarded_tokens_per_step"]) for r in rows)


def test_fresh_samples_have_ratio_one_at_any_temperature(tiny_model, tmp_path):
    """Case 9: trainer and server measure the same distribution, at the sampling temperature."""
    for temperature in (0.5, 1.5):
        folder = tmp_path / str(temperature)
        fit(tiny_model, folder, steps=1, sampling=Sampling(temperature=temperature))
        (row,) = read_csv(folder)
        assert float(row["sampling/importance_sampling_ratio/mean"]) == pytest.approx(1.0, abs=1e-3)
        assert float(row["sampling/sampling_logp_difference/max"]) < 1e-3


def test_mixed_precision_trains_on_cpu(tiny_model, tmp_path):
    trainer, _, _ = fit(tiny_model, tmp_path, steps=1, trainer={"precision": "bf16-mixed"})
    assert trainer.global_step == 1
    assert trainer.lightning_module.policy.dtype == torch.float32


# A model of 64 dimensions moves a thousand times less per step than a real one, so these take a larger rate; the real
# model at 1e-6 is in tests/integration/test_real_server.py.


def test_an_engine_that_delivers_nothing_is_caught_at_the_first_sync(tiny_model, tmp_path):
    with pytest.raises(ReceiptError):
        fit(tiny_model, tmp_path, engine=TinyEngine(delivers=lambda name: False), lr=1e-3)


def test_a_head_that_is_left_behind_is_caught_at_the_first_sync(tiny_model, tmp_path):
    with pytest.raises(ReceiptError):
        fit(tiny_model, tmp_path, engine=TinyEngine(delivers=lambda name: name != "lm_head.weight"), lr=1e-3)


def test_a_correct_sync_at_a_tiny_learning_rate_is_not_suspected(tiny_model, tmp_path):
    trainer, _, _ = fit(tiny_model, tmp_path, lr=1e-6)
    assert trainer.global_step == 3


def test_epochs_are_passes_over_the_prompts(tiny_model, tmp_path):
    trainer, history, _ = fit(tiny_model, tmp_path, steps=-1, trainer={"max_epochs": 2})
    assert trainer.datamodule.ledger.epochs_done == 2
    names = [name for _, _, batch in history.steps for row in batch.rows for name in row.sample_ids]
    groups = {group for _, _, batch in history.steps for row in batch.rows for group in row.group_ids}
    assert (
        len(names) == len(set(names)) == 4 * len(groups)
    )  # each sample once, whole groups (the rest had equal rewards)
    assert trainer.global_step == -(-len(names) // 8)  # every step is full but the last


def test_groups_of_equal_rewards_are_dropped_and_end_the_epoch(tiny_model, tmp_path):
    """Case 2: nothing to learn from, so no step is taken and no weight moves."""
    before = PolicyModule(tiny_model)
    before.configure_model()
    trainer, history, _ = fit(tiny_model, tmp_path, rewards=[always_half], steps=-1, trainer={"max_epochs": 1})
    assert history.steps == [] and trainer.global_step == 0
    assert trainer.datamodule.ledger.epochs_done == 1
    after = trainer.lightning_module.policy.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.policy.state_dict().items())


def test_held_out_prompts_are_sampled_before_and_after(tiny_model, tmp_path, capsys):
    extra = [callbacks.RunReport(plot=True), callbacks.Export()]
    fit(tiny_model, tmp_path, eval=PROMPTS[:2], num_generations_eval=2, extra=extra)
    held_out = [float(row["eval/heldout/reward"]) for row in read_csv(tmp_path) if row.get("eval/heldout/reward")]
    assert len(held_out) == 2
    assert (tmp_path / "reward.png").stat().st_size > 1000
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["steps"] == 3
    assert [last["heldout_before"], last["heldout_after"]] == pytest.approx(held_out)
    assert last["model_dir"] == str(tmp_path / "model") and (tmp_path / "model" / "model.safetensors").exists()
    assert last["wandb_dir"] is None


def test_the_exported_model_is_the_trained_policy(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer, _, _ = fit(tiny_model, tmp_path, steps=2, extra=[callbacks.Export()])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    policy = trainer.lightning_module.policy.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in policy.items())


def read_csv(folder):
    import csv

    (path,) = folder.rglob("metrics.csv")
    with path.open() as lines:
        yield from csv.DictReader(lines)
