"""The varlen backend without a GPU: its index arithmetic, and its results through a dense stand-in for the kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from lit_rl.errors import PackingError, SettingsError
from lit_rl.packing.trie import pack
from lit_rl.policy.forward import score_row
from lit_rl.policy.tree_attention import varlen
from lit_rl.policy.tree_attention.chains import entries_of
from lit_rl.policy.tree_attention.kernels import Needs
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.policy.tree_attention.varlen import summed, varlen_backend
from lit_rl.types import Sample
from tests.fakes.attention_kernel import DenseKernel, seen
from tests.fakes.policies import furthest, gradients, scored_alone, tiny_model, tiny_policy
from tests.fakes.samples import forests, group_of, sample

WINDOWS = st.none() | st.integers(1, 6)


def planned(*tokens: list[int]) -> TreePlan:
    return TreePlan(pack([sample(one) for one in tokens]).tree)


def key_places(plan: TreePlan, window: int | None = None) -> list[int]:
    entries = entries_of(plan, window)
    return list(range(plan.num_tokens)) if entries.key_places is None else entries.key_places.tolist()


# the entries


def test_a_chain_goes_down_first_children_and_its_keys_are_the_way_from_the_root() -> None:
    plan = planned([1, 2, 4, 5], [1, 2, 3])  # laid out as 1 2 4 5 | 3
    entries = entries_of(plan)
    assert entries.cu_seqlens_q.tolist() == [0, 4, 5]
    assert entries.cu_seqlens_k.tolist() == [0, 4, 7]
    assert key_places(plan) == [0, 1, 2, 3, 0, 1, 4]
    assert (entries.max_q, entries.max_k) == (4, 4)
    assert entries.cu_seqlens_q.dtype == entries.cu_seqlens_k.dtype == torch.int32


def test_samples_that_share_nothing_are_not_gathered() -> None:
    plan = planned([1, 2], [3, 4, 5], [6])
    entries = entries_of(plan)
    assert entries.key_places is None
    assert entries.cu_seqlens_k.tolist() == entries.cu_seqlens_q.tolist() == [0, 2, 5, 6]


def test_a_window_leaves_out_ancestors_that_no_query_of_a_chain_sees() -> None:
    plan = planned([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7])
    assert key_places(plan, window=3) == [0, 1, 2, 3, 4, 5, 2, 3, 6]


def test_layers_share_the_entries_of_a_row() -> None:
    plan = planned([1, 2, 3], [1, 2, 4])
    assert entries_of(plan) is entries_of(plan) is entries_of(plan, window=100)
    assert entries_of(plan, window=2) is not entries_of(plan)


@settings(max_examples=150, deadline=None)
@given(samples=forests(), window=WINDOWS)
def test_entries_tile_the_row_and_see_what_the_dense_mask_sees(samples: list[Sample], window: int | None) -> None:
    plan = TreePlan(pack(samples).tree)
    entries, places = entries_of(plan, window), torch.tensor(key_places(plan, window))
    q, k = entries.cu_seqlens_q.tolist(), entries.cu_seqlens_k.tolist()
    assert q[0] == k[0] == 0 and q[-1] == plan.num_tokens and k[-1] == len(places)
    assert all(begin < end for begin, end in pairwise(q))
    found = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.bool)
    for entry in range(len(q) - 1):
        among = places[k[entry] : k[entry + 1]]
        assert len(set(among.tolist())) == len(among)
        visible = seen(q[entry + 1] - q[entry], len(among), None if window is None else window - 1)
        found[q[entry] : q[entry + 1]] = found[q[entry] : q[entry + 1]].index_copy(1, among, visible)
    assert torch.equal(found, plan.mask(window))
    assert entries.max_q == max(end - begin for begin, end in pairwise(q))
    assert entries.max_k == max(end - begin for begin, end in pairwise(k))


@settings(max_examples=100, deadline=None)
@given(samples=forests(), window=WINDOWS)
def test_never_more_keys_are_gathered_than_there_are_raw_tokens(samples: list[Sample], window: int | None) -> None:
    row = pack(samples)
    plan = TreePlan(row.tree)
    raw = sum(len(one.sequence.token_ids) for one in samples)
    leaves = sorted(set(range(len(row.tree.segment_parents))) - set(row.tree.segment_parents.tolist()))
    paths = [int(row.tree.position_ids[row.tree.segment_starts[leaf + 1] - 1]) + 1 for leaf in leaves]
    assert len(key_places(plan)) == sum(paths) <= raw
    assert len(key_places(plan, window)) <= sum(paths)


@pytest.mark.parametrize(
    ("samples", "keys"), [(group_of(8, 1000, 1000), 16_000), (group_of(8, 16_000, 500), 132_000)], ids=["1k", "16k"]
)
def test_a_group_gathers_as_many_keys_as_it_has_raw_tokens(samples: list[Sample], keys: int) -> None:
    assert len(key_places(TreePlan(pack(samples).tree))) == keys


# outputs and gradients


def operands(
    tokens: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(1, tokens, h, 8, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads))
    query, key, value = (tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in made)
    return query, key, value


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@settings(max_examples=40, deadline=None)
@given(samples=forests(), window=WINDOWS, softcap=st.none() | st.just(1.5), scaling=st.none() | st.just(0.2))
def test_outputs_and_gradients_are_those_of_the_dense_mask(
    heads: int, kv_heads: int, samples: list[Sample], window: int | None, softcap: float | None, scaling: float | None
) -> None:
    plan = TreePlan(pack(samples).tree)
    inputs = operands(plan.num_tokens, heads, kv_heads)
    backend = varlen_backend(lambda device, needs: DenseKernel())
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": window, "softcap": softcap, "tree": plan}
    ours, _ = backend(nn.Identity(), *inputs, None, **options)
    theirs, _ = reference_attention(nn.Identity(), *inputs, None, **options)
    assert ours.shape == (1, plan.num_tokens, heads, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    for our, their in zip(found, torch.autograd.grad((theirs * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("copies", [8, 32, 128])
def test_gradients_of_shared_keys_are_off_by_one_rounding_however_many_share_them(copies: int) -> None:
    """The kernel gives each copy's gradient in bfloat16; summed in bfloat16 too, 128 copies would be off by 1.4e-2."""
    plan = TreePlan(pack(group_of(copies, prompt=24, completion=4)).tree)
    exact = operands(plan.num_tokens, 4, 2, torch.bfloat16)
    inputs = [tensor.detach().double().requires_grad_() for tensor in exact]
    backend = varlen_backend(lambda device, needs: DenseKernel())
    weights = torch.randn(1, plan.num_tokens, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, wanted = (
        torch.autograd.grad(backend(nn.Identity(), *given, None, tree=plan)[0], given, weights.to(given[0].dtype))
        for given in (exact, inputs)
    )
    for our, their in zip(found[1:], wanted[1:], strict=True):
        assert our.dtype == torch.bfloat16
        error = (our.double() - their)[:, :, :24].norm() / their[:, :, :24].norm()
        assert 5e-4 < error < 4e-3


def test_copies_are_added_up_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "ROWS_AT_ONCE", 2)
    copies = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    assert summed(copies, torch.tensor([0, 2, 0, 2, 1]), 3).tolist() == [[5.0], [16.0], [10.0]]


