"""vLLM servers as the configuration names them: addresses, or a server that the run starts itself."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lit_rl.engines import gpus
from lit_rl.engines.base import Engine, EngineNeeds, RunningEngine
from lit_rl.engines.installed import expected_version, obstacle_to_serving
from lit_rl.engines.plan import ServerPlan, plan_server
from lit_rl.engines.probe import BACKENDS, ServerFacts, ServerNeeds, probe, require_usable, wait_for_server
from lit_rl.engines.process import ServerProcess, free_port
from lit_rl.errors import SettingsError
from lit_rl.settings import EndpointSpec, require

if TYPE_CHECKING:
    from lit_rl.sync.transport import Transport

logger = logging.getLogger(__name__)

DEFAULT_URL = "http://localhost:8000"
PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True)
class VLLMServer(Engine):
    """Where tokens come from: vLLM servers.

    Args:
        url: Address of a server that runs already, or where a launched one is to answer; by default
            ``http://localhost:8000``, or a free port of this machine under ``launch``.
        urls: Several servers; requests are spread over them and all of them get the weights.
        model_name: The name under which the model is served; by default that of the server.
        timeout: Seconds for a loading server, for each request and for each weight sync.
        launch: Whether the run starts a server itself, with flags that follow from its other settings, and ends it.
        devices: GPUs of a launched server, by their places among those that the trainer sees; the model is split over
            them. By default the first one that the trainer does not use.
        transfer_port: Where servers find the trainer for a weight sync; a launched server is given a free one.
        log_file: Log of a launched server; ``server.log`` in the run's folder by default.
        extra_args: More options of a launched server's command line; they win over the derived ones.
    """

    url: str | None = None
    urls: tuple[str, ...] | None = None
    model_name: str | None = None
    timeout: float = 1800.0
    launch: bool = False
    devices: tuple[int, ...] | None = None
    transfer_port: int = 51216
    log_file: str | None = None
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require("data.engine.timeout", self.timeout, self.timeout > 0, "give seconds above 0")
        port_ok = 0 <= self.transfer_port < 65536
        require("data.engine.transfer_port", self.transfer_port, port_ok, "give a port, or 0 for a free one")
        require("data.engine.urls", self.urls, not (self.url and self.urls), "give url or urls, not both")
        require("data.engine.urls", self.urls, self.urls is None or len(self.urls) > 0, "give at least one address")
        require("data.engine.urls", self.urls, not (self.launch and self.urls), "launch starts one server: give url")
        require("data.engine.extra_args", self.extra_args, self.launch or not self.extra_args, "they need launch: true")
        require("data.engine.log_file", self.log_file, self.launch or self.log_file is None, "it needs launch: true")
        if self.devices is not None:
            once_each = 0 < len(self.devices) == len(set(self.devices)) and min(self.devices) >= 0
            require(gpus.KEY, list(self.devices), self.launch, "they are a launched server's: it needs launch: true")
            require(gpus.KEY, list(self.devices), once_each, "give places of GPUs, counted from 0, each once")
        for address in self.addresses:
            _check_address(address)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Base URLs of servers that run already; the launched one's only where the user gave it."""
        if self.urls is not None:
            return tuple(url.rstrip("/") for url in self.urls)
        if self.url is not None:
            return (self.url.rstrip("/"),)
        return () if self.launch else (DEFAULT_URL,)

    def plan(self, needs: EngineNeeds, *, port: int = 8000, vllm_version: tuple[int, int] | None = None) -> ServerPlan:
        """The server that this run would launch.

        Args:
            needs: What the run asks of it.
            port: Where no url is given.
            vllm_version: Major and minor; of the installed vLLM by default, or else the pinned one.

        Raises:
            SettingsError: the GPUs that it is to get are not there, or the trainer's.
        """
        parts = urlsplit(self.url) if self.url is not None else None
        return plan_server(
            host=(parts.hostname or "127.0.0.1") if parts else "127.0.0.1",
            port=(parts.port or 80) if parts else port,
            model=needs.model,
            served_name=self.model_name or needs.model,
            dtype=needs.dtype,
            max_model_len=needs.max_model_len,
            backend=BACKENDS[needs.device],
            max_logprobs=max(needs.max_logprobs, 1),
            device=needs.device,
            vllm_version=vllm_version or expected_version(),
            tokenizer=needs.tokenizer,
            trust_remote_code=needs.trust_remote_code,
            seed=needs.seed,
            revision=needs.revision,
            gpus=self._gpus(needs),
            extra_args=self.extra_args,
            cores=len(os.sched_getaffinity(0)),
        )

    def _gpus(self, needs: EngineNeeds) -> tuple[str, ...]:
        if needs.device == "cuda":
            return gpus.server_gpus(self.devices, trainer=needs.trainer_devices, visible=needs.visible_devices)
        if self.devices is not None:
            raise SettingsError(gpus.KEY, list(self.devices), "trainer and server run on CPU here; leave it out")
        return ()

    def start(self, needs: EngineNeeds) -> VLLMRun:
        """Launches the server where that is asked for; waits for nothing.

        Raises:
            SettingsError: no vLLM here, lit_rl is not its plugin, no GPU for it, or the port is taken.
        """
        if not self.launch:
            return VLLMRun(self, needs, None)
        plan = self.plan(needs, port=free_port())
        obstacle = obstacle_to_serving(needs.device)
        require("data.engine.launch", True, obstacle is None, f"{obstacle}, or give data.engine.url and launch: false")
        log_file = Path(self.log_file) if self.log_file is not None else needs.run_dir / "server.log"
        process = ServerProcess(plan, log_file)
        process.start()
        logger.info("starting vLLM at %s, log in %s", process.url, log_file)
        return VLLMRun(self, needs, process)


