"""Stop 1: from what YAML says about a dataset to the dataset."""

from __future__ import annotations

import importlib
from typing import Any

from lit_rl.errors import DataError, SettingsError
from lit_rl.settings import DatasetFunction, DatasetSpec


def build_dataset(choice: Any, key: str) -> Any:
    """The dataset of ``data.train`` or ``data.eval``.

    Args:
        choice: A ``DatasetSpec``, a ``DatasetFunction``, or a dataset itself (Python).
        key: Where it stands in the configuration, for messages.

    Raises:
        SettingsError: the function cannot be imported or does not take the arguments.
        DataError: the dataset cannot be loaded, or several splits came back.
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
    try:
        return function(**choice.kwargs)
    except TypeError as cause:
        raise SettingsError(f"{key}.kwargs", choice.kwargs, f"{choice.fn} refused them: {cause}") from cause


def _load(choice: DatasetSpec, key: str) -> Any:
    import datasets

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
