from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from lit_rl.errors import PackingError, SettingsError
from lit_rl.packing.trie import pack
from lit_rl.policy.tree_attention import flex
from lit_rl.policy.tree_attention.flex import attend, flex_tree_attention
from lit_rl.policy.tree_attention.flex_blocks import BLOCK, block_mask, classified
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.types import Sample
from tests.fakes.samples import forests, group_of, sample


def branching(tokens: int, *, seed: int = 0) -> TreePlan:
    """Two roots, branches at any depth: each sample grows out of a prefix of an earlier one; twice ``tokens`` or so."""
    random = np.random.default_rng(seed)
    grown = [[1, 2, 3], [4]]
    while sum(map(len, grown)) < 3 * tokens:
        parent = grown[random.integers(len(grown))]
        start = parent[: random.integers(1, len(parent) + 1)]
        grown.append(start + random.integers(0, 1000, random.integers(1, tokens // 4)).tolist())
    return TreePlan(pack([sample(each) for each in grown]).tree)


def operands(
    tokens: int, *, heads: int = 4, kv_heads: int = 2, width: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(1, tokens, h, width, generator=generator, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    query, key, value = (tensor.transpose(1, 2) for tensor in made)
    return 3 * query, key, value


def visible(plan: TreePlan, window: int | None, size: int) -> tuple[Tensor, Tensor]:
    """How many pairs of each block are visible, and how many there are, counted one by one."""
    counts, places = [], torch.arange(plan.num_tokens) // size
    for pairs in (plan.mask(window), torch.ones(plan.num_tokens, plan.num_tokens)):
        rows = torch.zeros(int(places[-1]) + 1, plan.num_tokens, dtype=torch.int64).index_add_(0, places, pairs.long())
        counts.append(rows.new_zeros(len(rows), len(rows)).index_add_(1, places, rows))
    return counts[0], counts[1]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_blocks_of_two_samples_that_part_in_the_middle() -> None:
    """Places 0 to 3 are shared, 4 to 6 and 7 to 9 are the branches; blocks of two."""
    plan = TreePlan(pack([sample([1, 2, 3, 4, 5, 6, 7]), sample([1, 2, 3, 4, 8, 9, 10])]).tree)
    partial, full = classified(plan, None, size=2)
    assert full.int().tolist() == [
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],  # places 6 and 7 belong to both branches: what is shared is seen by both
        [1, 1, 0, 0, 0],
    ]
    assert partial.int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],  # 8 and 9 see 7, not 6; nothing of the block before
    ]


@settings(max_examples=150, deadline=None)
@given(samples=forests(), size=st.integers(1, 5))
def test_without_a_window_blocks_are_told_apart_exactly(samples: list[Sample], size: int) -> None:
    plan = TreePlan(pack(samples).tree)
    partial, full = classified(plan, None, size)
    seen, pairs = visible(plan, None, size)
    assert torch.equal(full, seen == pairs)
    assert torch.equal(partial, (seen > 0) & (seen < pairs))


@settings(max_examples=150, deadline=None)
@given(samples=forests(), window=st.integers(1, 6), size=st.integers(1, 5))
def test_under_a_window_no_visible_pair_is_left_out_and_no_other_is_let_in(
    samples: list[Sample], window: int, size: int
) -> None:
    plan = TreePlan(pack(samples).tree)
    partial, full = classified(plan, window, size)
    seen, pairs = visible(plan, window, size)
    assert torch.equal(full, seen == pairs)
    assert bool((partial | full)[seen > 0].all())
    assert not bool((partial & full).any())


def test_a_window_leaves_out_blocks_that_are_too_far_up() -> None:
    """1,000 tokens in blocks of 10 under a window of 30: a block sees itself and parts of the three before it."""
    partial, full = classified(TreePlan(pack([sample(list(range(1000)))]).tree), 30, size=10)
    assert (partial | full).sum(1).tolist() == [1, 2, 3] + [4] * 97


@settings(max_examples=100, deadline=None)
@given(samples=forests(), window=st.none() | st.integers(1, 6), size=st.integers(1, 5))
def test_the_lists_name_the_blocks_and_the_function_masks_the_pairs(
    samples: list[Sample], window: int | None, size: int
) -> None:
    plan = TreePlan(pack(samples).tree)
    partial, full = classified(plan, window, size)
    mask = block_mask(plan, window, size)

    def read(count: Tensor | None, index: Tensor | None) -> list[list[int]]:
        assert count is not None and index is not None
        assert count.dtype == index.dtype == torch.int32
        return [row[:n] for row, n in zip(index[0, 0].tolist(), count[0, 0].tolist(), strict=True)]

    def expected(table: Tensor) -> list[list[int]]:
        return [row.nonzero()[:, 0].tolist() for row in table]

    assert read(mask.kv_num_blocks, mask.kv_indices) == expected(partial)
    assert read(mask.full_kv_num_blocks, mask.full_kv_indices) == expected(full)
    assert read(mask.q_num_blocks, mask.q_indices) == expected(partial.T)  # the backward's: who sees these keys
    assert read(mask.full_q_num_blocks, mask.full_q_indices) == expected(full.T)
    assert mask.shape[-2:] == (plan.num_tokens, plan.num_tokens)

    place = torch.arange(plan.num_tokens)
    none = torch.tensor(0)
    assert torch.equal(mask.mask_mod(none, none, place[:, None], place[None]), plan.mask(window))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("window", "softcap", "kv_heads"), [(None, None, 4), (40, None, 2), (9, 2.0, 1)])
def test_scores_are_masked_scaled_and_capped_as_by_hand(
    window: int | None, softcap: float | None, kv_heads: int
) -> None:
    """In float64, through torch's dense form, which needs no compiler of C++."""
    plan = branching(150)
    inputs = operands(plan.num_tokens, kv_heads=kv_heads, dtype=torch.float64)
    ours = attend(*inputs, block_mask(plan, plan.binding(window)), 0.3, softcap, compiled=False)
    theirs, _ = reference_attention(nn.Identity(), *inputs, None, 0.3, window, softcap, tree=plan)
    torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compilation_serves_rows_of_all_lengths() -> None:
    """The compiled kernel reads the lists. The first row has as many blocks as heads of keys, which must not be taken
    for a rule; the second has no ragged block. Called as registered: tracing is off around it.
    """
    attention = torch.compiler.disable(flex_tree_attention)
    before = counters["stats"]["unique_graphs"]
    rows = [TreePlan(pack(group_of(2, 100, 60)).tree), TreePlan(pack([sample(list(range(256)))]).tree)]
    rows += [branching(tokens, seed=tokens) for tokens in (300, 700, 1100)]
    assert [-(-plan.num_tokens // BLOCK) for plan in rows] == [2, 2, 5, 11, 20]
    for plan in rows:
        inputs = operands(plan.num_tokens)
        ours, weights = attention(nn.Identity(), *inputs, None, softcap=3.0, tree=plan)
        theirs, _ = reference_attention(nn.Identity(), *inputs, None, softcap=3.0, tree=plan)
        assert weights is None
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_training_takes_one_compilation_and_scoring_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in float64 through torch's dense form, traced as for a GPU; torch's refusal on CPU is lifted for it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    traced = torch.compile(flex._flex, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(flex, "_compiled", lambda: traced)
    before = counters["stats"]["unique_graphs"]
    for plan in (branching(120), branching(200), branching(256)):
        mask = block_mask(plan, 50)

        def ours(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask = mask) -> Tensor:
            return attend(query, key, value, mask, 0.25, 3.0).transpose(1, 2)

        query, key, value = (t.detach().requires_grad_() for t in operands(plan.num_tokens, dtype=torch.float64))
        theirs, _ = reference_attention(nn.Identity(), query, key, value, None, 0.25, 50, 3.0, tree=plan)
        weights = torch.linspace(-1, 1, theirs.numel(), dtype=torch.float64).view_as(theirs)
        expected = torch.autograd.grad((theirs * weights).sum(), (query, key, value))
        for output in (ours(query, key, value), checkpoint(ours, query, key, value, use_reentrant=False)):
            found = torch.autograd.grad((output * weights).sum(), (query, key, value))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(ours(query, key, value), theirs, rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] - before == 2


@pytest.mark.parametrize("samples", [[sample([7])], group_of(3, 20, 30)], ids=["one token", "one block"])
def test_a_row_of_one_block_takes_the_dense_mask(samples: list[Sample]) -> None:
    plan = TreePlan(pack(samples).tree)
    inputs = operands(plan.num_tokens, dtype=torch.float64)
    ours, _ = flex_tree_attention(nn.Identity(), *inputs, None, 0.2, 9, 5.0, tree=plan)
    theirs, _ = reference_attention(nn.Identity(), *inputs, None, 0.2, 9, 5.0, tree=plan)
    assert torch.equal(ours, theirs)


def test_under_autocast_all_three_are_brought_to_its_type() -> None:
    plan = TreePlan(pack(group_of(3, 20, 30)).tree)
    query, key, value = operands(plan.num_tokens)
    exact, _ = reference_attention(nn.Identity(), query, key, value, None, tree=plan)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = flex_tree_attention(nn.Identity(), query, key, value.bfloat16(), None, tree=plan)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=5e-2, rtol=0)


def test_training_on_cpu_is_refused_by_name() -> None:
    plan = branching(300)
    query, key, value = operands(plan.num_tokens)
    with pytest.raises(SettingsError, match=r"model\.attention = 'flex'.*no backward on CPU.*auto or cpu"):
        flex_tree_attention(nn.Identity(), query.requires_grad_(), key, value, None, tree=plan)


def test_a_model_called_without_a_row_says_so() -> None:
    with pytest.raises(PackingError, match="score_row"):
        flex_tree_attention(nn.Identity(), *operands(2), None)
