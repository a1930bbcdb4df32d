from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig

from lit_rl.errors import PackingError, SettingsError
from lit_rl.packing.trie import pack
from lit_rl.policy.tree_attention import kernels, registry
from lit_rl.policy.tree_attention.cascade import Costs, blocks
from lit_rl.policy.tree_attention.cpu import attend, cpu_attention
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.policy.tree_attention.registry import require_backend, resolve_attention
from lit_rl.types import Sample
from tests.fakes.attention_kernel import DenseKernel
from tests.fakes.samples import forests, group_of, sample

FREE_CALLS = Costs(call=0, merge=0, merge_row=0, piece=1)
"""Nothing is joined: every segment gets a call of its own."""


def operands(tokens: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(1, tokens, h, 8, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads))
    query, key, value = (tensor.transpose(1, 2).requires_grad_() for tensor in made)
    return query, key, value


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def test_a_token_sees_itself_and_what_is_above_it() -> None:
    plan = TreePlan(pack([sample([1, 2, 4, 5]), sample([1, 2, 3]), sample([9])]).tree)
    assert plan.mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],  # the token 3 does not see its siblings 4 and 5
        [0, 0, 0, 0, 0, 1],  # another root
    ]


def test_a_sliding_window_counts_depth_not_places() -> None:
    plan = TreePlan(pack([sample([1, 2, 4, 5]), sample([1, 2, 3])]).tree)
    assert plan.mask(window=2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 1, 0, 0, 1],  # the parent of 3 is three places away and one level up
    ]


@pytest.mark.parametrize("costs", [Costs(), FREE_CALLS], ids=["joined", "a call each"])
@settings(max_examples=60, deadline=None)
@given(samples=forests(), window=st.none() | st.integers(1, 6))
def test_the_cascade_gives_outputs_and_gradients_of_the_dense_mask(
    costs: Costs, samples: list[Sample], window: int | None
) -> None:
    plan = TreePlan(pack(samples).tree)
    inputs = operands(plan.num_tokens)
    ours = attend(*inputs, blocks(plan, plan.binding(window), torch.float64, costs), 8**-0.5)
    theirs = by_hand(*inputs, plan.mask(window))
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)

    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for our, their in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(samples=forests(), window=st.none() | st.integers(1, 6), joined=st.booleans())
def test_the_calls_cover_every_pair_once(samples: list[Sample], window: int | None, joined: bool) -> None:
    plan = TreePlan(pack(samples).tree)
    count = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.int64)
    for block in blocks(plan, plan.binding(window), torch.float32, Costs() if joined else FREE_CALLS):
        size, own = block.cover - block.begin, block.end - block.begin
        causal = torch.ones(size, own, dtype=torch.bool).tril()
        count[block.begin : block.cover, block.begin : block.end] += causal if block.mask is None else block.mask == 0
    assert torch.equal(count, plan.mask(window).long())


def test_a_segment_costs_one_call_where_segments_are_long() -> None:
    plan = TreePlan(pack(group_of(8, prompt=256, completion=96)).tree)
    calls = blocks(plan, None, torch.float32)
    assert [(c.begin, c.end, c.cover) for c in calls[:2]] == [(0, 256, 1024), (256, 352, 352)]
    assert len(calls) == 9
    assert all(c.mask is None for c in calls)


def test_small_siblings_share_a_call() -> None:
    plan = TreePlan(pack(group_of(8, prompt=40, completion=10)).tree)
    assert len(blocks(plan, None, torch.float32)) < 5


def test_a_window_cuts_the_pairs_of_a_long_sample() -> None:
    """1,000 tokens under a window of 100: each piece of 128 keys is seen by at most 228 queries."""
    plan = TreePlan(pack([sample(list(range(1000)))]).tree)
    calls = blocks(plan, 100, torch.float32)
    assert sum((c.cover - c.begin) * (c.end - c.begin) for c in calls) < 1000 * 230