class VLLMRun(RunningEngine):
    """Servers of one run: found at their addresses, or started by it.

    Args:
        engine: As named in YAML.
        needs: What the run asks of its servers.
        process: The launched server; None where servers run already.
    """

    def __init__(self, engine: VLLMServer, needs: EngineNeeds, process: ServerProcess | None) -> None:
        self.engine, self.needs, self.process = engine, needs, process
        self.urls = (process.url,) if process is not None else engine.addresses
        self.facts: tuple[ServerFacts, ...] = ()

    def connect(self) -> tuple[EndpointSpec, int]:
        self.facts = tuple(self._asked(url) for url in self.urls)
        return self._endpoint(), min(facts.max_model_len for facts in self.facts)

    def _asked(self, url: str) -> ServerFacts:
        """Waits for one server, visibly, and checks it."""
        progress, timeout = _Progress(url), self.engine.timeout
        if self.process is not None:
            self.process.wait_ready(timeout, progress)
        else:
            wait_for_server(url, timeout, progress)
        facts = probe(url)
        wanted = ServerNeeds(
            model_name=self.engine.model_name,
            model=self.needs.model,
            max_logprobs=self.needs.max_logprobs,
            dtype=self.needs.dtype,
            tokens=self.needs.max_model_len,
            trainer_device=self.needs.device,
        )
        require_usable(facts, wanted, self.engine.extra_args if self.process is not None else None)
        return facts

    def _endpoint(self) -> EndpointSpec:
        name = self.engine.model_name or self.facts[0].model_names[0]
        for facts in self.facts:
            served = name in facts.model_names
            require("data.engine.urls", facts.url, served, f"it serves {facts.model_names}, the first one {name!r}")
        return EndpointSpec(
            urls=self.urls,
            model_name=name,
            timeout=self.engine.timeout,
            generate_route=all(facts.generate_route for facts in self.facts),
            # a seeded request whose prefill is chunked ends a CPU engine
            send_seeds=not any(facts.is_cpu for facts in self.facts),
        )

    def transport(self, timeout: float) -> Transport:
        from lit_rl.sync.gloo import GlooTransport
        from lit_rl.sync.nccl import NCCLTransport

        on_cpu = {facts.is_cpu for facts in self.facts}
        require("data.engine.urls", self.urls, len(on_cpu) == 1, "some run on CPU and some on GPUs; give one kind")
        # a server that this run started is on this machine, where any free port will do
        port = 0 if self.process is not None else self.engine.transfer_port
        carrier = GlooTransport if on_cpu == {True} else NCCLTransport
        return carrier(self.urls, timeout=timeout, port=port)

    def check_alive(self, patience: float = 0.0) -> None:
        if self.process is not None:
            self.process.check_alive(patience)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.stop()


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    try:
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        fine = False
    require("data.engine.url", address, fine, "give an address such as http://localhost:8000")


class _Progress:
    """Says now and then that a server is awaited, and what it is doing."""

    def __init__(self, url: str) -> None:
        self._url, self._next = url, PROGRESS_EVERY_S

    def __call__(self, waited: float, doing: str) -> None:
        if waited >= self._next:
            self._next = waited + PROGRESS_EVERY_S
            line = f"waiting for vLLM at {self._url}: {waited:.0f} s  {doing[:100]}".rstrip()
            print(line, file=sys.stderr, flush=True)  # noqa: T201
