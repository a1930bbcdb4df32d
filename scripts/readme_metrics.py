"""Writes the metric table of README.md from the registry; ``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from lit_rl.metrics import REGISTRY

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- metrics: written by scripts/readme_metrics.py -->", "<!-- end of metrics -->"


def table() -> str:
    """The registry as a Markdown table."""
    lines = ["| metric | unit | over a window | meaning |", "|---|---|---|---|"]
    lines += [f"| `{spec.name}` | {spec.unit} | {spec.kind} | {spec.meaning} |" for spec in REGISTRY]
    return "\n".join(lines)


def updated(readme: str) -> str:
    """The README's text with the table of today."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    text = README.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if updated(text) == text else "README.md's metric table is out of date: run this without --check")
    README.write_text(updated(text))


if __name__ == "__main__":
    main()
