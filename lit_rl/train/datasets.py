"""Stop 1: from what YAML says about a dataset to the dataset."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from typing import Any

from lit_rl.errors import DataError, LitRLError, SettingsError
from lit_rl.settings import DatasetFunction, DatasetSpec


def build_dataset(choice: Any, key: str) -> Any:
    """The dataset of ``data.train`` or ``data.eval``.

    Args:
        choice: A ``DatasetSpec``, a ``DatasetFunction``, or a dataset itself (Python).
        key: Where it stands in the configuration, for messages.

    Raises:
        SettingsError: the function cannot be imported or does not take the arguments.
        DataError: the dataset cannot be loaded, the function raised, or several splits came back.
    """
    if isinstance(choice, DatasetFunction):
        return _call(choice, key)
    if isinstance(choice, DatasetSpec):
        return _load(choice, key)
    return choice


def _call(choice: DatasetFunction, key: str) -> Any:
    module, _, name = choice.fn.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise SettingsError(f"{key}.fn", choice.fn, f"give the import path of a function: {cause}") from cause
    if not callable(function):
        raise SettingsError(f"{key}.fn", choice.fn, "this is no function; give the import path of one")
    try:
        return function(**choice.kwargs)
    except LitRLError:
        raise
    except Exception as cause:
        # The command line shows errors of lit_rl without a traceback, and here the user needs theirs.
        frames = traceback.format_tb(cause.__traceback__)[1:][-6:]
        said = f"{key}.fn = {choice.fn!r} with kwargs {choice.kwargs!r} raised {cause!r}"
        raise DataError("\n".join([said, "".join(frames)]).rstrip()) from cause


def _load(choice: DatasetSpec, key: str) -> Any:
    import datasets

    _require_reachable(choice.path, f"{key}.path")
    try:
        loaded = datasets.load_dataset(
            choice.path, choice.name, split=choice.split, data_files=choice.data_files, **choice.kwargs
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as cause:
        raise DataError(
            f"{key}.path = {choice.path!r} (name {choice.name!r}, split {choice.split!r}) could not be loaded: {cause}"
        ) from cause
    if isinstance(loaded, dict):
        raise DataError(f"{key}.split = {choice.split!r} gave several splits ({', '.join(loaded)}); name one")
    return loaded


def _require_reachable(path: str, key: str) -> None:
    """A dataset that is neither here nor in the cache needs the hub, whose client would try for half a minute."""
    from datasets import config
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as BUILDERS

    from lit_rl.policy.checkpoint import looks_like_a_path, require_hub

    cached = Path(config.HF_DATASETS_CACHE) / path.replace("/", "___")
    if path not in BUILDERS and not Path(path).exists() and not cached.exists():
        if looks_like_a_path(path):
            raise SettingsError(key, path, "there is no such file or folder; give an existing one or a hub id")
        require_hub(path, key, kind="dataset")
