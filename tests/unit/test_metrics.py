"""The registry and the values that know how to reduce."""

import pytest

from lit_rl.metrics import REGISTRY, Last, Max, Mean, Min, Stats, Sum, merge_into, spec_of, values


def test_a_mean_is_a_ratio_of_sums_and_never_a_mean_of_means():
    window: Stats = {}
    merge_into(window, {"reward": Mean(3.0, 1)})
    merge_into(window, {"reward": Mean(9.0, 9)})
    assert values(window) == {"reward": 1.2}


def test_each_kind_reduces_in_its_own_way():
    window: Stats = {}
    for x in (3.0, 1.0, 2.0):
        merge_into(
            window,
            {
                "rollout/vllm_retry_total": Sum(x),
                "completions/max_length": Max(x),
                "completions/min_length": Min(x),
                "lr": Last(x),
            },
        )
    assert values(window) == {
        "rollout/vllm_retry_total": 6.0,
        "completions/max_length": 3.0,
        "completions/min_length": 1.0,
        "lr": 2.0,
    }


def test_a_completion_that_nobody_scored_is_no_zero():
    assert Mean.of([1.0, float("nan"), 0.0]) == Mean(1.0, 2)
    assert values({"reward": Mean.of([float("nan")])}) == {}


def test_an_unregistered_name_is_refused():
    with pytest.raises(KeyError, match="rewrad"):
        merge_into({}, {"rewrad": Mean(1)})


def test_a_contribution_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="registered as mean"):
        merge_into({}, {"reward": Sum(1)})


def test_names_with_a_users_part_are_registered_by_pattern():
    assert spec_of("rewards/right_answer/mean").name == "rewards/<func>/mean"
    with pytest.raises(KeyError):
        spec_of("rewards/a/b/mean")


def test_names_are_unique():
    names = [spec.name for spec in REGISTRY]
    assert len(names) == len(set(names))
