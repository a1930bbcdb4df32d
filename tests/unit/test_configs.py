"""Every configuration file in the repository is understood by the command line, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def test_there_are_configurations() -> None:
    assert CONFIGS


@pytest.mark.parametrize("config", CONFIGS, ids=[str(config.relative_to(ROOT)) for config in CONFIGS])
def test_a_configuration_is_parsed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lit_rl.cli import main

    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(config), "--print_config"])
    said = capsys.readouterr()
    assert end.value.code in (0, None), said.err
    assert "\ndata:" in said.out
