"""``lit-rl serve``: the derived server as a line for a shell, or started in this terminal."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from lit_rl import PolicyModule, RolloutDataModule, VLLMServer
from lit_rl.cli import main
from lit_rl.engines.plan import ServerPlan
from lit_rl.errors import SettingsError
from lit_rl.serve import fit_line, server_plan

PROMPTS = [{"prompt": "abc"}, {"prompt": "abcdefgh"}]  # the tokenizer makes a token of each character
ROOT = Path(__file__).resolve().parents[2]
DEEPMATH = "lit_rl.tasks.deepmath.deepmath"
FLAGS = {"accelerator": "cpu", "devices": 1, "precision": None}


def planned(model: str, engine: VLLMServer, **flags: Any) -> ServerPlan:
    data = RolloutDataModule(PROMPTS, ["tests.process.rewards_of_tests.always_half"], engine=engine, seed=7)
    return server_plan(PolicyModule(model), data, FLAGS | flags)


def option(plan: ServerPlan, name: str) -> str:
    return plan.command[plan.command.index(name) + 1]


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, setting: str | None = None) -> None:
    """Lets torch see so many GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_a_server_on_cpu_follows_from_the_configuration(tiny_model: str) -> None:
    plan = planned(tiny_model, VLLMServer())

    assert plan.url == "http://localhost:8000"
    assert option(plan, "--max-model-len") == str(8 + 2048)  # longest prompt and completion
    assert [option(plan, name) for name in ("--model", "--dtype", "--seed")] == [tiny_model, "float32", "7"]
    assert option(plan, "--weight-transfer-config") == '{"backend": "gloo"}'


