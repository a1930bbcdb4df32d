"""A fake vLLM server for tests: the routes of vLLM 0.32 that lit_rl uses, without a model.

It answers as the real one does (same routes, fields, defaults, error bodies and refusals), from a function that turns a
prompt into tokens, and records every request. Misbehaviour is scripted by request::

    with FakeServer(answer=lambda call: Answer([5, 6, 2])) as server:
        server.script("/v1/completions", nth={2}, status=500, body="boom")   # the third request is refused
        server.script("/update_weights", never=True)                         # no answer, ever
        ...
        assert len(server.calls("/v1/completions")) == 4

The server lives in a thread of the test process; ``python -m tests.fakes.server --port 8000`` runs it as a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from tests.fakes import wire

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_POLL_S = 0.005


@dataclass
class Call:
    """One request that arrived.

    Attributes:
        route: The path.
        body: The JSON body ({} without one).
        query: The query parameters.
        number: Counts the requests of this route from 0.
        at: ``time.monotonic()`` of its arrival.
        answered: Whether an answer went out.
    """

    route: str
    body: dict[str, Any]
    query: dict[str, str]
    number: int
    at: float
    answered: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt of a generation request, on either route."""
        return self.body["token_ids"] if self.route == GENERATE else self.body["prompt"]

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling fields of a generation request, on either route."""
        return self.body["sampling_params"] if self.route == GENERATE else self.body


@dataclass
class Answer:
    """What the fake model says.

    Attributes:
        token_ids: The sampled tokens; cut at ``max_tokens`` (and then finished by ``length``) as the real server does.
        log_probs: One per token; -0.5 each by default.
        finish_reason: ``stop`` or ``length``.
        candidates: Per token its most likely tokens as (id, log-prob), best first; only the sampled one by default.
        sampling_mask: Per token the ids that could have been sampled (generate route only).
        weight_versions: Spans (label, start, end); the server's current label over all tokens by default.
        text: The decoded text; a placeholder by default.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    finish_reason: str = "stop"
    candidates: list[list[tuple[int, float]]] | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[tuple[str, int, int]] | None = None
    text: str | None = None


@dataclass
class Rule:
    """Scripted misbehaviour of one route; the first rule that matches a request acts."""

    route: str
    nth: Collection[int] | None = None
    when: Callable[[Call], bool] | None = None
    status: int | None = None
    body: str = "scripted failure"
    delay: float = 0.0
    hold: threading.Event | None = None
    never: bool = False
    close: bool = False

    def matches(self, call: Call) -> bool:
        if call.route != self.route or (self.nth is not None and call.number not in self.nth):
            return False
        return self.when is None or self.when(call)


@dataclass
class WeightState:
    """Where the weight-update routes stand."""

    version: str = "default"
    initialised: dict[str, Any] | None = None
    updating: bool = False
    updates: list[Any] = field(default_factory=list)
    paused: bool = False
    pause_mode: str | None = None


_current: ContextVar[Call] = ContextVar("call")


def default_answer(call: Call) -> Answer:
    """Three tokens that depend on prompt and request number, then the end token 2."""
    seed = sum(call.prompt_ids) + 31 * call.number
    return Answer([10 + (seed * k) % 89 for k in (1, 3, 7)] + [2])


