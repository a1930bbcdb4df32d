"""The tests' reader of offline W&B files: it reads every row, also of a file that is still being written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import wandb

from tests.fakes.wandb_file import history

BLOCK = 32 * 1024
ROWS = [{f"group/value_{column:03d}": row + column / 8 for column in range(100)} for row in range(20)]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    run = wandb.init(dir=tmp_path, mode="offline", project="p", settings=wandb.Settings(console="off"))
    for row in ROWS:
        run.log(row)
    run.finish()
    wandb.teardown()  # processes that later tests start would use its service
    assert len(history(tmp_path)) == len(ROWS)  # waits for the last block
    [path] = tmp_path.rglob("run-*.wandb")
    return path


def test_every_row_is_read_across_the_blocks_of_a_file(run_file: Path, tmp_path: Path) -> None:
    assert run_file.stat().st_size > BLOCK
    logged = [{name: value for name, value in row.items() if not name.startswith("_")} for row in history(tmp_path)]
    assert logged == ROWS


def test_a_file_whose_last_block_is_late_is_waited_for(run_file: Path, tmp_path: Path) -> None:
    whole = run_file.read_bytes()
    run_file.write_bytes(whole[:BLOCK])
    with pytest.raises(TimeoutError, match="no record of the run's exit"):
        history(tmp_path, timeout=0.0)
    late = threading.Timer(0.3, run_file.write_bytes, [whole])
    late.start()
    assert len(history(tmp_path)) == len(ROWS)
    late.join()
