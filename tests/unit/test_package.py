"""What `import lit_rl` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import lightning.pytorch as pl

import lit_rl
from lit_rl.engines.base import Engine
from lit_rl.rollout.loop import RolloutLoop
from lit_rl.train.objectives import Objective


def test_every_name_is_there_and_is_what_it_says() -> None:
    assert len(lit_rl.__all__) > 10
    for name in lit_rl.__all__:
        assert getattr(lit_rl, name).__name__.split(".")[-1] == name


def test_every_class_that_a_user_names_is_importable_from_the_package() -> None:
    for base, home in (
        (Objective, lit_rl),
        (Engine, lit_rl),
        (RolloutLoop, lit_rl),
        (pl.LightningModule, lit_rl),
        (pl.LightningDataModule, lit_rl),
        (pl.Callback, lit_rl.callbacks),
    ):
        ours = {cls for cls in [base, *descendants(base)] if cls.__module__.startswith("lit_rl.")}
        # those of the command line are there where another test has imported it, and nobody names them
        public = {cls for cls in ours if not cls.__name__.startswith("_") and cls.__module__ != "lit_rl.cli"}
        assert public and all(getattr(home, cls.__name__, None) is cls for cls in public), public


def descendants(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return children + [below for child in children for below in descendants(child)]


def test_importing_the_package_brings_nothing_heavy_along() -> None:
    code = (
        "import sys, lit_rl; print(sorted({'torch', 'lightning', 'transformers', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "[]\n"