class FakeServer:
    """The server; use as a context manager or with ``start`` and ``stop``.

    Args:
        answer: Turns a generation request into its answer.
        model_name: The served name; another one is refused with 404 as the real server does.
        max_model_len: Prompt and answer may have so many tokens.
        generate_route: Whether ``/inference/v1/generate`` answers (``--enable-scale-out``), or with 403.
        dev_mode: Whether the weight-update routes exist.
        server_info: Overrides of ``/server_info``'s ``vllm_config``, by section.
        score: Log-probs that ``prompt_logprobs`` reports for tokens 1, 2, ... of a prompt (list of length T - 1).
        latency: Seconds that each generation takes.
        host: Where it listens.
        port: 0 = a free one.
    """

    def __init__(
        self,
        answer: Callable[[Call], Answer] = default_answer,
        *,
        model_name: str = "fake-model",
        max_model_len: int = 4096,
        generate_route: bool = True,
        dev_mode: bool = True,
        server_info: dict[str, dict[str, Any]] | None = None,
        score: Callable[[list[int]], list[float]] | None = None,
        latency: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.answer, self.model_name, self.max_model_len = answer, model_name, max_model_len
        self.generate_route, self.dev_mode = generate_route, dev_mode
        self.info = wire.vllm_config(model_name, max_model_len, server_info or {})
        self.score = score or (lambda ids: [-1.0] * (len(ids) - 1))
        self.latency, self.host, self.port = latency, host, port
        self.weights = WeightState()
        self.requests: list[Call] = []
        self.rules: list[Rule] = []
        self.metrics: dict[str, float] = dict(wire.METRICS)
        self.running = 0
        self.max_running = 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_async: asyncio.Event | None = None

    # --- for tests

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def calls(self, route: str | None = None) -> list[Call]:
        """The requests so far, of one route or of all."""
        with self._lock:
            return [c for c in self.requests if route is None or c.route == route]

    @property
    def generations(self) -> list[Call]:
        """The generation requests so far, on either route."""
        return [c for c in self.calls() if c.route in (GENERATE, COMPLETIONS)]

    def script(self, route: str, **behaviour: Any) -> Rule:
        """Adds a ``Rule``; returns it, so that a test can take it out of ``rules`` again."""
        rule = Rule(route, **behaviour)
        self.rules.append(rule)
        return rule

    def wait_for(self, condition: Callable[[Self], bool], timeout: float = 10.0) -> None:
        """Waits until ``condition(self)``; raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not condition(self):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the fake server saw {[c.route for c in self.calls()]}")
            time.sleep(_POLL_S)

    def start(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="fake-vllm", daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the fake server did not start")
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is None or self._loop is None or self._stop_async is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop may have ended already
            self._loop.call_soon_threadsafe(self._stop_async.set)
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the server

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as cause:  # noqa: BLE001  (handed to start(), which raises it)
            self._failure = cause
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop_async = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self.host, self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop_async.wait()
        await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**28, middlewares=[self._record])
        routes: dict[tuple[str, str], Callable[[Call], Any]] = {
            ("GET", "/health"): lambda call: web.Response(),
            ("GET", "/version"): lambda call: web.json_response({"version": wire.VERSION}),
            ("GET", "/v1/models"): lambda call: web.json_response(wire.models(self.model_name, self.max_model_len)),
            ("GET", "/metrics"): lambda call: web.Response(text=wire.metrics_text(self.metrics, self.running)),
            ("POST", COMPLETIONS): self._completions,
        }
        routes["POST", GENERATE] = self._generate if self.generate_route else self._disabled
        if self.dev_mode:
            routes |= self._dev_routes()
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, self._adapted(handler))
        return app

    def _dev_routes(self) -> dict[tuple[str, str], Callable[[Call], Any]]:
        return {
            ("GET", "/server_info"): self._server_info,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): lambda call: web.json_response({"is_paused": self.weights.paused}),
            ("POST", "/init_weight_transfer_engine"): self._init_transfer,
            ("POST", "/shutdown_weight_transfer_engine"): lambda call: _message("Weight transfer shut down"),
            ("POST", "/start_weight_update"): self._start_update,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish_update,
            ("GET", "/weight_info"): lambda call: web.json_response({"weight_version": self.weights.version}),
            ("GET", "/get_world_size"): lambda call: web.json_response({"world_size": 1}),
            ("POST", "/reset_prefix_cache"): lambda call: web.Response(),
        }

    def _adapted(self, handler: Callable[[Call], Any]) -> Callable[[web.Request], Any]:
        async def adapted(request: web.Request) -> web.StreamResponse:
            result = handler(_current.get())
            return await result if asyncio.iscoroutine(result) else result

        return adapted

    @web.middleware
    async def _record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Records the request, then lets the first matching rule act before (or instead of) the handler."""
        text = await request.text()
        try:
            body = json.loads(text) if text else {}
        except json.JSONDecodeError as cause:
            return _error(400, f"JSON decode error: {cause}")
        with self._lock:
            number = self._counts[request.path]
            self._counts[request.path] += 1
            call = Call(request.path, body, dict(request.query), number, time.monotonic())
            self.requests.append(call)
            rule = next((r for r in self.rules if r.matches(call)), None)
        _current.set(call)
        refused = await self._act(rule, request) if rule else None
        response = refused if refused is not None else await handler(request)
        call.answered = True
        return response

    async def _act(self, rule: Rule, request: web.Request) -> web.StreamResponse | None:
        if rule.delay:
            await asyncio.sleep(rule.delay)
        while rule.never or (rule.hold is not None and not rule.hold.is_set()):
            if self._stopping.is_set():
                raise web.HTTPServiceUnavailable
            await asyncio.sleep(_POLL_S)
        if rule.close and request.transport is not None:
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        if rule.status is not None and rule.status >= 500 and rule.route == "/update_weights":
            self.weights.updating = False  # an update that raises in the real server's worker ends the update
        return None if rule.status is None else _error(rule.status, rule.body)

    # --- generation

    def _refusal(self, call: Call) -> web.Response | None:
        """The refusals of the real server that a client can run into."""
        needed = ("token_ids", "sampling_params") if call.route == GENERATE else ("prompt",)
        missing = [name for name in needed if name not in call.body]
        if missing:
            return _error(400, f"1 validation error: {missing} Field required", "Bad Request")
        model = call.body.get("model")
        if model not in (None, self.model_name):
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError")
        prompt, wanted = call.prompt_ids, call.sampling.get("max_tokens") or 16
        if call.sampling.get("max_tokens") == 0:
            return _error(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        if not prompt:
            return _error(400, "Either prompt or prompt_embeds must be provided and non-empty.")
        if call.route == COMPLETIONS and len(prompt) + wanted > self.max_model_len or len(prompt) >= self.max_model_len:
            limit = f"This model's maximum context length is {self.max_model_len} tokens."
            return _error(400, f"{limit} You requested {wanted} output tokens and {len(prompt)} prompt tokens.")
        asked = max(call.sampling.get("logprobs") or 0, call.sampling.get("prompt_logprobs") or 0)
        allowed = self.info["model_config"]["max_logprobs"]
        if asked > allowed:
            return _error(400, f"Requested sample logprobs of {asked}, which is greater than max allowed: {allowed}")
        return None

    async def _sampled(self, call: Call) -> tuple[Answer, str]:
        """The answer, after latency and pauses, and the label of the weights that gave it."""
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            while self.weights.paused and not self._stopping.is_set():
                if self.weights.pause_mode == "abort":
                    return Answer([], [], "abort"), self.weights.version
                await asyncio.sleep(_POLL_S)
            return wire.cut(self.answer(call), call.sampling.get("max_tokens") or 16), self.weights.version
        finally:
            self.running -= 1

    async def _generate(self, call: Call) -> web.Response:
        refused = self._refusal(call)
        if refused is not None:
            return refused
        answer, label = await self._sampled(call)
        return web.json_response(wire.generate_response(call, answer, label, self.score))

    def _disabled(self, call: Call) -> web.Response:
        words = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        return _error(403, words, "PermissionDeniedError")

    async def _completions(self, call: Call) -> web.Response:
        refused = self._refusal(call)
        if refused is not None:
            return refused
        answer, _ = await self._sampled(call)
        return web.json_response(wire.completion_response(call, answer, self.model_name, self.score))

    # --- weights

    def _server_info(self, call: Call) -> web.Response:
        as_json = call.query.get("config_format") == "json"
        config: Any = self.info if as_json else str(self.info)
        env = {"VLLM_SERVER_DEV_MODE": True, "VLLM_TARGET_DEVICE": "cpu"}
        return web.json_response({"vllm_config": config, "vllm_env": env, "system_env": {"is_cuda_available": "False"}})

    def _pause(self, call: Call) -> web.Response:
        self.weights.paused, self.weights.pause_mode = True, call.query.get("mode", "abort")
        return web.json_response({"status": "paused"})

    def _resume(self, call: Call) -> web.Response:
        self.weights.paused, self.weights.pause_mode = False, None
        return web.json_response({"status": "resumed"})

    def _init_transfer(self, call: Call) -> web.Response:
        self.weights.initialised = call.body["init_info"]
        return _message("Weight transfer initialized")

    def _start_update(self, call: Call) -> web.Response:
        if self.weights.updating:
            return _error(500, "start_weight_update called while a weight update is already active.")
        self.weights.updating = True
        return _message("Weight update started")

    def _update(self, call: Call) -> web.Response:
        if self.weights.initialised is None:
            return _error(500, "Weight transfer not initialized. Call init_transfer_engine() first.")
        if not self.weights.updating:
            return _error(500, "start_weight_update must be called before update_weights.")
        self.weights.updates.append(call.body["update_info"])
        return _message("Weights updated")

    def _finish_update(self, call: Call) -> web.Response:
        if not self.weights.updating:
            return _error(500, "finish_weight_update called without a matching start_weight_update.")
        self.weights.updating = False
        if call.body.get("weight_version") is not None:
            self.weights.version = call.body["weight_version"]
        return _message("Weight update finished")


def _message(text: str) -> web.Response:
    return web.json_response({"message": text})


def _error(status: int, message: str, kind: str | None = None) -> web.Response:
    kind = kind or ("BadRequestError" if status < 500 else "InternalServerError")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


def main() -> None:
    """Runs the fake as a process; options of the real server that it does not know are ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="fake-model")
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument("--max-model-len", type=int, default=4096)
    given, _ = parser.parse_known_args()
    name = given.served_model_name or given.model
    server = FakeServer(model_name=name, max_model_len=given.max_model_len, host=given.host, port=given.port)
    with server:
        print(f"fake vLLM at {server.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
