"""Stop 3: token-in/token-out requests to the sampling servers.

Where the servers have ``/inference/v1/generate`` it is used: candidates come by token id, and each token with the label
of the weights that gave it. Else ``/v1/completions`` with ``return_token_ids``. Every sampling field is sent, neutral
where the user left it unset, so that a model's own generation config cannot change the distribution behind our back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import aiohttp
import numpy as np

from lit_rl.errors import ServerError, ServerRefused, ServerUnreachable
from lit_rl.rollout.turns import current_rollout
from lit_rl.settings import EndpointSpec, RolloutSettings
from lit_rl.types import TurnRecord

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
}
"""Sampling from the whole distribution at the given temperature."""

MISSING_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that it does not have."""

# The server closes a connection that was idle for 5 s; closing ours first saves most resets.
_KEEP_ALIVE_S = 3.0


class _Retryable(Exception):
    """A try that failed in a way that another try may mend.

    Args:
        error: What to raise if no try is left.
        at_once: Whether waiting before the next try has no use.
    """

    def __init__(self, error: ServerError, at_once: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.at_once = error, at_once


class Sampler:
    """Sends sampling requests; one per event loop.

    Args:
        endpoint: Where the servers are and what they speak.
        settings: Sampling options, seed and number of tries.
        backoff_s: Seconds before the second try; doubled each time, at most 10.

    Attributes:
        retries: Requests that were tried again so far.
        generated_tokens: Tokens sampled so far.
    """

    def __init__(self, endpoint: EndpointSpec, settings: RolloutSettings, *, backoff_s: float = 0.5) -> None:
        self._endpoint, self._settings, self._backoff_s = endpoint, settings, backoff_s
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = dict.fromkeys(endpoint.urls, 0)
        self._unscoped = itertools.count()
        self.retries = 0
        self.generated_tokens = 0

    async def open(self) -> None:
        """Creates the connection pool; inside the event loop that will use it."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=self._endpoint.timeout)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, prompt_ids: list[int], max_tokens: int) -> TurnRecord:
        """Samples one answer of at most ``max_tokens`` tokens.

        A connection that breaks is tried again at once, the first time; timeouts, refused connections and 5xx after a
        growing pause; a 4xx never. ``1 + max_retries`` tries in all.

        Raises:
            ServerRefused: the server said no; with its words.
            ServerUnreachable: no answer.
            ServerError: an answer that cannot be understood.
        """
        route, body = self._request(prompt_ids, max_tokens)
        url: str | None = None
        for attempt in itertools.count():
            url = self._least_busy(avoid=url)
            try:
                turn = await self._try(url, route, body, prompt_ids)
                self.generated_tokens += len(turn.output_ids)
                return turn
            except _Retryable as failed:
                if attempt >= self._settings.max_retries:
                    raise failed.error from failed
                self.retries += 1
                if not (failed.at_once and attempt == 0):
                    await asyncio.sleep(self._pause(attempt))
        raise AssertionError("unreachable: the last try returns or raises")

    def _request(self, prompt_ids: list[int], max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Route and body of a request."""
        sampling = self._settings.sampling
        # logprobs 0 = the sampled token's own and nothing else. The generate route cuts its list, the sampled token
        # first, at as many as were asked for: one more leaves space for all others.
        wanted = self._settings.num_sampler_logprobs
        asked = wanted + 1 if wanted and self._endpoint.generate_route else wanted
        fields = NEUTRAL | {"temperature": sampling.temperature, "max_tokens": max_tokens, "logprobs": asked}
        fields |= sampling.extra
        if self._endpoint.send_seeds:
            fields["seed"] = self._seed()
        if not self._endpoint.generate_route:
            named = {"model": self._endpoint.model_name, "prompt": prompt_ids, "return_token_ids": True}
            return COMPLETIONS, named | {"return_tokens_as_token_ids": True} | fields
        if not fields.get("stop"):  # text is of no use here, and stop strings are all that needs it at the server
            fields.setdefault("detokenize", False)
        return GENERATE, {"model": self._endpoint.model_name, "token_ids": prompt_ids, "sampling_params": fields}

    def _seed(self) -> int:
        rollout = current_rollout.get()
        if rollout is not None:
            return rollout.take_request_seed(self._settings.seed)
        return random.Random(f"{self._settings.seed}/{next(self._unscoped)}").getrandbits(63)

    def _least_busy(self, avoid: str | None) -> str:
        """The server with the fewest requests in flight, another one than the last that failed if there is one."""
        urls = [url for url in self._endpoint.urls if url != avoid] or list(self._endpoint.urls)
        return min(urls, key=self._in_flight.__getitem__)

    def _pause(self, attempt: int) -> float:
        # Up to a quarter more, so that requests that failed together do not come back together.
        return min(10.0, self._backoff_s * 2**attempt) * (1 + random.random() / 4)

    async def _try(self, url: str, route: str, body: dict[str, Any], prompt_ids: list[int]) -> TurnRecord:
        answer = await self._post(url, route, body)
        turn = read_answer(answer, route, prompt_ids, candidates=self._settings.num_sampler_logprobs)
        if turn.finish_reason == "abort":  # somebody paused the server in a way that throws requests away
            raise _Retryable(ServerUnreachable(f"{url}{route} aborted the request"))
        return turn

    async def _post(self, url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends one request; the answer's JSON."""
        if self._session is None:
            raise RuntimeError("Sampler.open() was not awaited")
        self._in_flight[url] += 1
        try:
            async with self._session.post(url + route, json=body) as response:
                text = await response.text()
        except TimeoutError as cause:
            limit = self._endpoint.timeout
            raise _Retryable(ServerUnreachable(f"{url}{route} gave no answer within {limit:g} s")) from cause
        except aiohttp.ClientConnectorError as cause:
            raise _Retryable(ServerUnreachable(f"{url}{route} cannot be reached: {cause}")) from cause
        except (aiohttp.ClientError, ConnectionError) as cause:
            broken = ServerUnreachable(f"{url}{route} broke the connection: {cause!r}")
            raise _Retryable(broken, at_once=True) from cause
        finally:
            self._in_flight[url] -= 1
        if response.status >= 500:
            raise _Retryable(ServerRefused.answered(route, response.status, text))
        if response.status != 200:
            raise ServerRefused.answered(route, response.status, text)
        return _parsed(text, url + route)


def read_answer(answer: dict[str, Any], route: str, prompt_ids: list[int], candidates: int = 0) -> TurnRecord:
    """A server's answer as a record.

    Args:
        answer: The answer's JSON.
        route: Which route gave it.
        prompt_ids: The prompt sent.
        candidates: How many most likely tokens of each position were asked for.

    Raises:
        ServerError: a token without a log-prob, or fields that do not fit together; names the position.
    """
    try:
        choice = answer["choices"][0]
        output_ids = list(choice["token_ids"])
        named_ids, log_probs = _generate_logprobs(choice) if route == GENERATE else _completion_logprobs(choice)
        likely = None
        if candidates:
            likely = (_generate_candidates if route == GENERATE else _completion_candidates)(choice, candidates)
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise ServerError(f"{route} answered without the fields asked for ({cause!r}): {answer!r:.500}") from cause
    _check(route, output_ids, named_ids, log_probs)
    return TurnRecord(
        prompt_ids=list(prompt_ids),
        output_ids=output_ids,
        output_log_probs=log_probs,
        output_sampling_mask=choice.get("sampling_mask"),
        output_sampler_logprobs=likely,
        finish_reason=choice.get("finish_reason"),
        policy_versions=_policy_versions(choice.get("weight_versions"), len(output_ids)),
    )


def _generate_logprobs(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and log-probs of the sampled tokens."""
    content = choice["logprobs"]["content"]
    return [entry["token_id"] for entry in content], [entry["logprob"] for entry in content]


def _completion_logprobs(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and log-probs of the sampled tokens, in the order of the tokens.

    Ids count where the server names them (``token_id:17``); a token's text says nothing, since two may look the same.
    """
    output_ids, logprobs = choice["token_ids"], choice["logprobs"]
    names = logprobs["tokens"]
    if len(names) != len(output_ids) or not any(name.startswith("token_id:") for name in names):
        return output_ids, logprobs["token_logprobs"]
    return [int(name.removeprefix("token_id:")) for name in names], logprobs["token_logprobs"]


def _generate_candidates(choice: dict[str, Any], wanted: int) -> list[dict[int, float]]:
    """The ``wanted`` most likely tokens of each position, by id; the sampled token only if it is one of them.

    Which tokens stand here must not depend on which was drawn: their expectation would.
    """
    return [
        {
            top["token_id"]: top["logprob"]
            for top in entry["top_logprobs"]
            if top["rank"] is not None and top["rank"] <= wanted and top["logprob"] > MISSING_LOGPROB
        }
        for entry in choice["logprobs"]["content"]
    ]


def _completion_candidates(choice: dict[str, Any], wanted: int) -> list[dict[int, float]]:
    """The same from ``/v1/completions``, which tells no ranks: one entry too many means that the first, the sampled
    token's, is there beside the most likely ones."""
    return [
        {
            int(name.removeprefix("token_id:")): logprob
            for name, logprob in list(tops.items())[max(0, len(tops) - wanted) :]
            if logprob > MISSING_LOGPROB
        }
        for tops in choice["logprobs"]["top_logprobs"]
    ]


def _check(route: str, output_ids: list[int], named_ids: list[int], log_probs: list[Any]) -> None:
    """Raises ServerError unless there is one usable log-prob of each token."""
    if len(log_probs) != len(output_ids) or len(named_ids) != len(output_ids):
        raise ServerError(f"{route} answered with {len(output_ids)} tokens and {len(log_probs)} log-probs")
    if named_ids != output_ids:
        place = next(i for i, (a, b) in enumerate(zip(output_ids, named_ids, strict=True)) if a != b)
        raise ServerError(
            f"{route}: position {place} is token {output_ids[place]}, its log-prob is of {named_ids[place]}"
        )
    values = np.array(log_probs, dtype=np.float64)  # None becomes NaN
    bad = np.flatnonzero(~(np.isfinite(values) & (values > MISSING_LOGPROB)))
    if bad.size:
        place = int(bad[0])
        raise ServerError(f"{route}: position {place} (token {output_ids[place]}) has the log-prob {log_probs[place]}")


def _policy_versions(spans: list[dict[str, Any]] | None, count: int) -> list[int] | None:
    """The policy version of each token; None where the server does not say, or was labelled by somebody else."""
    if not spans or not all(str(span["version"]).isdecimal() for span in spans):
        return None
    versions = [0] * count
    for span in spans:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    return versions


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as cause:
        raise ServerError(f"{where} answered with something that is not JSON: {text[:500]}") from cause
