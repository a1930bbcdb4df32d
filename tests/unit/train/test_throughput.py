"""Rates of a step, on both bases of time."""

from __future__ import annotations

import pytest

from lit_rl.metrics import Stats, merge_into, values
from lit_rl.packing.trie import empty_row, pack
from lit_rl.policy.flops import FlopCount
from lit_rl.tensors import StepBatch, StepTotals
from lit_rl.train.callbacks.metrics import throughput
from tests.fakes.samples import sample

# four tokens, 1 + 2 + 3 + 3 pairs, two terms on one place
ROW = pack([sample([1, 2, 3], [0, 0, 1]), sample([1, 2, 4], [0, 0, 1])])
FLOPS = FlopCount(per_token=100, per_pair=10, per_place=1)
DONE = 3 * (4 * 100 + 9 * 10 + 1)


def step(*rows):
    return StepBatch(rows, StepTotals(2, 2, 1, len(rows), (2,) * len(rows)), policy_version=1)


def test_both_rates_and_both_utilisations() -> None:
    found = values(throughput(step(ROW), step_s=2.0, fwd_bwd_s=0.5, flops=FLOPS, peak=1e4))
    assert found == pytest.approx(
        {
            "perf/step_s": 2.0,
            "perf/forwarded_tok_s_wall_clock": 2.0,
            "perf/forwarded_tok_s_fwd_bwd": 8.0,
            "perf/trained_tok_s_wall_clock": 1.0,
            "perf/mfu_wall_clock": DONE / 2e4,
            "perf/mfu_fwd_bwd": DONE / 5e3,
        }
    )


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    assert not [name for name in throughput(step(ROW), 2.0, 0.5, FLOPS, None) if "mfu" in name]
    assert not [name for name in throughput(step(ROW), 2.0, 0.5, None, 1e4) if "mfu" in name]


def test_a_window_divides_sums_by_sums() -> None:
    window: Stats = {}
    merge_into(window, throughput(step(ROW), 1.0, 1.0, FLOPS, 1e4))
    merge_into(window, throughput(step(ROW, ROW), 3.0, 1.0, FLOPS, 1e4))
    assert values(window)["perf/mfu_wall_clock"] == pytest.approx(3 * DONE / 4e4)


def test_a_row_that_only_keeps_a_rank_in_step_is_no_work() -> None:
    assert values(throughput(step(ROW, empty_row()), 2.0, 0.5, FLOPS, 1e4)) == values(
        throughput(step(ROW), 2.0, 0.5, FLOPS, 1e4)
    )
