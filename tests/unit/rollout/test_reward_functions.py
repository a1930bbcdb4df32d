"""Reward functions: which are taken, what they get, and what they may return."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from lit_rl.errors import RewardError, SettingsError
from lit_rl.rollout.reward_functions import RewardFunction, check_picklable, load_reward, load_rewards
from lit_rl.settings import Reward
from tests.unit.rollout import reward_examples as examples

HERE = "tests.unit.rollout.reward_examples"


def call(function, wanted=4, timeout=5.0, **arguments):
    given = {"completions": ["a"] * wanted, "prompts": ["p"] * wanted, **arguments}
    return asyncio.run(RewardFunction("mine", function, 1.0, timeout)(wanted, given))


def both_ways(values):
    """The same returned by a synchronous and by an asynchronous function."""

    async def later(**_):
        return values

    return [lambda **_: values, later]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "returned 1 values; wanted 4"),
        ([1.0, 2.0, 3.0], "returned 3 values; wanted 4"),
        ([], "returned 0 values; wanted 4"),
        ([1.0] * 5, "returned 5 values; wanted 4"),
        (1.0, "returned a float"),
        (None, "returned a NoneType"),
        ("1234", "returned a str"),
        (torch.ones(4, 1), r"returned shape \(4, 1\)"),
        (np.float64(3), r"returned shape \(\)"),
        ([[1.0], [1.0], [1.0], [1.0]], "returned a list for rollout 0"),
        ([1.0, "good", 0.0, 0.0], "returned a str for rollout 1"),
        ([1.0, float("inf"), 0.0, 0.0], "returned inf for rollout 1"),
    ],
)
def test_a_wrong_number_or_kind_of_values_is_an_error_naming_function_got_and_wanted(values, words):
    for function in both_ways(values):
        with pytest.raises(RewardError, match=f"'mine' {words}"):
            call(function)


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5, True, 2],
        (1.0, 0.5, 1.0, 2.0),
        np.array([1, 0.5, 1, 2]),
        torch.tensor([1, 0.5, 1, 2]),
        [torch.tensor(1.0), np.float32(0.5), 1, 2.0],
    ],
)
def test_a_flat_list_tuple_array_or_tensor_is_fine(values):
    for function in both_ways(values):
        assert call(function).tolist() == [1.0, 0.5, 1.0, 2.0]


def test_none_and_nan_mean_that_a_rollout_was_not_scored():
    assert np.isnan(call(lambda **_: [None, 1.0, float("nan"), 0.0])).tolist() == [True, False, True, False]


def test_a_function_that_names_its_arguments_gets_no_others():
    assert call(examples.correct, 2, answer=["a", "b"], other=[1, 2]).tolist() == [1.0, 0.0]


def test_a_function_that_raises_is_named_with_its_own_traceback():
    def broken(completions, **_):
        return completions[99]

    with pytest.raises(RewardError, match=r"'mine' raised IndexError") as raised:
        call(broken)
    assert "test_reward_functions.py" in str(raised.value) and "completions[99]" in str(raised.value)
    assert "reward_functions.py" not in str(raised.value).replace("test_reward_functions.py", "")


def test_a_timeout_error_of_the_function_itself_is_not_mistaken_for_a_hung_one():
    def broken(**_):
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match="the judge did not answer"):
        call(broken)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_that_hangs_is_named_after_its_timeout(kind):
    async def forever(**_):
        await asyncio.sleep(60)

    with pytest.raises(RewardError, match=r"'mine' gave no answer within 0\.1 s"):
        call(forever if kind == "async" else lambda **_: time.sleep(1), timeout=0.1)


def test_a_function_that_exits_is_an_error_and_not_a_silence():
    def leave(**_):
        raise SystemExit(3)

    with pytest.raises(RewardError, match=r"SystemExit\(3\)"):
        call(leave)


def test_a_long_synchronous_function_does_not_hold_up_the_event_loop():
    def slow(**_):
        time.sleep(0.3)
        return [1.0]

    async def story():
        ticks = 0
        work = asyncio.ensure_future(RewardFunction("mine", slow, 1.0, 5.0)(1, {}))
        while not work.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(story()) >= 10


def test_a_synchronous_function_is_never_called_twice_at_a_time():
    running, most = 0, 0
    lock = threading.Lock()

    def counted(**_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return [1.0]

    async def story():
        function = RewardFunction("mine", counted, 1.0, 5.0)
        await asyncio.gather(*(function(1, {}) for _ in range(4)))

    asyncio.run(story())
    assert most == 1


@pytest.mark.parametrize("path", [f"{HERE}.length", f"{HERE}:length"])
def test_a_function_is_found_by_its_import_path(path):
    assert load_reward(Reward(path)).name == "length"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("length", "whole import path"),
        ("no_such_package.length", "cannot be imported"),
        (f"{HERE}.width", "width"),
        (f"{HERE}.not_a_function", "no function"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_refused_with_its_key(path, words):
    with pytest.raises(SettingsError, match=words) as refused:
        load_reward(Reward(path))
    assert refused.value.key == "data.rewards[].fn"


def test_names_are_the_functions_own_unless_given():
    given = [Reward(examples.length, name="short"), Reward(examples.Threshold(3)), Reward(examples.doubled)]
    assert [f.name for f in load_rewards(given)] == ["short", "Threshold", "scaled"]


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(SettingsError, match="length"):
        load_rewards([Reward(examples.length), Reward(f"{HERE}.length")])


def test_a_name_with_a_slash_would_break_metric_names():
    with pytest.raises(SettingsError, match="slash"):
        load_reward(Reward(examples.length, name="a/b"))


def test_module_level_functions_partials_and_callable_objects_cross_to_another_process():
    rewards: list[Any] = [examples.length, examples.judged, examples.doubled, examples.Threshold(3), f"{HERE}.length"]
    check_picklable([Reward(fn) for fn in rewards])


def test_a_lambda_is_refused_with_the_reason():
    with pytest.raises(SettingsError, match="is a lambda, and rewards run in another process"):
        check_picklable([Reward(lambda completions: [])])


def test_a_closure_is_refused_with_the_reason():
    def closure(completions):
        return []

    with pytest.raises(SettingsError, match="defined inside another function"):
        check_picklable([Reward(closure)])


def test_an_object_that_does_not_pickle_is_refused_with_the_reason():
    with pytest.raises(SettingsError, match="does not pickle"):
        check_picklable([Reward(examples.Threshold(threading.Lock()))])


def test_asynchronous_functions_are_recognised_in_every_form():
    class Judge:
        async def __call__(self, **_):
            return []

    forms: list[Any] = [examples.judged, Judge(), examples.length, examples.Threshold(1)]
    assert [RewardFunction("f", form, 1.0, 1.0).is_async for form in forms] == [True, True, False, False]
