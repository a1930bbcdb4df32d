"""One real vLLM server per session, launched as a run launches it, and a policy with the same weights beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_rl.engines import http
from lit_rl.engines.base import EngineNeeds
from lit_rl.engines.vllm_server import VLLMRun, VLLMServer
from lit_rl.settings import EndpointSpec
from lit_rl.sync.receipts import server_logprobs
from tests.fakes.tiny import save_tiny_model

MODEL_VARIABLE = "LIT_RL_TEST_MODEL"
"""Folder of a real model for these tests; without it a tiny random Llama is made."""

START_S = 600.0

TEXT = (
    "In the morning the two friends walked down to the harbour, where the boats had just come in with the first catch "
    "of the year. They talked for a while with the fishermen about the weather and the price of herring, and then they "
    "bought bread and coffee from the woman at the corner, who had known them since they were children. It was still "
    "cold, but the sun stood over the roofs, and by noon the whole town would be on its feet, because tomorrow was the "
    "day of the regatta and nothing at all was ready: neither the flags nor the music nor the table in the square."
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get(MODEL_VARIABLE)
    return Path(given) if given else save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tokens(model_dir: Path) -> list[int]:
    """100 tokens of plain English: what a model knows is scored more exactly than what it finds absurd."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir).encode(TEXT)[:100]


@dataclass
class RealServer:
    """The session's server."""

    run: VLLMRun
    endpoint: EndpointSpec
    max_model_len: int

    @property
    def url(self) -> str:
        return self.endpoint.urls[0]

    def generate(self, token_ids: list[int], **sampling: Any) -> dict[str, Any]:
        """The first choice of the token-in/token-out route."""
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True}
        body = {"model": self.endpoint.model_name, "token_ids": token_ids, "sampling_params": neutral | sampling}
        return http.post(self.url, "/inference/v1/generate", body, timeout=120)["choices"][0]

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        return server_logprobs(self.url, self.endpoint.model_name, token_ids, timeout=120)


def engine_needs(model_dir: Path, run_dir: Path) -> EngineNeeds:
    return EngineNeeds(
        model=str(model_dir),
        tokenizer=str(model_dir),
        dtype="float32",
        longest_prompt=384,
        max_completion_length=128,
        max_logprobs=4,
        device="cpu",
        trust_remote_code=False,
        run_dir=run_dir,
    )


@pytest.fixture(scope="session")
def real_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    engine = VLLMServer(launch=True, model_name="policy", timeout=START_S)
    run = engine.start(engine_needs(model_dir, tmp_path_factory.mktemp("server")))
    try:
        yield RealServer(run, *run.connect())
    finally:
        run.stop()


class TrainedPolicy:
    """The trainer's side: a policy whose weights tests move, and what it says of tokens."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.no_grad()
    def move(self, seed: int, size: float = 0.02) -> None:
        """Every weight by noise of ``size`` times its tensor's standard deviation."""
        noise = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * size * parameter.std())

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[T - 1] log-probs of tokens 1 ... T - 1."""
        logits = self.model(torch.tensor([token_ids])).logits[0, :-1].double() / temperature
        wanted = torch.tensor(token_ids[1:])[:, None]
        return logits.log_softmax(-1).gather(1, wanted)[:, 0].numpy()


@pytest.fixture(scope="session")
def policy(model_dir: Path) -> TrainedPolicy:
    """Shared: its weights and the server's wander together from test to test."""
    return TrainedPolicy(model_dir)
