from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.errors import PackingError
from lit_rl.metrics import Stats, spec_of, values
from lit_rl.packing.deliver import deliver
from lit_rl.packing.planner import FixedCountPlanner, Planner, StepPlan, TokenBudgetPlanner, Verdict
from lit_rl.types import Sample
from tests.fakes.samples import forests, group_of, sample


def fill(planner: Planner, samples: list[Sample]) -> list[Verdict]:
    return [planner.offer(one) for one in samples]


def numbers(plan: StepPlan) -> dict[str, float]:
    stats: Stats = plan.stats
    assert all(spec_of(name).kind == stat.kind for name, stat in stats.items())
    return values(stats)


def test_the_budget_counts_shared_tokens_once() -> None:
    planner = TokenBudgetPlanner(7, ranks=1, micro_batches=1)
    assert fill(planner, group_of(3, prompt=3, completion=2)) == [Verdict.PLACED, Verdict.PLACED, Verdict.FULL]
    assert planner.full
    assert planner.samples == 2


def test_a_row_of_duplicates_still_closes_because_terms_count_too() -> None:
    planner = TokenBudgetPlanner(5, ranks=1, micro_batches=1)
    copies = [sample([1, 2, 3]) for _ in range(4)]  # 3 unique tokens, 2 terms each
    assert fill(planner, copies) == [Verdict.PLACED, Verdict.PLACED, Verdict.FULL, Verdict.FULL]


def test_a_sample_longer_than_the_budget_is_counted_and_forgotten() -> None:
    planner = TokenBudgetPlanner(4, ranks=1, micro_batches=1)
    assert fill(planner, [sample([1, 2, 3, 4, 5]), sample([1, 2])]) == [Verdict.OVERSIZE, Verdict.PLACED]
    assert not planner.full
    assert numbers(planner.close(1))["batch/dropped_oversize_total"] == 1
    planner.offer(sample([1]))
    assert numbers(planner.close(1))["batch/dropped_oversize_total"] == 0


def test_a_group_stays_in_one_row_and_groups_spread_over_rows() -> None:
    planner = TokenBudgetPlanner(100, ranks=2, micro_batches=2)
    fill(planner, [one for g in range(4) for one in group_of(3, prompt=4, completion=2, group=g)])
    plan = planner.close(1)
    assert sorted(row.group_ids for rows in plan.rows for row in rows) == [(g, g, g) for g in range(4)]


def test_a_group_that_outgrows_its_row_goes_on_in_another() -> None:
    planner = TokenBudgetPlanner(8, ranks=1, micro_batches=2)
    assert fill(planner, group_of(4, prompt=4, completion=2)) == [Verdict.PLACED] * 4
    assert [row.tree.num_tokens for row in planner.close(1).rows[0]] == [8, 8]


def test_groups_with_a_common_system_prompt_share_it() -> None:
    planner = TokenBudgetPlanner(100, ranks=1, micro_batches=1)
    fill(planner, [sample([1, 2, 3, 10 + g], group=g) for g in range(4)])
    assert planner.close(1).rows[0][0].tree.num_tokens == 3 + 4


def test_a_short_step_gives_absent_ranks_a_weightless_row() -> None:
    planner = TokenBudgetPlanner(100, ranks=2, micro_batches=3)
    fill(planner, [sample([1, 2, 3])])
    plan = planner.close(policy_version=5)

    assert [len(rows) for rows in plan.rows] == [1, 1]
    assert [len(row.terms) for rows in plan.rows for row in rows] == [2, 0]
    assert plan.totals.rows_per_rank == 1
    assert plan.totals.micro_batch_terms == (2,)
    assert plan.policy_version == 5
    assert planner.empty


def test_rows_of_like_cost_run_in_the_same_micro_batch() -> None:
    planner = TokenBudgetPlanner(10, ranks=2, micro_batches=2)
    lengths = [9, 3, 8, 4]
    fill(planner, [sample([100 * i + t for t in range(n)], group=i) for i, n in enumerate(lengths)])
    plan = planner.close(1)
    tokens = [[row.tree.num_tokens for row in rows] for rows in plan.rows]
    assert tokens == [[9, 4], [8, 3]]


def test_a_step_of_nothing_is_refused() -> None:
    for planner in (TokenBudgetPlanner(8, 1, 1), FixedCountPlanner(8, 1, 1)):
        with pytest.raises(PackingError, match="without a sample"):
            planner.close(1)


