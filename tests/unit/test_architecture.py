"""The rules that keep lit_rl readable: who may import whom, how long a file gets, and the way of a sample.

All of them are read off the syntax trees, so that nothing is imported; the last tests start a fresh Python instead and
look at what an import drags in.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lit_rl"
FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))

TOP_LEVEL = {"pyproject.toml", "README.md", "lit_rl", "configs", "tests", "scripts"}
GIT_IGNORED = {"runs", "models", "build", "dist"}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_TRAINING_STEP_LINES = 50


class Room(NamedTuple):
    """What a part of lit_rl may import: modules of lit_rl by prefix, and packages from outside by their first name."""

    lit_rl: set[str]
    outside: set[str]


# Each of these may import those to its right.
LIGHT = ["capabilities", "metrics", "settings", "types", "errors"]
PRODUCER = Room({"types", "settings", "metrics", "errors", "maths.advantages", "rollout", "rewards", "tasks"}, set())
ROOMS = {
    "tensors": Room({"errors"}, {"torch"}),
    "maths": Room({"tensors", "errors", "maths"}, {"torch", "numpy"}),
    "maths.advantages": Room({"errors"}, {"numpy"}),
    "rollout": PRODUCER._replace(outside={"numpy", "aiohttp", "jinja2", "tokenizers", "transformers"}),
    "rewards": PRODUCER._replace(outside={"numpy", "math_verify"}),
    "tasks": PRODUCER._replace(outside={"numpy", "datasets", "reasoning_gym"}),
    "packing": Room({"types", "tensors", "settings", "metrics", "errors", "packing"}, {"numpy", "torch"}),
    "policy": Room(
        {"tensors", "settings", "errors", "maths", "policy"},
        {"numpy", "torch", "transformers", "huggingface_hub", "peft", "kernels", "safetensors"},
    ),
    "engines": Room(
        {"types", "settings", "errors", "policy.export", "engines", "sync"}, {"numpy", "torch", "aiohttp", "packaging"}
    ),
    "sync": Room(
        {"types", "settings", "errors", "policy.export", "engines", "sync"}, {"numpy", "torch", "aiohttp", "vllm"}
    ),
    "train": Room(
        {*LIGHT, "tensors", "maths", "rollout", "rewards", "packing", "policy", "engines", "sync", "train"},
        {"numpy", "torch", "torchmetrics", "lightning", "transformers", "datasets", "rich"},
    ),
    "train.callbacks": Room(
        {*LIGHT, "tensors", "maths", "rollout", "rewards", "packing", "policy", "engines", "sync", "train"},
        {"numpy", "torch", "torchmetrics", "lightning", "transformers", "rich", "wandb", "matplotlib"},
    ),
    "cli": Room(
        {"serve", "train", "settings", "errors", "ending", "capabilities", "usage"}, {"lightning", "jsonargparse"}
    ),
    "ending": Room({"errors"}, set()),
    "usage": Room({"errors"}, {"lightning"}),
    "serve": Room({"train", "engines", "settings", "errors", "capabilities"}, {"lightning", "torch"}),
    "__main__": Room({"cli"}, set()),
    "__init__": Room(set(), set()),
}
ROOMS |= {name: Room(set(LIGHT[place + 1 :]), {"numpy"}) for place, name in enumerate(LIGHT)}
ROOMS["metrics"] = Room(ROOMS["metrics"].lit_rl, {"numpy", "torchmetrics"})

SERVER_SIDE = "sync.vllm_"
"""Modules of this name run inside vLLM's processes, so they may import it when they are imported."""

COLLECTIVES = ("packing.deliver", "policy.shard", "policy.export", "sync", "train")

STOPS = {
    1: ["rollout/prompts.py", "train/datasets.py"],
    2: ["rollout/admission.py"],
    3: ["rollout/loop.py", "rollout/turns.py", "rollout/sampler.py"],
    4: ["rollout/reconcile.py"],
    5: ["rollout/scoring.py", "rollout/reward_functions.py"],
    6: ["maths/advantages.py", "rollout/scoring.py"],
    7: ["rollout/process.py", "rollout/handle.py"],
    8: ["train/callbacks/staleness.py"],
    9: ["packing/planner.py", "packing/trie.py"],
    10: ["packing/deliver.py", "train/stream.py", "train/data.py"],
    11: ["policy/forward.py", "policy/head.py", "policy/tree_attention/"],
    12: ["maths/ratios.py", "maths/losses.py", "train/objectives/"],
    13: ["maths/normalize.py", "train/module.py", "train/gradients.py"],
    14: ["policy/export.py", "sync/", "train/callbacks/weight_sync.py"],
}

# Words that mean something the glossary has a word for, with that word.
RIVALS = {
    r"traj|trajector(y|ies)|episode": "rollout",
    r"mini_?batch|microbatch": "micro_batch",
    r"old_log_?p\w*|ref_log_?p\w*|per_token_logps": "sampler_logprobs, reference_logprobs",
    r"iteration|policy_step": "policy_version",
}