def test_a_server_for_cuda_is_planned_where_there_is_no_gpu(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    plan = planned(tiny_model, VLLMServer(url="http://box:9000"), accelerator="gpu", precision="bf16-mixed")

    assert [option(plan, name) for name in ("--host", "--port", "--dtype")] == ["box", "9000", "bfloat16"]
    assert option(plan, "--weight-transfer-config") == '{"backend": "nccl"}'
    assert "CUDA_VISIBLE_DEVICES" not in plan.env


@pytest.mark.parametrize(
    ("seen", "setting", "engine", "devices", "given"),
    [
        (2, None, VLLMServer(), 1, "1"),  # beside a trainer on GPU 0
        (2, "4,6", VLLMServer(), "1", "6"),
        (3, None, VLLMServer(), [0, 1], "2"),
        (3, None, VLLMServer(), "1,", "0"),
        (1, None, VLLMServer(), 1, None),  # the trainer must be elsewhere: all that is here
        (2, None, VLLMServer(), "auto", None),
        (0, None, VLLMServer(launch=True, devices=(2, 3)), 1, "2,3"),  # for another machine
        (4, None, VLLMServer(launch=True, devices=(0, 1)), 1, "0,1"),
    ],
)
def test_the_gpus_of_a_server(
    tiny_model: str,
    monkeypatch: pytest.MonkeyPatch,
    seen: int,
    setting: str | None,
    engine: VLLMServer,
    devices: Any,
    given: str | None,
) -> None:
    gpus(monkeypatch, seen, setting)

    plan = planned(tiny_model, engine, accelerator="gpu", devices=devices, precision="bf16-true")

    assert plan.env.get("CUDA_VISIBLE_DEVICES") == given


def test_auto_is_a_gpu_where_torch_sees_one(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []
    for count in (0, 1):
        gpus(monkeypatch, count)
        plan = planned(tiny_model, VLLMServer(), accelerator="auto", precision="bf16")
        backends.append(option(plan, "--weight-transfer-config"))

    assert backends == ['{"backend": "gloo"}', '{"backend": "nccl"}']


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        (VLLMServer(urls=("http://a", "http://b")), {}, r"data\.engine\.urls.*serve starts one server"),
        (VLLMServer(url="https://a"), {}, r"data\.engine\.url = 'https://a'.*plain http"),
        (VLLMServer(), {"precision": "16-mixed"}, r"trainer\.precision = '16-mixed'"),
        (VLLMServer(), {"accelerator": "tpu"}, r"trainer\.accelerator = 'tpu': give one of"),
        (VLLMServer(), {"accelerator": "gpu", "devices": "two"}, r"trainer\.devices = 'two': give a number of GPUs"),
        (VLLMServer(launch=True, devices=(1,)), {}, r"data\.engine\.devices = \[1\].*run on CPU"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, engine: VLLMServer, flags: dict[str, Any], words: str
) -> None:
    gpus(monkeypatch, 2)
    with pytest.raises(SettingsError, match=words):
        planned(tiny_model, engine, **flags)


def test_the_line_that_trains_says_that_the_server_runs_and_takes_back_what_only_a_launched_one_has() -> None:
    words = ["serve", "--print", "--config", "my config.yaml"]
    launched = VLLMServer(launch=True, devices=(1,), extra_args=("--seed", "1"))

    key = "--data.engine.init_args."
    told = [f"{key}launch", "false", f"{key}url", "http://h:1"]
    taken_back = [f"{key}devices", "null", f"{key}extra_args", "[]"]
    start = ["lit-rl", "fit", "--config", "my config.yaml"]
    assert shlex.split(fit_line(words, "http://h:1", VLLMServer())) == start + told
    assert shlex.split(fit_line(words, "http://h:1", launched)) == start + told + taken_back


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_model: str, tmp_path: Path) -> Path:
    (tmp_path / "prompts.json").write_text("\n".join(json.dumps(row) for row in PROMPTS))
    written = {
        "trainer": {"accelerator": "cpu", "logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}},
        "model": {"pretrained": tiny_model},
        "data": {
            "train": {"path": "json", "data_files": str(tmp_path / "prompts.json")},
            "rewards": ["tests.process.rewards_of_tests.always_half"],
            "engine": {"class_path": "lit_rl.VLLMServer", "init_args": {"launch": True}},
        },
        "ckpt_path": None,
    }
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(written))
    return file


def test_print_writes_one_line_for_a_shell_to_stdout_and_the_rest_to_stderr(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())

    main(["serve", "--print", "--config", str(config)])

    said = capsys.readouterr()
    [line] = said.out.splitlines()
    words = shlex.split(line)
    assert words[words.index("-m") - 1] == sys.executable
    assert "VLLM_SERVER_DEV_MODE=1" in words[: words.index(sys.executable)]
    assert words[words.index("--max-model-len") + 1] == str(8 + 2048)
    assert "The server will answer at http://localhost:8000" in said.err
    assert f"lit-rl fit --config {config} --data.engine.init_args.launch false" in said.err
    assert set(tmp_path.iterdir()) == before  # no run's folder, no logger's


def test_the_gpu_configuration_asks_for_a_cuda_server(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands in ``configs/``, but with a model and questions that are here."""
    gpus(monkeypatch, 0)
    rows = {"question": ["1 + 1?"], "final_answer": ["2"], "difficulty": [1.0], "topic": ["Sums"]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    here = {"path": "parquet", "data_files": str(tmp_path / "rows.parquet")}
    local = {"model": {"pretrained": tiny_model}, "data": {"train": {"fn": DEEPMATH, "kwargs": here}}}
    (tmp_path / "local.yaml").write_text(json.dumps(local))
    config = ROOT / "configs/grpo_1gpu_plus_server.yaml"

    main(["serve", "--print", "--config", str(config), "--config", str(tmp_path / "local.yaml")])

    words = shlex.split(capsys.readouterr().out)
    options = dict(itertools.pairwise(words))
    assert options["--weight-transfer-config"] == '{"backend": "nccl"}'
    assert (options["--dtype"], options["--api-server-count"]) == ("bfloat16", "8")
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert 2048 < int(options["--max-model-len"]) < 2048 + 200
    assert "VLLM_SERVER_DEV_MODE=1" in words


def test_a_port_in_use_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(SystemExit) as end:
            main(["serve", "--config", str(config), "--data.engine.init_args.url", url])

    assert end.value.code == 1
    assert f"data.engine.url = '{url}'" in capsys.readouterr().err


def test_a_server_for_cuda_is_not_started_where_there_is_no_gpu(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", str(config), "--trainer.accelerator", "gpu"])

    assert end.value.code == 1
    words = "no server can be started here: torch sees no CUDA GPU"
    assert words in capsys.readouterr().err


def test_an_unknown_key_is_refused_as_in_fit(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", str(config), "--data.engine.init_args.port", "1"])

    assert end.value.code != 0
    said = capsys.readouterr().err
    assert "data.engine" in said and "port" in said


FAKE_VLLM = """
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], os.environ["VLLM_SERVER_DEV_MODE"]]))
"""


def test_without_print_the_process_becomes_the_server(config: Path, tmp_path: Path) -> None:
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE_VLLM)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    command = [sys.executable, "-m", "lit_rl", "serve", "--config", str(config), "--data.engine.init_args.url"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command.append(f"http://127.0.0.1:{probe.getsockname()[1]}")
    paths = f"{tmp_path / 'fake'}{os.pathsep}{Path(__file__).resolve().parents[2]}"

    run = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = run.communicate(timeout=200)

    assert run.returncode == 0, err
    pid, arguments, dev_mode = json.loads(out)
    assert pid == run.pid  # signals reach vLLM itself
    assert arguments[arguments.index("--port") + 1] == command[-1].rpartition(":")[2]
    assert dev_mode == "1"
    assert f"--data.engine.init_args.url {command[-1]}" in err
