"""Stop 14: proof that a weight sync arrived.

A server can accept every call and deliver nothing, or leave a tied head behind, and a fixed test sentence hardly shows
it: at a learning rate of 1e-6 its log-probs move by 3e-4 nats in a step, those of the tokens just trained by 2e-2. So
tokens of the step just trained are scored on the server, and must be where the new policy says. What is left of the
difference, as a mean over tokens of SmolLM2-135M in float32 after one such step:

================================ ==============
a correct sync                   2e-5 at most
only the head left behind        3e-4
nothing delivered                1e-2 to 3e-2
================================ ==============
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lit_rl.engines.http import post
from lit_rl.errors import ReceiptError, ServerError


class Precision(NamedTuple):
    """What two correct implementations of one policy may differ by, as a mean over tokens, in nats.

    Attributes:
        tolerance: Above it something is wrong, whatever moved.
        noise: A move below it cannot be told from rounding.
    """

    tolerance: float
    noise: float


PRECISIONS = {
    # between 2e-5 of a correct sync and 3e-4 of a head left behind; see above
    "float32": Precision(tolerance=1e-4, noise=1e-4),
    "float16": Precision(tolerance=2e-2, noise=1e-2),
    "bfloat16": Precision(tolerance=1e-1, noise=5e-2),
}
PRECISIONS["auto"] = PRECISIONS["bfloat16"]  # whatever the checkpoint has: the widest

MISSING = 0.25
"""Largest share of a move that may be missing. It tells nothing from everything where ``tolerance`` is wide: the answer
is then at least three times as far from the old policy as from the new one."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """How server and policy agree after a sync.

    Attributes:
        error: Mean absolute log-prob difference between server and new policy.
        moved: Mean absolute log-prob difference between new policy and the server before the sync; NaN if not known.
        conclusive: Whether the tokens moved by more than rounding, so that a sync of nothing would have shown.
    """

    error: float
    moved: float
    conclusive: bool


def server_logprobs(url: str, model_name: str, token_ids: Sequence[int], *, timeout: float) -> np.ndarray:
    """[T - 1] float64: the server's log-prob of tokens 1 ... T - 1, each given those before it, at temperature 1.

    vLLM reports prompt log-probs from the raw logits whatever temperature and log-prob mode are set, and computes them
    anew without reading cached prefixes.

    Args:
        url: The server.
        model_name: As it is served.
        token_ids: [T] the sequence.
        timeout: Seconds for the answer.

    Raises:
        ServerError: no answer, a refusal, or an answer without these log-probs.
    """
    ids = [int(token) for token in token_ids]
    body = {"model": model_name, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = post(url, "/v1/completions", body, timeout=timeout)
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        return np.array([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)])
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise ServerError(
            f"{url}/v1/completions did not give the log-prob of each of the {len(ids)} prompt tokens; is it vLLM?"
        ) from cause


def judge(
    server: np.ndarray, new: np.ndarray, old: np.ndarray | None = None, *, dtype: str = "float32", url: str = ""
) -> Receipt:
    """Says whether the server holds the new policy.

    Example in float32: a step moved the policy by 0.02 on average. A server that is 1e-5 away from it passes, one that
    is 3e-4 away fails (its head was left behind), and so does one that is 0.02 away (nothing arrived). In bfloat16,
    where two correct implementations differ by 0.02, a move of 0.2 must have arrived for three quarters.

    Args:
        server: [N] log-probs of the server after the sync.
        new: [N] log-probs of the policy that was sent, at temperature 1.
        old: [N] log-probs of the server before the sync.
        dtype: In which both compute.
        url: Names the server in the message.

    Raises:
        ReceiptError: the server answers otherwise than the policy that was sent.
    """
    precision = PRECISIONS[dtype.removeprefix("torch.")]
    error = _distance(server, new)
    moved = float("nan") if old is None else _distance(new, old)
    conclusive = moved > precision.noise
    where = f" at {url}" if url else ""
    if not error <= precision.tolerance:
        raise ReceiptError(
            f"the weights were accepted but did not arrive{where}: its log-probs differ from the policy's by "
            f"{error:.2e} nats on average, {dtype} allows {precision.tolerance:.0e}. Does the server run the same "
            "model and dtype, and does its weight-transfer engine load every tensor?"
        )
    if conclusive and error > MISSING * moved:
        raise ReceiptError(
            f"the weights were accepted but did not arrive{where}: the step moved the log-probs of its tokens by "
            f"{moved:.2e} nats on average, and the server is still {error:.2e} away from the new policy "
            f"({_distance(server, old):.2e} from where it was). Its weight-transfer engine left tensors behind."
        )
    return Receipt(error, moved, conclusive)


def _distance(a: np.ndarray, b: np.ndarray | None) -> float:
    """Mean absolute difference; NaN where a value is not finite."""
    assert b is not None
    return float(np.mean(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
