"""What a running server is: asked once at the start, launched and external servers alike."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

from lit_rl.engines import http
from lit_rl.engines.process import Progress
from lit_rl.errors import ServerError, ServerRefused, ServerUnreachable, SettingsError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries weights to a server, by what the server runs on."""
ASK_S = 60.0
"""Seconds that one question may take; ``/server_info`` collects its facts for a few seconds when asked first."""


@dataclass(frozen=True)
class ServerFacts:
    """One server.

    Attributes:
        url: Where it answers.
        version: Of vLLM, as it says; empty where it does not.
        model_names: The names under which it serves.
        model: The model that it was started with.
        max_model_len: Longest prompt and answer together.
        generate_route: Whether the token-in/token-out route is there.
        dev_mode: Whether ``VLLM_SERVER_DEV_MODE=1`` opened the weight-update routes; the fields below need it.
        dtype: In which it computes, for instance ``float32``.
        device: ``cpu``, ``cuda``, ...
        logprobs_mode: ``processed_logprobs`` are those at the sampling temperature.
        max_logprobs: Most candidates that a request may ask for.
        weight_transfer_backend: None where it was started without one.
    """

    url: str
    version: str
    model_names: tuple[str, ...]
    model: str
    max_model_len: int
    generate_route: bool
    dev_mode: bool
    dtype: str = ""
    device: str = ""
    logprobs_mode: str = ""
    max_logprobs: int = 0
    weight_transfer_backend: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class ServerNeeds:
    """What a run wants of its servers; None leaves a point open.

    Attributes:
        model_name: The served name that the user gave.
        model: The model that the trainer trains.
        max_logprobs: Candidates per token that requests will ask for.
        dtype: The trainer's compute dtype; another one is only warned of.
        tokens: Longest prompt and answer together.
        trainer_device: ``cpu`` or ``cuda``.
    """

    model_name: str | None = None
    model: str | None = None
    max_logprobs: int | None = None
    dtype: str | None = None
    tokens: int | None = None
    trainer_device: str = "cpu"


def wait_for_server(url: str, timeout: float, progress: Progress | None = None) -> None:
    """Until an external server answers ``/health``: it may still be loading.

    Raises:
        ServerError: something else than vLLM answers.
        ServerUnreachable: it did not within ``timeout`` seconds.
    """
    started = time.monotonic()
    while True:
        try:
            http.get(url, "/health", timeout=5.0)
            return
        except (ServerUnreachable, ServerRefused) as cause:
            if isinstance(cause, ServerRefused) and cause.status < 500:
                raise ServerError(
                    f"data.engine.url = {url!r}: what answers there is no vLLM server (/health gives {cause.status}); "
                    "give the address of one, or let this run start it: data.engine.launch: true"
                ) from cause
            waited = time.monotonic() - started
            if waited > timeout:
                raise ServerUnreachable(
                    f"no server was ready at {url} within {timeout:g} s (data.engine.timeout): {cause}. Start one with "
                    "`lit-rl serve`, or let this run do it: data.engine.launch: true"
                ) from cause
            if progress is not None:
                progress(waited, str(cause))
            time.sleep(min(0.5, timeout))


def probe(url: str) -> ServerFacts:
    """Asks a server that is ready.

    Raises:
        ServerError: it does not answer, or not as vLLM does.
    """
    try:
        cards = http.get(url, "/v1/models", timeout=ASK_S)["data"]
        config = _config(url)
        return ServerFacts(
            url=url,
            version=_version(url),
            model_names=tuple(str(card["id"]) for card in cards),
            model=str(cards[0].get("root") or cards[0]["id"]),
            max_model_len=int(cards[0]["max_model_len"]),
            generate_route=_has_generate_route(url),
            dev_mode=config is not None,
            **_facts_of(config),
        )
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise ServerError(f"the server at {url} does not describe itself as vLLM does: {cause!r}") from cause


def _version(url: str) -> str:
    try:
        return str(http.get(url, "/version", timeout=ASK_S)["version"])
    except ServerRefused:
        return ""


def _has_generate_route(url: str) -> bool:
    """A request for no tokens is malformed where the route is there (400), forbidden or unknown where it is not.

    Of the malformed requests this is one that vLLM logs in a single line.
    """
    try:
        nothing = {"token_ids": [1], "sampling_params": {"max_tokens": 0}}
        http.post(url, "/inference/v1/generate", nothing, timeout=ASK_S)
    except ServerRefused as refusal:
        return refusal.status in (400, 422)
    return True


def _config(url: str) -> dict[str, Any] | None:
    try:
        return http.get(url, "/server_info?config_format=json", timeout=ASK_S)["vllm_config"]
    except ServerRefused as refusal:
        if refusal.status == 404:
            return None
        raise


