"""README stays true: its metric table, the table of stops, and the keys."""

from pathlib import Path

from scripts.readme_metrics import updated

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_metric_table_is_the_registry():
    assert updated(README) == README, "run scripts/readme_metrics.py"


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
