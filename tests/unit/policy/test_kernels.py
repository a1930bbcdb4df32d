"""Which flash kernel runs where, and that each is called as its own signature says; no GPU is asked."""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, Qwen3Config

from lit_rl.errors import SettingsError
from lit_rl.packing.trie import pack
from lit_rl.policy.tree_attention import adapters, kernels
from lit_rl.policy.tree_attention.adapters import (
    Aiter,
    AttentionKernel,
    Call,
    CoreTorch,
    FlashAttention3,
    FlashAttention4,
    KernelMissing,
)
from lit_rl.policy.tree_attention.chains import entries_of
from lit_rl.policy.tree_attention.kernels import (
    AITER,
    FA3,
    FA4,
    TORCH,
    Kind,
    Machine,
    Needs,
    choose,
    kernel_on,
    load,
    require_kernel,
)
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.policy.tree_attention.varlen import varlen_backend
from tests.fakes.attention_kernel import DenseKernel
from tests.fakes.hub_kernels import MODULES, RECORD
from tests.fakes.samples import sample

HOPPER, BLACKWELL, THOR = Machine("nvidia", (9, 0)), Machine("nvidia", (10, 0)), Machine("nvidia", (11, 0))
AMPERE, ADA, GEFORCE = Machine("nvidia", (8, 0)), Machine("nvidia", (8, 9)), Machine("nvidia", (12, 0))
MI300 = Machine("amd", arch="gfx942")
PLAIN = Needs(128, 128)

# the choice


@pytest.mark.parametrize(
    ("machine", "needs", "missing", "kind"),
    [
        (HOPPER, PLAIN, (), FA3),
        (HOPPER, Needs(256, 256), (), FA3),
        (HOPPER, Needs(128, 128, softcap=True), (), FA3),
        (HOPPER, Needs(192, 192, deterministic=True), (), FA3),
        (HOPPER, Needs(256, 256, deterministic=True), (), TORCH),  # its backward of that width adds atomically
        (HOPPER, PLAIN, ("flash-attn3",), TORCH),
        (BLACKWELL, PLAIN, (), FA4),
        (Machine("nvidia", (10, 3)), PLAIN, (), FA4),
        (THOR, PLAIN, (), FA4),
        (BLACKWELL, PLAIN, ("flash-attn4",), TORCH),
        (BLACKWELL, Needs(256, 256), (), TORCH),
        (AMPERE, PLAIN, (), TORCH),
        (AMPERE, Needs(256, 256), (), TORCH),
        (AMPERE, Needs(224, 224), (), TORCH),
        (ADA, Needs(256, 256), (), TORCH),
        (GEFORCE, PLAIN, (), TORCH),
        (MI300, PLAIN, (), AITER),
        (Machine("amd", arch="gfx1151"), Needs(64, 64), (), AITER),
    ],
)
def test_each_machine_gets_its_best_kernel(
    machine: Machine, needs: Needs, missing: tuple[str, ...], kind: Kind
) -> None:
    assert choose(machine, needs, dict.fromkeys(missing, "no hub")) is kind


