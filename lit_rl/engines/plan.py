"""The command line and environment of a vLLM server, as a pure function of the run's settings."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

CPU_KV_CACHE_GIB = 1
CPU_MAX_SEQUENCES = 256
"""Above what a run on CPU has in flight, so that the question of a receipt need not wait for a free place."""
CPU_BLOCK_SIZE = 32
"""Tokens. Only whole blocks are shared by requests, and the default of 128 shares nothing of a short prompt: twice the
rollouts per second on prompts of 45 tokens. 32 is the smallest that CPU attention takes."""
API_SERVERS_ON_CUDA = 8
"""Processes that turn HTTP into engine requests; one of them is the bottleneck above some hundred answers a second."""

ALLOCATOR = {
    # Large blocks come from the heap and stay there: mapping and unmapping them anew costs a third of a CPU step.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}


@dataclass(frozen=True)
class ServerPlan:
    """A server that is to be started.

    Attributes:
        url: Where it will answer.
        model_name: The name under which it serves the model.
        command: The command line.
        env: What is set in its environment on top of the caller's.
    """

    url: str
    model_name: str
    command: tuple[str, ...]
    env: dict[str, str]

    def shell(self) -> str:
        """The plan as a line for a shell."""
        settings = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.env.items())]
        return " ".join([*settings, shlex.join(self.command)])

    def environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """The plan's settings over ours; how vLLM uses the CPU may have been set by hand, and then stays."""
        by_hand = {name: value for name, value in ours.items() if name.startswith("VLLM_CPU_")}
        return {**ours, **self.env, **by_hand}


def plan_server(
    *,
    host: str,
    port: int,
    model: str,
    served_name: str,
    dtype: str,
    max_model_len: int,
    backend: str,
    max_logprobs: int,
    device: str,
    vllm_version: tuple[int, int],
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    revision: str | None = None,
    gpus: tuple[str, ...] = (),
    extra_args: tuple[str, ...] = (),
    cores: int = 2,
    python: str = sys.executable,
) -> ServerPlan:
    """Derives every flag.

    Args:
        host: Where it listens.
        port: Its port.
        model: Hub id or folder.
        served_name: The name that requests give.
        dtype: The trainer's compute dtype, so that log-probs agree.
        max_model_len: Longest prompt and answer together.
        backend: Weight-transfer backend: ``gloo`` or ``nccl``.
        max_logprobs: Most candidates that a request may ask for per token.
        device: ``cpu`` or ``cuda``.
        vllm_version: Major and minor.
        tokenizer: Hub id or folder where it is not the model's own.
        trust_remote_code: Whether code from the checkpoint may run.
        seed: Of sampling; requests to a CPU server carry none of their own.
        revision: Of the checkpoint on the hub.
        gpus: The GPUs that it sees, over which the model is split; none leaves that to vLLM, which takes the first.
        extra_args: Appended; the last of two equal options wins.
        cores: CPU cores of this machine that the run may use.
        python: The interpreter, of an environment in which vLLM and lit_rl are installed.
    """
    # the console script of vllm-cpu looks for a package named vllm and fails
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--served-model-name", served_name]
    command += ["--host", host, "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(max_model_len)]
    # the sampler's log-probs must be those at the sampling temperature, and raw ones are vLLM's default
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(max_logprobs)]
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    command += ["--enable-scale-out"]  # the token-in/token-out route
    api_servers = API_SERVERS_ON_CUDA if device == "cuda" and vllm_version >= (0, 32) else 1
    command += ["--api-server-count", str(api_servers)]
    command += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    if tokenizer is not None and tokenizer != model:
        command += ["--tokenizer", tokenizer]
    command += ["--seed", str(seed)]
    if revision is not None:
        command += ["--revision", revision]
    if trust_remote_code:
        command += ["--trust-remote-code"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **ALLOCATOR}
    if device == "cpu":
        command += ["--enforce-eager", "--max-num-seqs", str(CPU_MAX_SEQUENCES)]
        command += ["--block-size", str(CPU_BLOCK_SIZE)]
        env |= _cpu_env(cores)
    if gpus:
        command += ["--tensor-parallel-size", str(len(gpus))]
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return ServerPlan(f"http://{host}:{port}", served_name, (*command, *extra_args), env)


def server_threads(cores: int) -> int:
    """Threads of a CPU server that shares ``cores`` with the trainer.

    SmolLM2-135M on two cores: two threads that sleep while they wait generate 63 to 87 tokens/s beside a trainer that
    does 70, and 105 to 110 while it waits; vLLM's own choice, one thread bound to one core, 58 beside 81, and 70. On
    many cores the threads of two processes would wait for each other at every operation, so each gets half of them.
    """
    return cores if cores <= 4 else cores // 2


def _cpu_env(cores: int) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(server_threads(cores)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
        # Eager mode still compiles a log-prob helper at the first request, which takes 16 s and gains nothing here.
        "TORCHDYNAMO_DISABLE": "1",
        "LIT_RL_SERVER_SLEEPS": "1",  # see sync/vllm_plugin.py
    }