def _facts_of(config: dict[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    model, transfer = config["model_config"], config.get("weight_transfer_config")
    return {
        "dtype": str(model["dtype"]).removeprefix("torch."),
        "device": str(config["device_config"]["device"]),
        "logprobs_mode": str(model["logprobs_mode"]),
        "max_logprobs": int(model["max_logprobs"]),
        "weight_transfer_backend": transfer["backend"] if transfer else None,
    }


def require_usable(facts: ServerFacts, needs: ServerNeeds, launched_with: tuple[str, ...] | None = None) -> None:
    """Refuses a server that cannot do what the run needs, all its defects in one message; warns of another dtype.

    Args:
        facts: What it says of itself.
        needs: What the run wants of it.
        launched_with: The user's own options of a server that the run started: all else about it is derived.

    Raises:
        SettingsError: names what is wrong and how to start the server.
    """
    defects = server_defects(facts, needs)
    if defects and launched_with is not None:
        undo = "without an option of yours the derived one holds"
        raise SettingsError("data.engine.extra_args", list(launched_with), "; ".join([*defects, undo]))
    if defects:
        show = "`lit-rl serve --print`, with this run's configuration, shows a command line that has all it needs"
        raise SettingsError("data.engine.url", facts.url, "; ".join([*defects, show]))
    if needs.dtype is not None and facts.dtype != needs.dtype:
        warnings.warn(
            f"the server at {facts.url} computes in {facts.dtype}, the trainer in {needs.dtype}, so their log-probs "
            f"differ. Start the server with --dtype {needs.dtype} (`lit-rl serve` does)",
            stacklevel=2,
        )


def server_defects(facts: ServerFacts, needs: ServerNeeds) -> list[str]:
    """What is wrong with a server, a sentence each."""
    if not facts.dev_mode:
        return ["the server has no weight-update routes; start it with VLLM_SERVER_DEV_MODE=1 in its environment"]
    found = [*_name_defects(facts, needs), *_transfer_defects(facts, needs)]
    if facts.logprobs_mode != "processed_logprobs":
        found.append(
            f"its log-probs are {facts.logprobs_mode!r}, not those at the sampling temperature; start it with "
            "--logprobs-mode processed_logprobs"
        )
    if needs.max_logprobs is not None and 0 <= facts.max_logprobs < needs.max_logprobs:
        found.append(
            f"it gives at most {facts.max_logprobs} log-probs per token, {needs.max_logprobs} are asked for; start it "
            f"with --max-logprobs {needs.max_logprobs}"
        )
    if needs.tokens is not None and facts.max_model_len < needs.tokens:
        found.append(
            f"prompt and answer may have {needs.tokens} tokens, it takes {facts.max_model_len}; lower "
            f"data.max_completion_length or start it with --max-model-len {needs.tokens}"
        )
    return found


def _transfer_defects(facts: ServerFacts, needs: ServerNeeds) -> list[str]:
    """Weights reach a CPU server over gloo, whatever the trainer runs on, and a CUDA server over NCCL, between GPUs."""
    if not facts.is_cpu and needs.trainer_device == "cpu":
        return [
            f"it runs on {facts.device} and the trainer on CPU, and NCCL carries weights between GPUs only; train on a "
            "GPU (trainer.accelerator: gpu), or start a server on CPU"
        ]
    wanted, backend = BACKENDS["cpu" if facts.is_cpu else "cuda"], facts.weight_transfer_backend
    if backend == wanted:
        return []
    has = f"its weight-transfer backend is {backend!r}" if backend else "it was started without weight transfer"
    return [f'{has}; start it with --weight-transfer-config \'{{"backend": "{wanted}"}}\'']


def _name_defects(facts: ServerFacts, needs: ServerNeeds) -> list[str]:
    served = ", ".join(facts.model_names)
    if needs.model_name is not None:
        if needs.model_name in facts.model_names:
            return []
        return [
            f"it serves {served}, not data.engine.model_name = {needs.model_name!r}; give one of its names, or start "
            f"it with --served-model-name {needs.model_name}"
        ]
    if needs.model is None or _same_model(needs.model, facts):
        return []
    return [
        f"it serves {served} (from {facts.model}), the trainer trains {needs.model}; start it with that model, or say "
        f"data.engine.model_name: {facts.model_names[0]} if they are the same"
    ]


def _same_model(model: str, facts: ServerFacts) -> bool:
    """Whether paths or hub ids end in the same name; a folder may lie elsewhere on the server's machine."""
    return _last_part(model) in {_last_part(name) for name in (facts.model, *facts.model_names)}


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]
