"""Which GPUs a server gets, by what is there and what the trainer uses."""

from __future__ import annotations

import pytest

from lit_rl.engines.gpus import server_gpus, visible_gpus
from lit_rl.errors import SettingsError


@pytest.mark.parametrize(
    ("count", "setting", "names"),
    [
        (2, None, ("0", "1")),
        (2, "4,6", ("4", "6")),
        (1, "GPU-6f1a, GPU-77aa", ("GPU-6f1a",)),  # CUDA stops at the first name that it does not know
        (0, "", ()),
        (0, None, ()),
    ],
)
def test_gpus_are_named_as_the_machine_names_them(count: int, setting: str | None, names: tuple[str, ...]) -> None:
    assert visible_gpus(count, setting) == names


@pytest.mark.parametrize(
    ("asked", "trainer", "visible", "given"),
    [
        (None, (0,), ("0", "1", "2"), ("1",)),  # one is enough
        (None, (1,), ("0", "1"), ("0",)),
        (None, (0,), ("4", "6"), ("6",)),
        ((1, 2), (0,), ("4", "6", "7"), ("6", "7")),
        ((3,), (0,), None, ("3",)),  # another machine's
        (None, (0,), None, ()),  # vLLM takes what it finds there
    ],
)
def test_a_server_gets_what_it_asks_for_or_else_the_first_that_the_trainer_leaves(
    asked: tuple[int, ...] | None,
    trainer: tuple[int, ...],
    visible: tuple[str, ...] | None,
    given: tuple[str, ...],
) -> None:
    assert server_gpus(asked, trainer=trainer, visible=visible) == given


@pytest.mark.parametrize(
    ("asked", "trainer", "visible", "words"),
    [
        (None, (0,), ("0",), r"= None: the trainer uses \[0\] of the 1 GPUs .*second GPU.*`lit-rl serve`.*engine\.url"),
        (None, (0, 1), ("0", "1"), r"= None: the trainer uses \[0, 1\] of the 2 GPUs .*trainer\.devices"),
        ((0,), (0,), ("0",), r"= \[0\]: the trainer uses GPU 0 too; add a second GPU.*`lit-rl serve`.*engine\.url"),
        ((1, 0), (0,), ("0", "1", "2"), r"= \[1, 0\]: the trainer uses GPU 0 too; choose from \[1, 2\]"),
        ((2,), (0,), ("0", "1"), r"= \[2\]: there is no GPU 2; 2 are visible here, counted from 0"),
    ],
)
def test_overlap_a_missing_gpu_and_a_single_one_for_both_are_refused_with_the_remedy(
    asked: tuple[int, ...] | None, trainer: tuple[int, ...], visible: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SettingsError, match=r"data\.engine\.devices " + words):
        server_gpus(asked, trainer=trainer, visible=visible)
