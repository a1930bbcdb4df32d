"""The pinned requirement files against the ranges and extras of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.resolve_pins import misfits

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
RUNTIME_EXTRAS = sorted(set(EXTRAS) - {"cpu", "gpu", "test"})


def pins(name: str) -> dict[str, str]:
    """Version by package name; every line that is no comment must be an exact pin."""
    lines = (ROOT / "scripts" / name).read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in found if not re.fullmatch(r"[\w.-]+==[\w.+]+", line)] == []
    pairs = [line.split("==") for line in found]
    assert len({canonicalize_name(package) for package, _ in pairs}) == len(pairs), f"{name} pins a package twice"
    return {canonicalize_name(package): version for package, version in pairs}


def outside_the_range(wanted: list[str], pinned: dict[str, str]) -> list[str]:
    requirements = [Requirement(text) for text in wanted]
    versions = {need: pinned.get(canonicalize_name(need.name)) for need in requirements}
    return [
        f"{need}: pinned {version}"
        for need, version in versions.items()
        if not version or version not in need.specifier
    ]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_pinned_environment_meets_every_range_that_the_package_states(device: str) -> None:
    extras = [need for extra in [device, *RUNTIME_EXTRAS] for need in EXTRAS[extra]]
    assert outside_the_range(PROJECT["dependencies"] + extras, pins(f"requirements-{device}.txt")) == []


def test_the_pinned_test_tools_meet_the_test_extra() -> None:
    assert outside_the_range(EXTRAS["test"], pins("requirements-test.txt")) == []


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_test_tools_replace_no_package_of_the_environment(device: str) -> None:
    both = pins("requirements-test.txt").keys() & pins(f"requirements-{device}.txt").keys()
    assert both == set()


def test_the_cpu_environment_has_no_torchvision_which_breaks_beside_a_cpu_torch() -> None:
    assert pins("requirements-cpu.txt").keys() & {"torchvision", "torchaudio", "torchcodec"} == set()


def test_pins_that_do_not_fit_each_other_are_found() -> None:
    needs = [
        "torch>=2.13 ; platform_system == 'Linux'",
        "Numpy<3",
        "pywin32 ; sys_platform == 'win32'",
        "tool; extra == 'x'",
    ]
    report = {
        "environment": {"platform_system": "Linux", "sys_platform": "linux"},
        "install": [
            {"metadata": {"name": "Vllm", "version": "0.32.0", "requires_dist": [*needs, "yaml-things"]}},
            {"metadata": {"name": "torch", "version": "2.12.0"}},
            {"metadata": {"name": "numpy", "version": "2.3.5"}},
        ],
    }

    assert misfits(report) == [
        "Vllm needs torch>=2.13 ; platform_system == 'Linux', pinned is 2.12.0",
        "Vllm needs yaml-things, pinned is none",
    ]
