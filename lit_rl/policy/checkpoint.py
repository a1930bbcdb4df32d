"""Whether a name leads to a checkpoint at all: told within seconds, before anything is loaded or started."""

from __future__ import annotations

import contextlib
import functools
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants as hub

from lit_rl.errors import SettingsError

HUB_TIMEOUT_S = 5.0
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json")
LOCATION = ("revision", "cache_dir", "token", "subfolder", "gguf_file")
"""Arguments of ``from_pretrained`` that say where a checkpoint's files are."""


def require_model(pretrained: str, init_kwargs: Mapping[str, Any] | None = None) -> None:
    """``require_files`` of what training starts from."""
    files = {"config.json": ("config.json",), "weights (*.safetensors)": WEIGHTS}
    require_files(pretrained, "model.pretrained", files=files, init_kwargs=init_kwargs)


def require_files(
    name: str, key: str, *, files: Mapping[str, tuple[str, ...]], init_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuses a name behind which there is nothing to be had.

    Args:
        name: Folder or hub id.
        key: Where it stands in the configuration.
        files: What a folder must hold, by its name in a sentence: patterns of which one must match.
        init_kwargs: Arguments of ``from_pretrained``.

    Raises:
        SettingsError: no such folder, a folder without those files, or a hub that does not answer.
    """
    extra = dict(init_kwargs or {})
    folder = Path(name).expanduser()
    if folder.exists():
        _require_in_folder(folder / (extra.get("subfolder") or ""), name, key, {} if "gguf_file" in extra else files)
        return
    if looks_like_a_path(name):
        raise SettingsError(key, name, "there is no such folder; give an existing one or a hub id")
    if not _cached(name, {place: extra[place] for place in LOCATION if place in extra}):
        require_hub(name, key)


def looks_like_a_path(name: str) -> bool:
    """Whether a name can be no hub id, which is ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def _require_in_folder(folder: Path, name: str, key: str, files: Mapping[str, tuple[str, ...]]) -> None:
    if not folder.is_dir():
        raise SettingsError(key, name, "this is no folder; give the folder that holds the files")
    for what, patterns in files.items():
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise SettingsError(key, name, f"this folder holds no {what}; give a model's folder")


def _cached(name: str, located: dict[str, Any]) -> bool:
    from transformers import PretrainedConfig

    try:
        PretrainedConfig.get_config_dict(name, local_files_only=True, **located)
    except OSError:
        return False
    return True


def require_hub(name: str, key: str, kind: str = "model") -> None:
    """Asks the hub once: its client would go on trying for half a minute before it says the same."""
    remedy = "it is no folder here and the hub {}; give the path of a folder that holds the files"
    try:
        reach_hub(f"{hub.ENDPOINT}/api/{kind}s/{name}")
    except OSError as cause:
        raise SettingsError(key, name, remedy.format(f"at {hub.ENDPOINT} cannot be reached ({cause})")) from cause


@functools.cache  # what is asked for the model is asked for its tokenizer, too, and again when it is built
def reach_hub(address: str) -> None:
    """Raises OSError where the hub does not answer; what it says about this name is its client's business."""
    if hub.HF_HUB_OFFLINE:
        raise OSError("it is switched off: HF_HUB_OFFLINE")
    request = urllib.request.Request(address, method="HEAD")
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
