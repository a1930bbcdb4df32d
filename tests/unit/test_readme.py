"""README stays true: its tables of files and metrics, the table of stops, and the keys."""

from pathlib import Path

import pytest
import yaml

from scripts.readme_tables import updated

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tables_of_files_and_metrics_are_those_of_the_code():
    assert updated(README) == README, "run scripts/readme_tables.py"


def test_every_key_is_explained(capsys):
    from lit_rl.cli import main

    with pytest.raises(SystemExit):
        main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    ours = {name: config[name] for name in ("model", "data", "weight_sync", "staleness")}
    engine = ours["data"].pop("engine")["init_args"]
    for given_whole in ("train", "eval"):
        ours["data"][given_whole] = None
    ours["model"]["optimizer"] = None
    missing = [key for key in leaves(ours) if f"`{key}`" not in README]
    missing += [f"data.engine.init_args.{key}" for key in engine if f"| `{key}` |" not in README]
    assert not missing


def leaves(tree, above=""):
    """``{"a": {"b": 1}, "c": 2}`` has a.b and c."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        elif name != "class_path":
            yield above + name


def test_every_file_of_the_table_of_stops_exists_and_begins_with_its_stop():
    rows = [
        line.split("|")
        for line in README.splitlines()
        if line.startswith("| ") and line.split("|")[1].strip().isdigit()
    ]
    assert [int(row[1]) for row in rows] == list(range(1, 15))
    for row in rows:
        for name in (part.strip().strip("`") for part in row[2].split(",")):
            path = ROOT / "lit_rl" / name
            assert path.exists(), name
            if path.is_file():
                first = path.read_text().splitlines()[0].split(":")[0]
                assert first.startswith('"""Stop') and row[1].strip() in first, f"{name} begins with {first}"