@pytest.mark.parametrize(
    ("machine", "needs", "missing", "message"),
    [
        (BLACKWELL, Needs(128, 128, True), (), r"flash-attn4 cannot cap scores.*torch cannot cap.*attention=flex"),
        (AMPERE, Needs(128, 128, True), (), r"torch cannot cap scores as this model does\. use model\.attention=flex"),
        (MI300, Needs(128, 128, True), (), "aiter-flash-attn cannot cap scores"),
        (HOPPER, Needs(128, 128, True), ("flash-attn3",), r"flash-attn3 could not be had \(no hub\).*install 'lit_rl"),
        (HOPPER, Needs(256, 256, True, True), (), r"flash-attn3 has no deterministic backward for heads 256.*=flex"),
        (HOPPER, Needs(288, 288), (), "flash-attn3 takes heads up to 256 wide, and this model's are 288"),
        (AMPERE, Needs(100, 100), (), "head widths that 8 divides, and this model's is 100"),
        (ADA, Needs(200, 200), (), "torch has no backward for heads 200 wide on this GPU"),
        (GEFORCE, Needs(224, 224), (), "torch has no backward for heads 224 wide on this GPU"),
        (HOPPER, Needs(192, 128), (), r"keys \(192\) and values \(128\) of one width"),
        (MI300, PLAIN, ("aiter-flash-attn",), r"aiter-flash-attn could not be had \(no hub\).*LOCAL_KERNELS=.*flex"),
        (Machine("amd", arch="gfx90a"), PLAIN, (), r"gfx942.*and this GPU is gfx90a; use model\.attention=flex"),
        (Machine("nvidia", (7, 5)), PLAIN, (), r"compute capability 7\.5; use model\.attention=flex"),
        (Machine("cpu"), PLAIN, (), r"the model is on cpu; use model\.attention=auto"),
        (Machine("mps"), PLAIN, (), r"the model is on mps; use model\.attention=auto"),
    ],
)
def test_what_no_kernel_does_is_refused_by_name(
    machine: Machine, needs: Needs, missing: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        choose(machine, needs, dict.fromkeys(missing, "no hub"))
    assert str(refused.value).startswith("model.attention = 'varlen'")


def loader_without(*absent: Kind) -> Any:
    def loading(kind: Kind) -> AttentionKernel:
        if kind in absent:
            raise KernelMissing("OSError: no route to the hub")
        return DenseKernel()

    return loading


def test_a_hopper_without_the_hub_runs_on_torch_and_says_what_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kernel_on(HOPPER, PLAIN, loader_without(FA3))
    [line] = caplog.messages
    assert "runs on torch's kernel: the faster flash-attn3 could not be had (OSError: no route to the hub)" in line
    assert "install 'lit_rl[kernels]'" in line and "get_kernel('kernels-community/flash-attn3', version=1)" in line


def test_one_rank_of_a_machine_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    kernel_on(HOPPER, PLAIN, loader_without(FA3))
    assert not caplog.messages


def test_the_best_kernel_is_nothing_to_speak_of(caplog: pytest.LogCaptureFixture) -> None:
    kernel_on(HOPPER, PLAIN, loader_without())
    assert not caplog.messages


def test_rocm_without_the_hub_is_an_error_that_says_how() -> None:
    with pytest.raises(SettingsError, match=r"no route to the hub.*LOCAL_KERNELS=kernels-community/aiter-flash-attn="):
        kernel_on(MI300, PLAIN, loader_without(AITER))


# loading


def hub(monkeypatch: pytest.MonkeyPatch, get_kernel: Any) -> None:
    fake = ModuleType("kernels")
    fake.get_kernel = get_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", fake)
    monkeypatch.setattr(kernels, "reach_hub", lambda address: None)


@pytest.mark.parametrize(
    ("kind", "repo", "version"),
    [
        (FA3, "kernels-community/flash-attn3", 1),
        (FA4, "kernels-community/flash-attn4", 0),
        (AITER, "kernels-community/aiter-flash-attn", 2),
    ],
)
def test_a_kernel_of_the_hub_is_asked_for_in_one_version(
    kind: Kind, repo: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def get_kernel(repo_id: str, *, revision: str | None = None, version: int | None = None) -> Any:
        asked.append((repo_id, version or 0))
        return MODULES[kind.name]

    hub(monkeypatch, get_kernel)
    assert load(kind).name == kind.name
    assert asked == [(repo, version)]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("Version 1 is not in the cache."), "ValueError: Version 1 is not in the cache"),
        (FileNotFoundError("no build"), "FileNotFoundError: no build"),
        (ImportError("no cutlass"), "ImportError: no cutlass"),
        (httpx2.ConnectError("connection reset"), "ConnectError: connection reset"),  # no OSError
    ],
)
def test_why_the_hub_gave_nothing_is_kept(raised: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_kernel(repo_id: str, **_: Any) -> Any:
        raise raised

    hub(monkeypatch, get_kernel)
    with pytest.raises(KernelMissing) as missing:
        load(FA3)
    assert str(missing.value) == told


@pytest.mark.parametrize(("local", "asked"), [("", 0), ("kernels-community/flash-attn3=/somewhere", 1)])
def test_a_hub_that_does_not_answer_is_told_at_once_but_for_a_kernel_that_is_here(
    monkeypatch: pytest.MonkeyPatch, local: str, asked: int
) -> None:
    calls: list[str] = []

    def get_kernel(repo_id: str, **_: Any) -> Any:
        calls.append(repo_id)
        raise ValueError("this is what the kernels package says")

    def unreachable(address: str) -> None:
        raise OSError("no route to the hub")

    hub(monkeypatch, get_kernel)
    monkeypatch.setattr(kernels, "reach_hub", unreachable)
    monkeypatch.setenv("LOCAL_KERNELS", local)
    with pytest.raises(KernelMissing, match="package says" if asked else "OSError: no route to the hub"):
        load(FA3)
    assert len(calls) == asked


def test_without_the_kernels_package_the_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(KernelMissing, match=r"ModuleNotFoundError.*kernels"):
        load(FA3)


def test_a_build_with_another_function_is_missing_not_called_wrongly() -> None:
    def renamed(q: Tensor, k: Tensor, v: Tensor) -> None: ...

    with pytest.raises(KernelMissing, match=r"no flash_attn_interface\._flash_attn_forward"):
        FlashAttention3(SimpleNamespace())
    interface = SimpleNamespace(_flash_attn_forward=renamed, _flash_attn_backward=renamed)
    with pytest.raises(KernelMissing, match=r"_flash_attn_forward of the build .* takes no cu_seqlens_q, cu_seqlens_k"):
        FlashAttention3(SimpleNamespace(flash_attn_interface=interface))


def test_an_operator_that_wraps_its_function_shows_its_arguments() -> None:
    """torch.library.custom_op, which FlashAttention-3 uses, hides the signature behind (*args, **kwargs)."""

    @torch.library.custom_op("lit_rl_test::takes", mutates_args=())
    def operator(q: Tensor) -> Tensor:
        return q.clone()

    assert adapters._function(SimpleNamespace(f=operator), "f", "q") is operator
    with pytest.raises(KernelMissing, match="takes no k"):
        adapters._function(SimpleNamespace(f=operator), "f", "q k")


# each kernel's own signature

ADAPTERS: dict[str, Any] = {
    "flash-attn3": FlashAttention3,
    "flash-attn4": FlashAttention4,
    "aiter-flash-attn": Aiter,
    "torch": CoreTorch,
}


def adapted(name: str) -> AttentionKernel:
    kernel = ADAPTERS[name](MODULES[name])
    kernel.dtypes = (torch.float64,)  # the modules compute densely: exact
    return kernel


def forked() -> tuple[TreePlan, tuple[Tensor, Tensor, Tensor]]:
    """Five tokens before a fork; a row of 11 places, 2 chains, 17 keys. Four query heads over two key heads."""
    plan = TreePlan(pack([sample([1, 2, 3, 4, 5, 6, 7, 8, 9]), sample([1, 2, 3, 4, 5, 6, 10, 11])]).tree)
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, 11, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    query, key, value = (tensor.transpose(1, 2).requires_grad_() for tensor in made)
    return plan, (query, key, value)


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name", ADAPTERS)
def test_each_kernel_gives_what_the_dense_mask_gives(name: str, softcap: float | None, window: int | None) -> None:
    plan, (query, key, value) = forked()
    kernel = adapted(name)
    backend = varlen_backend(lambda device, needs: kernel)
    options: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "tree": plan, "scaling": 0.3}
    if softcap is not None and name != "flash-attn3":
        with pytest.raises(SettingsError, match=rf"{name} cannot cap scores; use model\.attention=flex"):
            backend(nn.Identity(), query, key, value, None, **options)
        return
    ours, _ = backend(nn.Identity(), query, key, value, None, **options)
    theirs, _ = reference_attention(nn.Identity(), query, key, value, None, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    found = torch.autograd.grad((ours * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((theirs * weights).sum(), (query, key, value))
    for our, their in zip(found, wanted, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        (
            "flash-attn3",
            {"q": (11, 4, 8), "k": (17, 2, 8), "cu_seqlens_k": (3,), "max_seqlen_q": 9, "max_seqlen_k": 9},
            {"dout": (11, 4, 8), "softmax_lse": (4, 11), "dk": (17, 2, 8), "max_seqlen_k": 9, "deterministic": True},
        ),
        (
            "flash-attn4",
            {"q": (11, 4, 8), "v": (17, 2, 8), "cu_seqlens_q": (3,), "max_seqlen_q": 9, "window_size_left": None},
            {"dout": (11, 4, 8), "lse": (4, 11), "k": (17, 2, 8), "max_seqlen_k": 9, "deterministic": True},
        ),
        (
            "aiter-flash-attn",
            {"q": (11, 4, 8), "k": (17, 2, 8), "window_size_left": -1, "max_seqlen_k": 9, "return_lse": True},
            {"do": (11, 4, 8), "softmax_lse": (11, 4), "dv": (17, 2, 8), "sliding_window": 0, "max_seqlen_q": 9},
        ),
        (
            "torch",
            {"query": (11, 4, 8), "key": (17, 2, 8), "cu_seq_k": (3,), "max_q": 9, "window_size": [-1, 0]},
            {"grad_out": (11, 4, 8), "lse": (4, 11), "value": (17, 2, 8), "max_k": 9, "rng_state": (2,)},
        ),
    ],
)
def test_each_kernel_is_told_shapes_lengths_and_determinism(
    name: str, forward: dict[str, Any], backward: dict[str, Any]
) -> None:
    plan, operands = forked()
    query, keys, values = (tensor.detach()[0].transpose(0, 1).contiguous() for tensor in operands)
    call = Call(entries_of(plan), scale=0.3)
    places = call.entries.key_places
    assert places is not None
    keys, values = keys[places], values[places]
    kernel = adapted(name)
    output, normaliser = kernel.forward(query, keys, values, call)
    gradients = kernel.backward(output, query, keys, values, output, normaliser, call, deterministic=True)
    assert [tuple(gradient.shape) for gradient in gradients] == [(11, 4, 8), (17, 2, 8), (17, 2, 8)]
    for told, expected in ((RECORD.calls["forward"], forward), (RECORD.calls["backward"], backward)):
        assert {key: told[key] for key in expected} == expected


def test_the_modules_of_torch_have_the_signatures_of_torch() -> None:
    ops = load(TORCH)
    assert isinstance(ops, CoreTorch)
    for name in ("_varlen_attn", "_varlen_attn_backward"):
        real = [argument.name for argument in getattr(torch.ops.torch_attn, name).default._schema.arguments]
        assert real == list(inspect.signature(getattr(MODULES["torch"], name)).parameters)


@pytest.mark.parametrize("window", [None, 4])
def test_the_operators_of_torch_take_the_call(window: int | None) -> None:
    """On torch's meta device, which knows shapes alone."""
    plan, _ = forked()
    entries = entries_of(plan, window)
    assert entries.key_places is not None
    query, keys = torch.empty(11, 4, 8, device="meta"), torch.empty(len(entries.key_places), 2, 8, device="meta")
    on_meta = entries._replace(
        cu_seqlens_q=entries.cu_seqlens_q.to("meta"), cu_seqlens_k=entries.cu_seqlens_k.to("meta")
    )
    kernel, call = load(TORCH), Call(on_meta, scale=0.3, window=window)
    output, normaliser = kernel.forward(query, keys, keys, call)
    assert output.shape == (11, 4, 8) and normaliser.shape == (4, 11)
    gradients = kernel.backward(output, query, keys, keys, output, normaliser, call, deterministic=False)
    assert [gradient.shape for gradient in gradients] == [query.shape, keys.shape, keys.shape]


def test_aiter_has_no_window_of_one_token() -> None:
    plan, operands = forked()
    with pytest.raises(SettingsError, match=r"no sliding window of 1 token; use model\.attention=flex"):
        varlen_backend(lambda device, needs: adapted("aiter-flash-attn"))(
            nn.Identity(), *operands, None, sliding_window=1, tree=plan
        )


# what is checked before training


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> list[Needs]:
    asked: list[Needs] = []

    def find(device: torch.device, needs: Needs) -> AttentionKernel:
        asked.append(needs)
        return FlashAttention3(MODULES["flash-attn3"])

    monkeypatch.setattr(kernels, "kernel_for", find)
    return asked


def test_a_configuration_says_what_its_attention_needs(on_a_hopper: list[Needs]) -> None:
    require_kernel("cuda", Qwen3Config(head_dim=128))
    require_kernel("cuda", LlamaConfig(hidden_size=512, num_attention_heads=8))
    require_kernel("cuda", Gemma2Config(head_dim=256, attn_logit_softcapping=50.0))
    require_kernel("cuda", DeepseekV3Config())
    assert on_a_hopper == [Needs(128, 128), Needs(64, 64), Needs(256, 256, True), Needs(192, 128)]


def test_deterministic_training_asks_for_a_deterministic_kernel(on_a_hopper: list[Needs]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        require_kernel("cuda", Qwen3Config(head_dim=128))
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_a_hopper == [Needs(128, 128, deterministic=True)]


def test_float32_is_refused_before_training(on_a_hopper: list[Needs]) -> None:
    require_kernel("cuda", Qwen3Config(), torch.bfloat16)
    with pytest.raises(SettingsError, match=r"flash-attn3 takes .* float32; give trainer\.precision=bf16-mixed"):
        require_kernel("cuda", Qwen3Config(), torch.float32)


def test_a_model_on_a_cpu_is_refused_before_training() -> None:
    with pytest.raises(SettingsError, match="the model is on cpu"):
        require_kernel("cpu", Qwen3Config())