@pytest.mark.parametrize("attention", [reference_attention, cpu_attention])
def test_a_row_too_deep_for_the_cut_is_still_exact(attention: object) -> None:
    """A window of 40 in samples of 300 tokens, with branches that outlive it."""
    plan = TreePlan(pack(group_of(3, prompt=150, completion=150)).tree)
    inputs = operands(plan.num_tokens)
    output, _ = attention(nn.Identity(), *inputs, None, sliding_window=40, tree=plan)  # type: ignore[operator]
    torch.testing.assert_close(output.transpose(1, 2), by_hand(*inputs, plan.mask(40)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("attention", [reference_attention, cpu_attention])
@settings(max_examples=40, deadline=None)
@given(samples=forests(), window=st.none() | st.integers(1, 6), data=st.data())
def test_another_token_moves_what_sees_it_and_nothing_else_by_a_bit(
    attention: Callable[..., tuple[Tensor, None]], samples: list[Sample], window: int | None, data: st.DataObject
) -> None:
    plan = TreePlan(pack(samples).tree)
    query, key, value = (tensor.detach() for tensor in operands(plan.num_tokens))
    before, _ = attention(nn.Identity(), query, key, value, None, sliding_window=window, tree=plan)
    place = data.draw(st.integers(0, plan.num_tokens - 1))
    key[:, :, place] += 3.0
    value[:, :, place] -= 2.0
    after, _ = attention(nn.Identity(), query, key, value, None, sliding_window=window, tree=plan)
    moved = (before != after).any(-1).any(-1)[0]
    assert torch.equal(moved, plan.mask(window)[:, place])


def test_capped_scores_are_refused_on_cpu_by_name() -> None:
    plan = TreePlan(pack([sample([1, 2])]).tree)
    with pytest.raises(SettingsError, match=r"model\.attention = 'cpu'.*reference"):
        cpu_attention(nn.Identity(), *operands(2), None, softcap=50.0, tree=plan)


def test_a_model_called_without_a_row_says_so() -> None:
    with pytest.raises(PackingError, match="score_row"):
        cpu_attention(nn.Identity(), *operands(2), None)


def test_auto_means_the_cascade_on_cpu_and_the_dense_mask_where_no_other_backend_runs() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2)
    assert resolve_attention("auto", "cpu", config) == "lit_rl_tree_cpu"
    assert resolve_attention("auto", "cpu", Gemma2Config()) == "lit_rl_tree_reference"  # it caps scores
    assert resolve_attention("auto", "cpu", DeepseekV3Config()) == "lit_rl_tree_reference"  # keys 192 wide, values 128
    assert resolve_attention("auto", "mps", config) == "lit_rl_tree_reference"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flash", "cpu", r"model\.attention = 'flash'.*auto or one of cpu, flex, reference, varlen"),
        ("cpu", "cuda", "runs on CPU only"),
        ("varlen", "cpu", "runs on GPUs of NVIDIA and AMD.*use model.attention=auto"),
        ("flex", "cpu", "no backward on CPU; use auto or cpu"),
        ("flex", "cuda", "compiled with triton, which is not installed; use reference"),
    ],
)
def test_a_backend_that_does_not_run_here_is_refused_by_name(name: str, device: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        require_backend(name, device)
    with pytest.raises(SettingsError, match=message):
        resolve_attention(name, device, LlamaConfig())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 whose FlashAttention-3 is at hand."""
    kernel = DenseKernel()
    kernel.dtypes = (torch.bfloat16, torch.float16)
    monkeypatch.setattr(registry, "machine_of", lambda device: kernels.Machine("nvidia", (9, 0)))
    monkeypatch.setattr(kernels, "kernel_for", lambda device, needs: kernel)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.bfloat16, "varlen"), (torch.float32, "flex"), (torch.float64, "reference")]
)
def test_auto_on_a_gpu_is_the_fastest_backend_for_the_type_that_is_computed_in(
    hopper: None, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, backend: str
) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2)
    assert resolve_attention("auto", "cuda", config, dtype) == f"lit_rl_tree_{backend}"
    assert ("trainer.precision" in caplog.text) == (backend != "varlen")  # says what would make it faster


def test_under_autocast_rotated_queries_and_keys_are_brought_to_the_type_of_the_values() -> None:
    plan = TreePlan(pack([sample([1, 2, 4, 5]), sample([1, 2, 3])]).tree)
    query, key, value = (tensor.detach().float() for tensor in operands(5))
    exact, _ = reference_attention(nn.Module(), query, key, value, None, tree=plan)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = cpu_attention(nn.Module(), query, key, value.bfloat16(), None, tree=plan)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=3e-2, rtol=0)


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "message"),
    [
        ("flex", 8, torch.float32, "heads of 16 and wider, this model's are 8"),
        ("flex", 64, torch.float64, "no float64; use reference"),
        ("varlen", 64, torch.float32, r"takes bfloat16 and float16.*trainer\.precision=bf16-mixed"),
    ],
)
def test_a_backend_that_cannot_run_the_model_is_refused_by_name(
    hopper: None, name: str, head_dim: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_attention(name, "cuda", LlamaConfig(head_dim=head_dim), dtype)
