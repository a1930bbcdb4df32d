"""The table of wrong input: what is wrong, what must stand around a run for it, what the message must say."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.server import GENERATE, Call
from tests.fakes.tiny import tiny_tokenizer
from tests.fakes.worker import WeightServer

PARTS = "tests.process.wrong_input_parts"

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  default_root_dir: {folder}/runs
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
model:
  pretrained: {folder}/tiny
  gradient_checkpointing: false
data:
  train: {train}
  rewards: [PARTS.by_length]
  engine:
    class_path: PARTS.Engine
  num_generations: 4
  samples_per_rank: 8
  token_budget: 0
  max_completion_length: 6
""".replace("PARTS", PARTS)

Surroundings = Callable[[Path], contextlib.AbstractContextManager[dict[str, str]]]


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        name: What is wrong.
        args: Added to the command line; ``{folder}`` and what ``around`` gives are filled in.
        says: What the message must contain: the key, the value, the remedy.
        around: What must be there for it: a server, a file; gives names for ``args`` and ``says``.
        command: The whole command line, where it is another one than ``fit --config ...`` and ``args``.
        train: What the configuration says under ``data.train``.
        slow: Whether it shows only once a server or the rollout process has been started.
    """

    name: str
    args: tuple[str, ...]
    says: tuple[str, ...]
    around: Surroundings | None = None
    command: tuple[str, ...] = ()
    train: str = "{{fn: PARTS.prompts}}"
    slow: bool = False


# ---- what stands around a run ---------------------------------------------------------------------------------------


def served(*rules: dict[str, Any], **options: Any) -> Surroundings:
    """A fake vLLM that serves the run's model and takes its weights, unless told otherwise."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[dict[str, str]]:
        with WeightServer(**{"model_name": str(folder / "tiny"), **options}) as server:
            for rule in rules:
                server.script(**rule)
            yield {"url": server.url}
            assert not server.weights.paused  # left usable, whatever happened

    return around


def asks_for_tokens(call: Call) -> bool:
    """And is not the question whether the route is there."""
    return call.sampling["max_tokens"] > 0


