"""Stop 14: the receipt of one sync in the making: which sequences, what the servers said before, what they say now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lit_rl.engines.http import Background
from lit_rl.packing.paths import sample_tokens
from lit_rl.settings import EndpointSpec
from lit_rl.sync.receipts import Receipt, judge, server_logprobs
from lit_rl.tensors import StepBatch

PROBE_SEQUENCES = 2
"""Sequences per receipt. Their tokens moved by 1e-2 nats at lr 1e-6, a thousand times the noise of float32."""


class Proof:
    """Questions go to the servers in the background, so that a busy server holds up neither training nor sampling.

    ``Proof(...)`` asks what the servers say before the sync, ``synced`` what they say after it, and ``settle`` judges.

    Args:
        endpoint: The servers.
        probes: Token ids [T] of each sequence.
        longest: Most tokens that a server takes as a prompt, the one that it answers with included.
        timeout: Seconds for each answer.
    """

    def __init__(self, endpoint: EndpointSpec, probes: Sequence[Tensor], longest: int, timeout: float) -> None:
        self._endpoint, self._timeout = endpoint, timeout
        self.probes = [probe[: longest - 1] for probe in probes]
        self._before = self._ask()
        self._after: list[list[Background[np.ndarray]]] | None = None
        self._new: list[np.ndarray] = []

    def synced(self, score: Callable[[Tensor], np.ndarray]) -> None:
        """The weights were sent: notes what the policy says now, and asks the servers.

        Args:
            score: Gives the policy's log-probs [T - 1] of a sequence [T] at temperature 1.
        """
        for answers in self._before:  # asked a step ago; the servers have long answered
            for answer in answers:
                answer.result(self._timeout)
        self._after = self._ask()
        self._new = [score(probe) for probe in self.probes]

    @property
    def ready(self) -> bool:
        """Whether ``settle`` would not wait."""
        return self._after is not None and all(answer.done for answers in self._after for answer in answers)

    def settle(self, dtype: str) -> list[Receipt]:
        """One receipt per server; waits for the answers, the timeout at most.

        Raises:
            ReceiptError: a server does not answer as the policy that was sent.
            ServerError: a server did not answer, or refused.
        """
        assert self._after is not None, "settle comes after synced"
        new = np.concatenate(self._new)
        pairs = zip(self._endpoint.urls, self._after, self._before, strict=True)
        return [
            judge(self._joined(after), new, self._joined(before), dtype=dtype, url=url) for url, after, before in pairs
        ]

    def _ask(self) -> list[list[Background[np.ndarray]]]:
        """All questions to all servers at once: behind a full server each would wait its turn."""

        def ask(url: str, ids: list[int]) -> Background[np.ndarray]:
            name, timeout = self._endpoint.model_name, self._timeout
            return Background(lambda: server_logprobs(url, name, ids, timeout=timeout), f"receipt {url}")

        return [[ask(url, probe.tolist()) for probe in self.probes] for url in self._endpoint.urls]

    def _joined(self, answers: list[Background[np.ndarray]]) -> np.ndarray:
        return np.concatenate([answer.result(self._timeout) for answer in answers])


def probes_of(batch: StepBatch) -> list[Tensor]:
    """Token ids of the step's samples with the largest advantages: they moved most."""
    found: list[tuple[float, Tensor]] = []
    for row in batch.rows:
        strength = torch.zeros(len(row.sample_ids), device=row.terms.advantages.device)
        strength.index_add_(0, row.terms.sample_index, row.terms.advantages.abs())
        order = strength.argsort(descending=True)[:PROBE_SEQUENCES].tolist()
        found += [(float(strength[s]), sample_tokens(row, s)) for s in order]
    found.sort(key=lambda item: -item[0])
    return [tokens for _, tokens in found[:PROBE_SEQUENCES]]