def test_a_fixed_count_takes_exactly_its_samples() -> None:
    planner = FixedCountPlanner(2, ranks=2, micro_batches=2)
    verdicts = fill(planner, [one for g in range(3) for one in group_of(3, prompt=2, completion=1, group=g)])
    assert verdicts == [Verdict.PLACED] * 8 + [Verdict.FULL]
    plan = planner.close(1)
    assert plan.totals.samples == 8
    per_micro_batch = [sum(len(rows[m].sample_ids) for rows in plan.rows) for m in range(2)]
    assert per_micro_batch == [4, 4]


def test_a_fixed_count_splits_a_group_only_for_a_rank_that_would_starve() -> None:
    planner = FixedCountPlanner(2, ranks=2, micro_batches=1)
    fill(planner, group_of(4, prompt=2, completion=1))
    assert [len(rows[0].sample_ids) for rows in planner.close(1).rows] == [2, 2]

    fill(planner, [*group_of(3, prompt=2, completion=1, group=0), sample([7, 8], group=1)])
    assert [rows[0].group_ids for rows in planner.close(1).rows] == [(0, 0, 0), (1,)]


def test_the_batch_figures_of_a_step_by_hand() -> None:
    planner = TokenBudgetPlanner(20, ranks=2, micro_batches=1)
    fill(planner, [*group_of(2, prompt=3, completion=2, group=0), *group_of(1, prompt=4, completion=1, group=1)])
    got = numbers(planner.close(1))

    # rows: 7 tokens (pairs 1+2+3+4+5+4+5 = 24) and 5 tokens (pairs 15)
    assert got == {
        "batch/samples_per_step": 3,
        "batch/groups_per_step": 2,
        "batch/forwarded_tokens_per_step": 12,
        "batch/trained_tokens_per_step": 5,
        "batch/microbatches_per_step": 1,
        "batch/masked_token_frac": pytest.approx(7 / 12),
        "batch/samples_per_row": 1.5,
        "batch/row_tokens_mean": 6,
        "batch/row_tokens_max": 7,
        "batch/row_fill_frac": pytest.approx(12 / 40),
        "batch/row_imbalance": pytest.approx(24 / 19.5),
        "batch/packing_ratio": pytest.approx(15 / 12),
        "batch/pad_frac": 0,
        "batch/dropped_oversize_total": 0,
    }


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, 3), st.integers(1, 3), st.integers(4, 30))
def test_every_offered_sample_is_in_the_plan_or_was_refused_and_the_figures_add_up(
    samples: list[Sample], ranks: int, micro_batches: int, budget: int
) -> None:
    planner = TokenBudgetPlanner(budget, ranks, micro_batches)
    verdicts = fill(planner, samples)
    if planner.empty:
        return
    plan = planner.close(1)
    rows = [row for of_rank in plan.rows for row in of_rank]
    got = numbers(plan)

    placed = [one.rollout_id for one, verdict in zip(samples, verdicts, strict=True) if verdict is Verdict.PLACED]
    assert sorted(name for row in rows for name in row.sample_ids) == sorted(placed)
    assert all(row.tree.num_tokens <= budget and len(row.terms) <= budget for row in rows)
    assert {len(of_rank) for of_rank in plan.rows} == {plan.totals.rows_per_rank}
    assert plan.totals.loss_terms == sum(len(row.terms) for row in rows) == sum(plan.totals.micro_batch_terms)
    assert got["batch/samples_per_row"] * len(rows) == pytest.approx(got["batch/samples_per_step"])
    assert got["batch/row_tokens_mean"] * len(rows) == pytest.approx(got["batch/forwarded_tokens_per_step"])
    assert len(plan.sample_versions) == plan.totals.samples


def test_one_rank_gets_its_rows_and_the_figures() -> None:
    planner = FixedCountPlanner(2, ranks=1, micro_batches=2)
    fill(planner, [sample([1, 2, 3]), sample([1, 2, 4]), sample([5, 6])])
    plan = planner.close(3)
    batch = deliver(plan, rank=0, world_size=1)
    assert batch.rows == tuple(plan.rows[0])
    assert (batch.totals.samples, batch.policy_version, batch.sample_versions) == (3, 3, (1, 1, 1))


def test_delivery_to_several_ranks_is_refused_until_it_exists() -> None:
    with pytest.raises(PackingError, match="one rank only"):
        deliver(None, rank=1, world_size=2)