@contextlib.contextmanager
def closed_port(folder: Path) -> Iterator[dict[str, str]]:
    with socket.socket() as bound:  # bound, and so nobody else's, but not listening
        bound.bind(("127.0.0.1", 0))
        yield {"url": f"http://127.0.0.1:{bound.getsockname()[1]}"}


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def another_web_server(folder: Path) -> Iterator[dict[str, str]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"url": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


def model_without(*patterns: str) -> Surroundings:
    """The tiny model's folder, some of its files left out."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[dict[str, str]]:
        part = folder / "part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder / "tiny", part, ignore=shutil.ignore_patterns(*patterns))
        yield {"part": str(part)}

    return around


@contextlib.contextmanager
def broken_weights(folder: Path) -> Iterator[dict[str, str]]:
    with model_without("*.safetensors")(folder) as names:
        (folder / "part" / "model.safetensors").write_bytes(b"half a download")
        yield {**names, "url": "http://127.0.0.1:9"}


@contextlib.contextmanager
def tokenizer_without_template(folder: Path) -> Iterator[dict[str, str]]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "plain")
    yield {}


def written(name: str, text: str) -> Surroundings:
    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[dict[str, str]]:
        (folder / name).write_text(text.replace("FOLDER", str(folder)))
        yield {}

    return around


# ---- the table ------------------------------------------------------------------------------------------------------


def data(name: str, train: str, *says: str, around: Surroundings | None = None) -> Case:
    return Case(name, (), says, around, train=train)


SERVER = ("--data.engine=lit_rl.VLLMServer", "--data.engine.url={url}", "--data.engine.timeout=2")
# a free port: another process of the machine may have the default one for a connection of its own
SYNC = (*SERVER[:2], "--data.engine.transfer_port=0", "--weight_sync.timeout=3", "--weight_sync.receipt=false")
LAUNCH = ("--data.engine=lit_rl.VLLMServer", "--data.engine.launch=true")

CASES = [
    # the command line and its files
    Case("no subcommand", (), ("fit",), command=("",)),
    Case("unknown subcommand", (), ("fitt", "fit"), command=("fitt",)),
    Case("unknown option", ("--data.num_generation=4",), ("data.num_generation", "data.num_generations")),
    Case("misspelt option", ("--data.num_genertions=4",), ("data.num_genertions", "data.num_generations")),
    Case(
        "unknown key in YAML",
        ("--config={folder}/other.yaml",),
        ("data.num_genertions", "data.num_generations"),
        written("other.yaml", "data: {num_genertions: 4}"),
    ),
    Case(
        "unknown section in YAML",
        ("--config={folder}/other.yaml",),
        ("modell", "model"),
        written("other.yaml", "modell: {dtype: float32}"),
    ),
    Case(
        "unknown key of the engine",
        ("--data.engine=lit_rl.VLLMServer", "--data.engine.ulr=x"),
        ("data.engine", "ulr", "url"),
    ),
    Case(
        "unknown key of the engine in YAML",
        ("--config={folder}/other.yaml",),
        ("data.engine", "ulr", "url"),
        written("other.yaml", "data: {engine: {class_path: lit_rl.VLLMServer, init_args: {ulr: x}}}"),
    ),
    Case(
        "missing config file",
        (),
        ("config", "nothing.yaml", "not exist"),
        command=("fit", "--config", "{folder}/nothing.yaml"),
    ),
    Case("broken YAML", ("--config={folder}/other.yaml",), ("other.yaml",), written("other.yaml", "data: [")),
    Case("YAML without keys", ("--config={folder}/other.yaml",), ("other.yaml",), written("other.yaml", "just words")),
    Case("required keys missing", (), ("model.pretrained",), command=("fit",)),
    Case("wrong type", ("--data.num_generations=many",), ("data.num_generations", "many", "int")),
    Case(
        "wrong type in YAML",
        ("--config={folder}/other.yaml",),
        ("data.num_generations", "many", "int"),
        written("other.yaml", "data: {num_generations: many}"),
    ),
    Case("misspelt class", ("--data.engine=lit_rl.VLLMServr",), ("data.engine", "lit_rl.VLLMServr", "VLLMServer")),
    Case("class of another kind", ("--data.engine=lit_rl.GRPO",), ("data.engine", "GRPO", "Engine")),
    Case("unknown objective", ("--model.objective=lit_rl.PPO",), ("model.objective", "PPO", "GRPO")),
    Case("unknown optimizer", ("--model.optimizer=AdamX",), ("model.optimizer", "AdamX")),
    Case(
        "learning rate of a wrong type",
        ("--model.optimizer=AdamW", "--model.optimizer.lr=fast"),
        ("model.optimizer", "fast"),
    ),
    Case("unknown callback", ("--trainer.callbacks+=lit_rl.callbacks.Exprt",), ("trainer.callbacks", "Exprt")),
    # options that cannot work
    Case("one generation", ("--data.num_generations=1",), ("data.num_generations", "1", "at least 2")),
    Case("temperature 0", ("--data.sampling.temperature=0",), ("data.sampling.temperature", "0", "0.01")),
    Case("no rewards", ("--data.rewards=[]",), ("data.rewards", "[]", "at least one")),
    Case("unknown dtype", ("--model.dtype=fp8",), ("model.dtype", "fp8", "bfloat16")),
    Case("unknown attention", ("--model.attention=flash",), ("model.attention", "flash", "auto")),
    Case("negative staleness", ("--staleness.max=-1",), ("staleness.max", "-1", "0 or more")),
    Case("unknown init_kwargs", ("--model.init_kwargs={{dtype: float16}}",), ("model.init_kwargs", "dtype", "model.")),
    # the trainer
    Case("16-mixed", ("--trainer.precision=16-mixed",), ("trainer.precision", "16-mixed", "bf16-mixed")),
    Case("64-true", ("--trainer.precision=64-true",), ("trainer.precision", "64-true", "bf16-mixed")),
    Case("unknown precision", ("--trainer.precision=fp8",), ("trainer.precision", "fp8", "bf16-mixed")),
    Case("a GPU where there is none", ("--trainer.accelerator=gpu",), ("trainer.accelerator", "gpu", "cpu")),
    Case("CUDA where there is none", ("--trainer.accelerator=cuda",), ("trainer.accelerator", "cuda", "cpu")),
    Case("a TPU", ("--trainer.accelerator=tpu",), ("trainer.accelerator", "tpu", "cpu")),
    Case("unknown accelerator", ("--trainer.accelerator=gpuu",), ("trainer.accelerator", "gpuu", "cpu")),
    Case("two devices", ("--trainer.devices=2",), ("trainer.devices", "2", "1")),
    Case("no devices", ("--trainer.devices=0",), ("trainer.devices", "0", "1")),
    Case("two nodes", ("--trainer.num_nodes=2",), ("trainer.num_nodes", "2", "1")),
    Case("ddp", ("--trainer.strategy=ddp",), ("trainer.strategy", "ddp", "auto")),
    Case("fsdp", ("--trainer.strategy=fsdp",), ("trainer.strategy", "fsdp", "auto")),
    Case("fsdp2", ("--trainer.strategy=fsdp2",), ("trainer.strategy", "fsdp2", "auto")),
    Case("deepspeed", ("--trainer.strategy=deepspeed",), ("trainer.strategy", "deepspeed", "auto")),
    Case("fast_dev_run", ("--trainer.fast_dev_run=true",), ("trainer.fast_dev_run", "max_steps")),
    Case("endless", ("--trainer.max_steps=-1", "--trainer.max_epochs=-1"), ("trainer.max_steps", "-1", "max_epochs")),
    Case("negative steps", ("--trainer.max_steps=-5",), ("trainer.max_steps", "-5", "non-negative")),
    Case(
        "no accumulation",
        ("--trainer.accumulate_grad_batches=0",),
        ("trainer.accumulate_grad_batches", "0", "1 or more"),
    ),
    Case("negative clip", ("--trainer.gradient_clip_val=-1",), ("trainer.gradient_clip_val", "-1", "above 0")),
    Case("unknown clip", ("--trainer.gradient_clip_algorithm=l3",), ("trainer.gradient_clip_algorithm", "l3", "norm")),
    Case("unknown profiler", ("--trainer.profiler=fast",), ("trainer.profiler", "fast")),
    Case(
        "folder that cannot be written",
        ("--trainer.default_root_dir=/proc/runs",),
        ("trainer.default_root_dir", "/proc/runs", "folder"),
    ),
    Case(
        "folder that is a file",
        ("--trainer.default_root_dir={folder}/afile",),
        ("trainer.default_root_dir", "afile", "folder"),
        written("afile", ""),
    ),
    Case("missing checkpoint", ("--ckpt_path={folder}/none.ckpt",), ("ckpt_path", "none.ckpt")),
    # the model
    Case(
        "missing model folder",
        ("--model.pretrained={folder}/missing",),
        ("model.pretrained", "missing", "no such folder"),
    ),
    Case(
        "neither folder nor hub",
        ("--model.pretrained=nobody/nothing",),
        ("model.pretrained", "nobody/nothing", "folder"),
    ),
    Case(
        "model that is a file",
        ("--model.pretrained={folder}/afile",),
        ("model.pretrained", "afile", "folder"),
        written("afile", ""),
    ),
    Case(
        "model without config",
        ("--model.pretrained={part}",),
        ("model.pretrained", "part", "config.json"),
        model_without("config.json"),
    ),
    Case(
        "model without weights",
        ("--model.pretrained={part}",),
        ("model.pretrained", "part", "safetensors"),
        model_without("*.safetensors"),
    ),
    Case(
        "model without tokenizer",
        ("--model.pretrained={part}",),
        ("model.tokenizer", "part"),
        model_without("tokenizer*", "chat_template*"),
    ),
    Case(
        "broken weights",
        (*SERVER[:2], "--model.pretrained={part}"),
        ("model.pretrained", "part", "cannot be loaded"),
        broken_weights,
    ),
    Case("missing tokenizer folder", ("--model.tokenizer={folder}/missing",), ("model.tokenizer", "missing", "folder")),
    Case(
        "no chat template",
        ("--model.tokenizer={folder}/plain",),
        ("model.tokenizer", "chat template", "plain-text"),
        tokenizer_without_template,
        train="{{fn: PARTS.chats}}",
    ),
    # the data
    data("no module of the dataset", "{{fn: my_data.load}}", "data.train.fn", "my_data.load", "import path"),
    data("no such dataset function", "{{fn: PARTS.nothing}}", "data.train.fn", "nothing", "function"),
    data("dataset function that is none", "{{fn: PARTS.no_function}}", "data.train.fn", "no_function", "no function"),
    data(
        "dataset function with wrong arguments",
        "{{fn: PARTS.prompts, kwargs: {{sise: 4}}}}",
        "data.train",
        "sise",
        "prompts()",
    ),
    data(
        "dataset function that raises",
        "{{fn: PARTS.broken_set}}",
        "data.train.fn",
        "broken_set",
        "my dataset is broken",
        "wrong_input_parts.py",
    ),
    data("missing dataset folder", "{{path: {folder}/missing}}", "data.train.path", "missing"),
    data("missing dataset file", "{{path: json, data_files: {folder}/missing.jsonl}}", "data.train", "missing.jsonl"),
    data("dataset nowhere", "{{path: nobody/nothing}}", "data.train.path", "nobody/nothing"),
    data(
        "missing split",
        "{{path: json, data_files: {folder}/rows.jsonl, split: test}}",
        "data.train",
        "test",
        around=written("rows.jsonl", '{"prompt": "a"}'),
    ),
    data("unknown key of the dataset", "{{pth: nobody/nothing}}", "data.train", "pth", "path"),
    data("empty dataset", "{{fn: PARTS.prompts, kwargs: {{size: 0}}}}", "data.train", "no rows", "check"),
    Case(
        "empty evaluation set",
        (f"--data.eval={{{{fn: {PARTS}.prompts, kwargs: {{{{size: 0}}}}}}}}",),
        ("data.eval", "no rows", "check"),
    ),
    data("no prompt column", "{{fn: PARTS.questions}}", "data.train", "prompt", "question", "Rename"),
    data("prompts that are numbers", "{{fn: PARTS.numbers}}", "data.train", "5", "give a text"),
    data("reserved column", "{{fn: PARTS.reserved}}", "data.train", "completions", "rename"),
    data("dataset that is a generator", "{{fn: PARTS.generator}}", "data.train", "generator", "datasets.Dataset"),
    # rewards
    Case(
        "no module of the reward",
        ("--data.rewards=[my_rewards.exact]",),
        ("data.rewards", "my_rewards.exact", "module"),
    ),
    Case("no such reward", (f"--data.rewards=[{PARTS}.nothing]",), ("data.rewards", "nothing", "function")),
    Case("reward without module", ("--data.rewards=[exact]",), ("data.rewards", "exact", "import path")),
    Case(
        "reward that is a number",
        (f"--data.rewards=[{PARTS}.no_function]",),
        ("data.rewards", "no_function", "no function"),
    ),
    Case(
        "reward that wants a column that is not there",
        (f"--data.rewards=[{PARTS}.needs_answer]",),
        ("needs_answer", "'answer'"),
        slow=True,
    ),
    Case(
        "two rewards of one name",
        (f"--data.rewards=[{PARTS}.by_length, {PARTS}.by_length]",),
        ("data.rewards", "by_length", "name"),
    ),
    Case("too few rewards", (f"--data.rewards=[{PARTS}.too_few]",), ("too_few", "1 values", "wanted 4"), slow=True),
    Case("rewards that are words", (f"--data.rewards=[{PARTS}.words]",), ("words", "good", "number"), slow=True),
    Case(
        "reward that raises",
        (f"--data.rewards=[{PARTS}.raises]",),
        ("raises", "my reward is broken", "wrong_input_parts.py"),
        slow=True,
    ),
    Case("reward that ends the process", (f"--data.rewards=[{PARTS}.exits]",), ("exit code 3",), slow=True),
    Case("unknown loop", ("--data.loop=my_loops.Loop",), ("data.loop", "my_loops.Loop", "module")),
    # servers
    Case(
        "address without scheme",
        (*SERVER[:1], "--data.engine.url=localhost:8000"),
        ("data.engine.url", "localhost:8000", "http://localhost:8000"),
    ),
    Case("nobody at the address", SERVER, ("{url}", "data.engine.timeout", "launch"), closed_port),
    Case(
        "unknown host",
        (*SERVER[:1], "--data.engine.url=http://no-such-host.invalid:8000", "--data.engine.timeout=2"),
        ("no-such-host.invalid", "data.engine"),
    ),
    Case(
        "server that loads for ever",
        SERVER,
        ("{url}", "data.engine.timeout", "still loading"),
        served({"route": "/health", "status": 503, "body": "still loading"}),
    ),
    Case("another web server", SERVER, ("data.engine.url", "{url}", "no vLLM server", "address"), another_web_server),
    Case("another model", SERVER, ("data.engine.url", "{url}", "other", "model_name"), served(model_name="other")),
    Case(
        "another model, with a W&B run open",
        (*SERVER, "--trainer.logger=WandbLogger", "--trainer.logger.offline=true"),
        ("data.engine.url", "{url}", "other", "model_name"),
        served(model_name="other"),
        slow=True,
    ),
    Case(
        "another served name",
        (*SERVER, "--data.engine.model_name=mine"),
        ("data.engine.model_name", "mine", "tiny"),
        served(),
    ),
    Case("no dev mode", SERVER, ("data.engine.url", "{url}", "VLLM_SERVER_DEV_MODE=1"), served(dev_mode=False)),
    Case(
        "no weight transfer",
        SERVER,
        ("data.engine.url", "{url}", "--weight-transfer-config"),
        served(server_info={"weight_transfer_config": {"backend": "ipc"}}),
    ),
    Case(
        "raw log-probs",
        SERVER,
        ("data.engine.url", "{url}", "--logprobs-mode processed_logprobs"),
        served(server_info={"model_config": {"logprobs_mode": "raw_logprobs"}}),
    ),
    Case("server too short", SERVER, ("data.engine.url", "{url}", "--max-model-len"), served(max_model_len=8)),
    Case(
        "server that refuses the weights",
        SYNC,
        ("/update_weights", "500", "boom"),
        served({"route": "/update_weights", "status": 500, "body": "boom"}),
    ),
    Case(
        "server that never takes the weights",
        SYNC,
        ("/update_weights", "3 s", "weight_sync.timeout"),
        served({"route": "/update_weights", "never": True}),
    ),
    Case(
        "server that hangs up on the weights",
        SYNC,
        ("/update_weights",),
        served({"route": "/update_weights", "close": True}),
    ),
    Case(
        "server that fails every request",
        SYNC,
        ("all failed", "500", "boom"),
        served({"route": GENERATE, "when": asks_for_tokens, "status": 500, "body": "boom"}),
        slow=True,
    ),
    Case(
        "server that refuses every request",
        SYNC,
        ("all failed", "400", "prompt too long"),
        served({"route": GENERATE, "when": asks_for_tokens, "status": 400, "body": "prompt too long"}),
        slow=True,
    ),
    Case(
        "url and urls",
        (*SERVER[:1], "--data.engine.url=http://a:1", "--data.engine.urls=[http://b:1]"),
        ("data.engine.url", "not both"),
    ),
    Case("port in use", (*LAUNCH, "--data.engine.url={url}"), ("data.engine.url", "{url}", "port"), served()),
    Case(
        "server that does not start",
        (*LAUNCH, "--data.engine.extra_args=[--no-such-option]"),
        ("server.log", "no-such-option"),
        slow=True,
    ),
]
