"""The JSON of vLLM 0.32's answers, as its protocol classes write it; no behaviour here."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.server import Answer, Call

VERSION = "0.32.0"
METRICS = {"vllm:kv_cache_usage_perc": 0.0, "vllm:num_requests_waiting": 0.0, "vllm:num_preemptions_total": 0.0}


def vllm_config(model: str, max_model_len: int, overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sections of ``/server_info?config_format=json`` that a client reads."""
    config: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": model,
            "tokenizer": model,
            "dtype": "torch.float32",
            "max_model_len": max_model_len,
            "max_logprobs": 20,
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": False,
            "served_model_name": model,
            "generation_config": "auto",
        },
        "cache_config": {"block_size": 128, "num_gpu_blocks": 64, "kv_cache_size_tokens": 8192},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": 1,
            "_api_process_count": 1,
        },
        "scheduler_config": {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "device_config": {"device": "cpu"},
        "weight_transfer_config": {"backend": "gloo"},
    }
    for section, values in overrides.items():
        config.setdefault(section, {}).update(values)
    return config


def models(name: str, max_model_len: int) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": name, "parent": None}
    return {"object": "list", "data": [card | {"max_model_len": max_model_len, "permission": []}]}


def metrics_text(metrics: dict[str, float], running: int) -> str:
    """Prometheus text."""
    labels = '{engine="0",model_name="fake-model"}'
    lines = [f"{name}{labels} {value}" for name, value in metrics.items()]
    return "\n".join([*lines, f"vllm:num_requests_running{labels} {float(running)}", ""])


def cut(answer: Answer, max_tokens: int) -> Answer:
    """The answer with its log-probs filled in, cut at ``max_tokens`` as the real server does."""
    log_probs = answer.log_probs if answer.log_probs is not None else [-0.5] * len(answer.token_ids)
    answer = replace(answer, log_probs=log_probs)
    if len(answer.token_ids) <= max_tokens:
        return answer
    candidates = answer.candidates[:max_tokens] if answer.candidates else None
    mask = answer.sampling_mask[:max_tokens] if answer.sampling_mask else None
    return replace(
        answer,
        token_ids=answer.token_ids[:max_tokens],
        log_probs=log_probs[:max_tokens],
        finish_reason="length",
        candidates=candidates,
        sampling_mask=mask,
    )


def usage(call: Call, answer: Answer) -> dict[str, Any]:
    asked, given = len(call.prompt_ids), len(answer.token_ids)
    return {"prompt_tokens": asked, "total_tokens": asked + given, "completion_tokens": given}


def prompt_logprobs(call: Call, score: Callable[[list[int]], list[float]]) -> list[Any] | None:
    """None for the first token, then per token its id (a string, as JSON keys are) and log-prob."""
    if call.sampling.get("prompt_logprobs") is None:
        return None
    ids = call.prompt_ids
    entries = [{"logprob": lp, "rank": 1, "decoded_token": f"<{i}>"} for i, lp in zip(ids[1:], score(ids), strict=True)]
    return [None, *({str(i): entry} for i, entry in zip(ids[1:], entries, strict=True))]


def _candidates(answer: Answer, place: int, asked: int) -> list[tuple[int, float, int]]:
    """(id, log-prob, rank): the sampled token first, then the ``asked`` most likely, as the engine orders them."""
    assert answer.log_probs is not None
    sampled = answer.token_ids[place]
    known = dict(answer.candidates[place] if answer.candidates else [])
    known[sampled] = answer.log_probs[place]
    ranked = sorted(known, key=lambda i: -known[i])
    shown = [sampled, *(i for i in ranked[:asked] if i != sampled)]
    return [(i, max(known[i], -9999.0), ranked.index(i) + 1) for i in shown]


def _generate_logprobs(answer: Answer, asked: int | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    content = []
    for place, token_id in enumerate(answer.token_ids):
        shown = _candidates(answer, place, asked)[: max(asked, 1)]  # one too few where the sampled one is not likely
        top = [{"token_id": i, "logprob": lp, "rank": rank} for i, lp, rank in shown]
        content.append(
            {"token_id": token_id, "logprob": top[0]["logprob"], "rank": top[0]["rank"], "top_logprobs": top}
        )
    return {"content": content}


def generate_response(
    call: Call, answer: Answer, label: str, score: Callable[[list[int]], list[float]]
) -> dict[str, Any]:
    """The answer of ``/inference/v1/generate``."""
    count = len(answer.token_ids)
    spans = answer.weight_versions if answer.weight_versions is not None else [(label, 0, count)]
    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": answer.token_ids,
        "routed_experts": None,
        "sampling_mask": answer.sampling_mask,
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans if e > s] or None,
        "logprobs": _generate_logprobs(answer, call.sampling.get("logprobs")),
    }
    return {
        "request_id": call.body.get("request_id") or uuid.uuid4().hex,
        "model": call.body.get("model"),
        "created": 0,
        "usage": usage(call, answer),
        "prompt_logprobs": prompt_logprobs(call, score),
        "prompt_token_ids": call.prompt_ids if call.body.get("return_token_ids") else None,
        "output_mode": "tokens",
        "choices": [choice],
    }


def _completion_logprobs(call: Call, answer: Answer) -> dict[str, Any] | None:
    asked = call.body.get("logprobs")
    if asked is None:
        return None
    name = (lambda i: f"token_id:{i}") if call.body.get("return_tokens_as_token_ids") else (lambda i: f"<{i}>")
    top = [
        {name(i): lp for i, lp, _ in _candidates(answer, place, asked)[: asked + 1]}
        for place in range(len(answer.token_ids))
    ]
    return {
        "text_offset": [0] * len(answer.token_ids),
        "token_logprobs": answer.log_probs,
        "tokens": [name(i) for i in answer.token_ids],
        "top_logprobs": top,
    }


def completion_response(
    call: Call, answer: Answer, model: str, score: Callable[[list[int]], list[float]]
) -> dict[str, Any]:
    """The answer of ``/v1/completions``."""
    with_ids = bool(call.body.get("return_token_ids"))
    choice = {
        "index": 0,
        "text": answer.text if answer.text is not None else "".join(f"<{i}>" for i in answer.token_ids),
        "logprobs": _completion_logprobs(call, answer),
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": answer.token_ids if with_ids else None,
        "prompt_logprobs": prompt_logprobs(call, score),
        "prompt_token_ids": call.prompt_ids if with_ids else None,
        "routed_experts": None,
    }
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage(call, answer),
        "kv_transfer_params": None,
        "metrics": None,
    }