def module_name(file: Path) -> str:
    """``maths.losses`` for lit_rl/maths/losses.py, ``maths`` for its ``__init__``."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def under(module: str, prefixes: set[str] | tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def room_of(module: str) -> Room:
    """The most special room that the module lies in."""
    return ROOMS[max((name for name in ROOMS if under(module, {name})), key=len)]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, in functions too; ``from lit_rl import errors`` counts as lit_rl.errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the whole module name"
            if node.module == "lit_rl":
                yield from ((f"lit_rl.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module or "", node.lineno


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def shown(file: Path, line: int = 1) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_every_module_lies_in_a_room() -> None:
    assert [shown(file) for file in FILES if not any(under(module_name(file), {name}) for name in ROOMS)] == []


def test_a_room_imports_only_what_the_architecture_allows() -> None:
    wrong = []
    for file in FILES:
        room = room_of(module_name(file))
        for imported, line in imports(parsed(file)):
            first, _, rest = imported.partition(".")
            allowed = under(rest, room.lit_rl) if first == "lit_rl" else first in room.outside | sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{shown(file, line)} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_vllm_is_imported_in_functions_only() -> None:
    wrong = []
    for file in FILES:
        if module_name(file).startswith(SERVER_SIDE):
            continue
        tree = parsed(file)
        lazy = {line for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for _, line in imports(node)}
        eager = [line for imported, line in imports(tree) if under(imported, {"vllm"}) and line not in lazy]
        wrong += [shown(file, line) for line in eager]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_train_but_the_command_line() -> None:
    others = [file for file in FILES if not under(module_name(file), {"train", "cli", "serve"})]
    found = [(name, shown(file, line)) for file in others for name, line in imports(parsed(file))]
    wrong = [place for name, place in found if under(name, {"lit_rl.train"})]
    assert not wrong, "\n".join(wrong)


def test_collectives_stay_where_they_belong() -> None:
    wrong = []
    for file in FILES:
        if not under(module_name(file), COLLECTIVES):
            tree = parsed(file)
            wrong += [shown(file, line) for name, line in imports(tree) if under(name, {"torch.distributed"})]
            attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            wrong += [shown(file, node.lineno) for node in attributes if node.attr == "distributed"]
    assert not wrong, "\n".join(wrong)


def test_files_stay_short() -> None:
    lines = {shown(file): file.read_text(encoding="utf-8").count("\n") for file in [*FILES, *SCRIPTS]}
    assert {file: count for file, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    wrong = []
    for file in [*FILES, *SCRIPTS]:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                limit = MAX_TRAINING_STEP_LINES if node.name == "training_step" else MAX_FUNCTION_LINES
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    wrong.append(f"{shown(file, node.lineno)} {node.name} has {length} lines, {limit} are allowed")
    assert not wrong, "\n".join(wrong)


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def test_one_word_for_one_thing() -> None:
    wrong = []
    for file in FILES:
        for rival, word in RIVALS.items():
            used = {name for name in names(parsed(file)) if re.search(rf"(^|_)({rival})(_|$)", name, re.IGNORECASE)}
            wrong += [f"{shown(file)} says {name}, the glossary {word}" for name in sorted(used)]
    assert not wrong, "\n".join(wrong)


def test_each_file_on_the_way_of_a_sample_says_its_stop() -> None:
    wrong = []
    for stop, place in ((stop, place) for stop, places in STOPS.items() for place in places):
        path = PACKAGE / place
        files = [file for file in path.glob("*.py") if file.name != "__init__.py"] if path.is_dir() else [path]
        for file in files:
            first_line = (ast.get_docstring(parsed(file)) or "").partition("\n")[0]
            if not re.match(rf"Stops? (\d+ and )?{stop}( and \d+)?[:,] ", first_line):
                wrong.append(f"{shown(file)} begins {first_line!r}, it is stop {stop}")
    assert not wrong, "\n".join(wrong)


def test_the_readme_shows_the_same_way() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    way = {int(stop): re.findall(r"[\w/]+(?:\.py|/)", places) for stop, places in rows}
    assert way == STOPS


def test_the_top_level_holds_nothing_else() -> None:
    entries = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith((".", "__pycache__"))}
    assert {name for name in entries - GIT_IGNORED if not name.endswith(".egg-info")} == TOP_LEVEL


def brought_in(statement: str) -> set[str]:
    """The modules that a fresh Python holds after the statement."""
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_rollout_process_brings_neither_lightning_nor_vllm_nor_the_policy() -> None:
    heavy = {"lightning", "pytorch_lightning", "vllm", "wandb", "peft", "lit_rl.train", "lit_rl.policy", "lit_rl.cli"}
    assert brought_in("import lit_rl.rollout.process, lit_rl.rollout.loop") & heavy == set()


def test_importing_lit_rl_brings_no_framework() -> None:
    assert brought_in("import lit_rl") & {"torch", "transformers", "lightning", "vllm", "wandb", "aiohttp"} == set()


def test_a_server_finds_the_weight_transfer_engine_without_lightning() -> None:
    assert brought_in("import lit_rl.sync.vllm_plugin") & {"lightning", "pytorch_lightning", "wandb"} == set()
