"""Everything that a user can get wrong: each case of the table ends the command soon, with one screen that helps.

``python -m tests.process.test_wrong_input`` prints the table with the seconds that each case takes as a whole process
and its last line; ``... NAME`` prints all that a case says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lit_rl import PolicyModule, RolloutDataModule
from lit_rl.errors import SettingsError
from tests.fakes.engine import TinyEngine
from tests.fakes.tiny import save_tiny_model
from tests.process.command import Ended, run, run_forked
from tests.process.wrong_input import CASES, CONFIG, PARTS, Case
from tests.process.wrong_input_parts import prompts

LINES = 25
SECONDS = 30.0
SLOW_SECONDS = 90.0
"""Of cases in which other processes import what they need, on a machine that is busy with more than this."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepared(tmp_path_factory.mktemp("wrong"))
    run_forked(["--help"], folder, seconds=180)  # the imports that all later ones are forked from
    return folder


def prepared(folder: Path) -> Path:
    save_tiny_model(folder / "tiny")
    return folder


def ended(case: Case, folder: Path, how: Callable[..., Ended]) -> tuple[Ended, list[str]]:
    """What became of the case, and the words that its message owes."""
    around = case.around(folder) if case.around is not None else contextlib.nullcontext({})
    with around as names:
        names = {"folder": str(folder), **names}
        train = case.train.replace("PARTS", PARTS).format(**names)
        (folder / "config.yaml").write_text(CONFIG.format(folder=folder, train=train))
        given = case.command or ("fit", "--config", "{folder}/config.yaml", *case.args)
        result = how([text.format(**names) for text in given if text], folder)
    return result, [word.format(**names) for word in case.says]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input_is_answered_with_one_screen_that_helps(case: Case, folder: Path) -> None:
    _check(case, *ended(case, folder, run_forked))


def _check(case: Case, result: Ended, words: list[str]) -> None:
    message = "\n".join(result.message)
    assert result.code == 1, result.err
    assert [word for word in words if word not in message] == [], result.err
    assert len(result.message) <= LINES, message
    assert "Traceback" not in result.err
    assert "wandb" not in message  # its farewell comes before
    assert result.seconds < (SLOW_SECONDS if case.slow else SECONDS)
    assert result.left == []
    assert case.slow or "the engine was started" not in result.out


REAL = ("unknown option", "two devices", "missing model folder", "another model", "too few rewards")
"""One case of each kind: the parser, the Trainer, set-up, a server, the rollout process."""


@pytest.mark.parametrize("name", REAL)
def test_the_command_itself_says_the_same(name: str, folder: Path) -> None:
    """From the start, as a user runs it."""
    case = next(case for case in CASES if case.name == name)
    _check(case, *ended(case, folder, run))


def test_a_lambda_as_reward_is_refused_in_python_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    engine = TinyEngine()
    module = PolicyModule(str(folder / "tiny"))
    data = RolloutDataModule(prompts(), [lambda completions, **_: [0.0]], engine=engine)
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(SettingsError, match=r"data\.rewards.*lambda.*top level of a module"):
        trainer.fit(module, data)
    assert engine.started == []


def main(names: list[str]) -> None:
    """Prints the table, each case run from the start; or all that the named cases say."""
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        folder = prepared(Path(root))
        for case in CASES:
            if names and case.name not in names:
                continue
            result, words = ended(case, folder, run)
            missing = [word for word in words if word not in "\n".join(result.message)]
            last = result.err.rstrip().rpartition("\n")[2].replace(root, "...")
            print(f"{case.name} | {result.seconds:.1f} | {result.code} | {last}", *missing, *result.left, flush=True)
            if names:
                print(result.out, result.err)


if __name__ == "__main__":
    main(sys.argv[1:])