def test_small_copies_are_not_lost_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which has eight bits, one plus 1/512 is one, however often it is added."""
    monkeypatch.setattr(varlen, "ROWS_AT_ONCE", 1)
    copies = torch.tensor([1.0] + [1 / 512] * 128).bfloat16()
    assert summed(copies, torch.zeros(129, dtype=torch.int64), 1).tolist() == [1.25]


def test_float64_stays_float64() -> None:
    copies = torch.tensor([1.0, 1e-12], dtype=torch.float64)
    assert summed(copies, torch.tensor([0, 0]), 1).tolist() == [1.0 + 1e-12]


# what is handed on, what is kept, what is refused


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def backward_of_a_fork(kernel: DenseKernel) -> None:
    plan = planned([1, 2, 3], [1, 2, 4])
    output, _ = varlen_backend(lambda device, needs: kernel)(nn.Identity(), *operands(4, 4, 2), None, tree=plan)
    output.sum().backward()


def test_the_kernel_is_told_to_be_deterministic(deterministic: None) -> None:
    kernel = DenseKernel()
    backward_of_a_fork(kernel)
    assert kernel.deterministic == [True]


def test_the_kernel_is_free_otherwise() -> None:
    kernel = DenseKernel()
    backward_of_a_fork(kernel)
    assert kernel.deterministic == [False]


def test_no_copy_of_a_key_waits_for_the_backward() -> None:
    plan = TreePlan(pack(group_of(8, prompt=20, completion=2)).tree)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(len(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        varlen_backend(lambda device, needs: DenseKernel())(
            nn.Identity(), *operands(plan.num_tokens, 4, 2), None, tree=plan
        )
    assert plan.num_tokens == 36 and len(key_places(plan)) == 176
    assert sorted(kept) == [4, 36, 36, 36, 36]  # queries, keys, values, output; the log-sum-exp is [heads, N]


def test_the_backend_asks_for_a_kernel_by_what_the_layer_needs() -> None:
    asked: list[tuple[str, Needs]] = []

    def find(device: torch.device, needs: Needs) -> DenseKernel:
        asked.append((device.type, needs))
        return DenseKernel()

    plan = planned([1, 2])
    varlen_backend(find)(nn.Identity(), *operands(2, 4, 2), None, softcap=30.0, tree=plan)
    varlen_backend(find)(nn.Identity(), *operands(2, 4, 2), None, tree=plan)
    assert asked == [("cpu", Needs(8, 8, True)), ("cpu", Needs(8, 8, False))]


def test_under_autocast_rotated_queries_and_keys_are_brought_to_the_type_of_the_values() -> None:
    plan = planned([1, 2, 4, 5], [1, 2, 3])
    query, key, value = (tensor.detach().float() for tensor in operands(5, 4, 2))
    exact, _ = reference_attention(nn.Module(), query, key, value, None, tree=plan)
    backend = varlen_backend(lambda device, needs: DenseKernel())
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = backend(nn.Module(), query, key, value.bfloat16(), None, tree=plan)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=3e-2, rtol=0)


def test_a_type_that_the_kernel_does_not_take_is_refused_with_the_remedy() -> None:
    kernel = DenseKernel()
    kernel.dtypes = (torch.bfloat16, torch.float16)
    with pytest.raises(
        SettingsError, match=r"float64; give trainer\.precision=bf16-mixed .*model\.attention=reference"
    ):
        backward_of_a_fork(kernel)


def test_a_model_called_without_a_row_says_so() -> None:
    with pytest.raises(PackingError, match="score_row"):
        varlen.varlen_attention(nn.Identity(), *operands(2, 4, 2), None)


def test_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"GPUs of NVIDIA and AMD, the model is on cpu; use model\.attention=auto"):
        varlen.varlen_attention(nn.Identity(), *operands(2, 4, 2), None, tree=planned([1, 2]))


# whole models


MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen3 with windows": (
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
}


@functools.cache
def policy(name: str, checkpointing: bool) -> PreTrainedModel:
    config, options = MODELS[name]
    model = tiny_policy(config, attention="reference", gradient_checkpointing=checkpointing, **options)
    AttentionInterface.register("varlen_stand_in", varlen_backend(lambda device, needs: DenseKernel()))
    model.set_attn_implementation("varlen_stand_in")
    return model


@functools.cache
def plain(name: str) -> PreTrainedModel:
    config, options = MODELS[name]
    return tiny_model(config, **options)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None)
@given(samples=forests(), checkpointing=st.booleans())
def test_a_packed_row_equals_its_samples_alone(name: str, samples: list[Sample], checkpointing: bool) -> None:
    model, alone = policy(name, checkpointing), plain(name)
    row = pack(samples)
    weights = torch.linspace(-1.0, 2.0, len(row.terms), dtype=torch.float64)
    packed = score_row(model, row)
    ours = gradients(model, (packed.logprobs * weights).sum())
    logprobs, entropy = scored_alone(alone, samples)
    torch.testing.assert_close(packed.logprobs, logprobs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(packed.entropy, entropy, rtol=1e-9, atol=1e-12)
    if len(row.terms):
        assert furthest(ours, gradients(alone, (logprobs * weights).sum())) < 1e-9


def test_a_layer_around_it_compiles_with_a_break() -> None:
    plan = planned([1, 2, 4, 5], [1, 2, 3])
    backend = torch.compiler.disable(varlen_backend(lambda device, needs: DenseKernel()))  # as it is registered

    def layer(query: Tensor, key: Tensor, value: Tensor, tree: TreePlan) -> Tensor:
        return backend(nn.Identity(), query * 2, key, value, None, tree=tree)[0] + 1

    inputs = operands(5, 4, 2)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    exact, found = (torch.autograd.grad(run(*inputs, plan).square().sum(), inputs) for run in (layer, compiled))
    for our, their in zip(found, exact, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)
