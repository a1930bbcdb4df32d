"""Advantages of a group: standardised, exactly zero where nothing tells the rollouts apart."""

import numpy as np
import pytest

from lit_rl.maths.advantages import all_equal, count_scored, group_standardised, population_std

NAN = float("nan")


@pytest.mark.parametrize(("reward", "count"), [(0.1, 8), (0.3, 6), (0.9, 3), (1 / 3, 7), (1e9 + 0.1, 5), (0.0, 4)])
def test_equal_rewards_give_exactly_zero_though_their_mean_is_rounded(reward, count):
    assert group_standardised(np.full(count, reward)).tolist() == [0.0] * count


def test_float32_rewards_that_are_equal_give_exactly_zero():
    assert group_standardised(np.full(8, 0.1, dtype=np.float32)).tolist() == [0.0] * 8


def test_rewards_that_differ_by_a_rounding_are_equal():
    assert 0.1 + 0.2 != 0.3
    assert group_standardised(np.array([0.1 + 0.2, 0.3])).tolist() == [0.0, 0.0]


def test_one_right_answer_in_four_stands_out():
    assert group_standardised(np.array([1.0, 0, 0, 0])) == pytest.approx([3**0.5, *[-1 / 3**0.5] * 3], abs=1e-6)


def test_a_rollout_without_a_reward_gets_no_advantage_and_moves_no_other():
    advantages = group_standardised(np.array([1.0, NAN, 0.0, NAN]))
    assert advantages == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-6)
    assert advantages[1] == 0.0


def test_small_differences_count_as_differences():
    assert group_standardised(np.array([0.0, 1e-4])) == pytest.approx([-1.0, 1.0], abs=1e-3)


def test_a_group_without_rewards_is_all_zero():
    assert group_standardised(np.array([NAN, NAN])).tolist() == [0.0, 0.0]
    assert group_standardised(np.array([NAN, 5.0])).tolist() == [0.0, 0.0]


def test_negative_rewards_can_be_equal_too():
    assert all_equal(np.array([-0.1, -0.1, NAN]))
    assert not all_equal(np.array([-0.1, 0.1]))


def test_scored_rewards_are_counted():
    assert count_scored(np.array([0.0, NAN, 1.0])) == 2


def test_the_standard_deviation_is_of_the_population_and_skips_nan():
    assert population_std(np.array([1.0, 3.0, NAN])) == 1.0
    assert population_std(np.full(8, 0.1)) == 0.0
    assert population_std(np.array([NAN, NAN])) == 0.0
