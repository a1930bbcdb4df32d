"""A sampling server that lives in the test process and has a real (tiny) model: the whole loop without vLLM.

Its routes are the fake server's; its tokens, log-probs and scores come from a copy of the policy, and its weights
travel by copying. ``delivers`` chooses which tensors of a sync really arrive, for the faults that receipts must catch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_rl.engines.base import Engine, EngineNeeds, RunningEngine
from lit_rl.settings import EndpointSpec
from lit_rl.sync.transport import Metadata, Source, SyncTimings
from tests.fakes.server import Answer, Call, FakeServer


class ModelServer(RunningEngine):
    """A running ``TinyEngine``."""

    def __init__(self, engine: TinyEngine, needs: EngineNeeds) -> None:
        self.engine, self.needs = engine, needs
        self.model = AutoModelForCausalLM.from_pretrained(needs.model, dtype=torch.float32).eval()
        # as on the real CPU server: a copy of its own, so that a head that is not sent stays behind
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.generator = torch.Generator().manual_seed(0)
        self.lock = threading.Lock()
        self.server = FakeServer(
            self.sample, score=self.score, model_name="policy", max_model_len=needs.max_model_len
        ).start()
        engine.started.append(self)

    def connect(self) -> tuple[EndpointSpec, int]:
        endpoint = EndpointSpec((self.server.url,), "policy", timeout=self.engine.timeout, generate_route=True)
        return endpoint, self.server.max_model_len

    def transport(self, timeout: float) -> CopyTransport:
        return CopyTransport(self)

    def stop(self) -> None:
        self.server.stop()

    @torch.no_grad()
    def sample(self, call: Call) -> Answer:
        """Samples until ``</s>`` or ``max_tokens``, with processed log-probs, of the most likely tokens too."""
        ids, logprobs, candidates = list(call.prompt_ids), [], []
        temperature, limit = call.sampling["temperature"], call.sampling["max_tokens"]
        with self.lock:
            for _ in range(limit):
                distribution = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1] / temperature, -1)
                token = int(torch.multinomial(distribution.exp(), 1, generator=self.generator))
                ids.append(token)
                logprobs.append(float(distribution[token]))
                likely = distribution.topk(call.sampling.get("logprobs") or 0)
                candidates.append(list(zip(likely.indices.tolist(), likely.values.tolist(), strict=True)))
                if token == 1:
                    break
        answer = ids[len(call.prompt_ids) :]
        return Answer(answer, logprobs, "stop" if answer[-1] == 1 else "length", candidates)

    @torch.no_grad()
    def score(self, ids: list[int]) -> list[float]:
        with self.lock:
            logits = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, :-1], -1)
        return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class CopyTransport:
    """Copies the tensors that the engine delivers."""

    def __init__(self, target: ModelServer) -> None:
        self.target = target
        self.closed = False

    def open(self, metadata: Metadata) -> None:
        names = [name for name, _, _ in metadata]
        assert len(names) == len(set(names))

    def push(self, source: Source, version: int) -> SyncTimings:
        started = time.perf_counter()
        state = self.target.model.state_dict()
        tensors: dict[str, Tensor] = dict(source)
        assert set(tensors) == set(state), set(tensors) ^ set(state)
        with self.target.lock:
            for name, tensor in tensors.items():
                if self.target.engine.delivers(name):
                    state[name].copy_(tensor)
        self.target.server.weights.version = str(version)
        seconds = time.perf_counter() - started
        return SyncTimings(pause_s=0.0, barrier_s=0.0, transfer_s=seconds, total_s=seconds)

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class TinyEngine(Engine):
    """What a test gives as ``engine``.

    Args:
        timeout: Seconds of a request.
        delivers: Whether a tensor of that name arrives.
    """

    timeout: float = 30.0
    delivers: Callable[[str], bool] = lambda name: True
    started: list[ModelServer] = field(default_factory=list)

    def start(self, needs: EngineNeeds) -> RunningEngine:
        return ModelServer(self, needs)
