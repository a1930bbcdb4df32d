"""Writes the tables of README.md that the code knows better: every file, every metric.

``--check`` only says whether they are up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from lit_rl.metrics import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def files() -> str:
    """Every module of lit_rl with the first sentence of its docstring."""
    lines = ["| file | what it is |", "|---|---|"]
    for path in sorted((ROOT / "lit_rl").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if docstring is not None:
            first = re.split(r"(?<=[.!])\s|\n\n", docstring)[0].replace("\n", " ").replace("``", "`").rstrip(".")
            lines.append(f"| `{path.relative_to(ROOT / 'lit_rl')}` | {first.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def metrics() -> str:
    """The registry."""
    lines = ["| metric | unit | over a window | meaning |", "|---|---|---|---|"]
    lines += [f"| `{spec.name}` | {spec.unit} | {spec.kind} | {spec.meaning} |" for spec in REGISTRY]
    return "\n".join(lines)


TABLES = {"files": files, "metrics": metrics}


def updated(readme: str) -> str:
    """The README's text with the tables of today."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by scripts/readme_tables.py -->", f"<!-- end of {name} -->"
        before, rest = readme.split(begin)
        _, after = rest.split(end)
        readme = f"{before}{begin}\n{table()}\n{end}{after}"
    return readme


def main() -> None:
    text = README.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if updated(text) == text else "README.md's tables are out of date: run this without --check")
    README.write_text(updated(text))


if __name__ == "__main__":
    main()
