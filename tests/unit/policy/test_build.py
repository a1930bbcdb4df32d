from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from lit_rl.errors import SettingsError
from lit_rl.packing.trie import pack
from lit_rl.policy.build import build_policy, prepare_policy
from lit_rl.policy.checks import _compare
from lit_rl.policy.export import named_tensors, save_checkpoint, tensor_metadata
from lit_rl.policy.forward import score_row
from tests.fakes.policies import SIZES, scored_alone, tiny_model
from tests.fakes.samples import sample
from tests.fakes.tiny import tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_becomes_a_policy_that_scores_as_its_checkpoint_does(folder: Path) -> None:
    policy = build_policy(str(folder))
    assert policy.training and policy.is_gradient_checkpointing
    assert policy.dtype == torch.float32
    samples = [sample([1, 2, 3, 4]), sample([1, 2, 5])]
    expected, _ = scored_alone(AutoModelForCausalLM.from_pretrained(folder), samples)
    torch.testing.assert_close(score_row(policy, pack(samples)).logprobs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("missing", ["./no/such/model", "/nowhere/model", "one/two/three"])
def test_a_missing_folder_is_named_at_once(missing: str) -> None:
    with pytest.raises(SettingsError, match=rf"model\.pretrained = '{missing}': there is no such folder"):
        build_policy(missing)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config\.json"):
        build_policy(str(tmp_path))


def test_an_unreachable_hub_is_said_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client tries for half a minute; nobody listens on this port."""
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    started = time.monotonic()
    with pytest.raises(SettingsError, match=r"'someone/model'.*cannot be reached.*path of a folder"):
        build_policy("someone/model")
    assert time.monotonic() - started < 5


def test_a_hub_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match="HF_HUB_OFFLINE"):
        build_policy("someone/model")


def test_init_kwargs_that_have_a_key_of_their_own_are_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.init_kwargs.*model\.dtype"):
        build_policy(str(folder), init_kwargs={"dtype": "float16"})


def test_an_unknown_dtype_names_the_choices(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.dtype = 'fp32': give auto or one of float32"):
        build_policy(str(folder), dtype="fp32")


def test_a_tied_head_travels_under_its_own_name(folder: Path) -> None:
    policy = build_policy(str(folder))
    tensors = dict(named_tensors(policy))
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert not any(tensor.requires_grad for tensor in tensors.values())
    metadata = tensor_metadata(policy)
    assert [(info.name, info.dtype, info.shape) for info in metadata] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors(policy)
    ]


def test_fused_experts_travel_under_their_checkpoint_names() -> None:
    model = tiny_model(
        Qwen3MoeConfig, dtype=torch.float32, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8
    )
    names = {info.name for info in tensor_metadata(model)}
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_what_is_saved_loads_as_an_ordinary_model(folder: Path, tmp_path: Path) -> None:
    policy = build_policy(str(folder))
    with torch.no_grad():
        policy.get_input_embeddings().weight.add_(0.5)
    out = save_checkpoint(policy, tiny_tokenizer(), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded.get_output_embeddings().weight, policy.get_input_embeddings().weight)
    assert (out / "tokenizer.json").exists()
    assert list(out.glob("*.safetensors"))


def test_compiling_on_cpu_without_a_compiler_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SettingsError, match=r"model\.compile = True.*no-such-compiler.*give false"):
        build_policy(tiny_model(LlamaConfig), compile_layers=True)


def test_a_model_given_as_an_object_is_moved_to_where_it_will_run_before_its_attention_is_chosen() -> None:
    """A trainer moves its module only after the policy is made."""
    policy = build_policy(tiny_model(LlamaConfig), device="meta")
    assert policy.device.type == "meta"
    assert policy.config._attn_implementation == "lit_rl_tree_reference"
    with pytest.raises(SettingsError, match="runs on CPU only, the model is on meta"):
        build_policy(tiny_model(LlamaConfig), attention="cpu", device="meta")


@pytest.mark.parametrize("shared", [1, 70])
def test_the_probe_finds_a_leak_between_branches_behind_shared_parts_of_any_length(shared: int) -> None:
    model = prepare_policy(tiny_model(LlamaConfig, max_position_embeddings=256), attention="cpu")
    _compare(model, [1, 2] * shared, tolerance=1e-5)
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, output: output + output.cumsum(1))
    with pytest.raises(SettingsError, match="one branch reach another"):
        _compare(model, [1, 2] * shared, tolerance=1e-3)
