"""Evaluation on held-out prompts, from the same servers, with the same sampling options and rewards."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import numpy as np

from lit_rl.errors import ServerError
from lit_rl.metrics import Last, Stats
from lit_rl.rollout.groups import PendingGroup
from lit_rl.rollout.prompts import make_prompt
from lit_rl.types import EvalResult, Position, RolloutGroup

if TYPE_CHECKING:
    from lit_rl.rollout.loop import Parts, RolloutLoop


async def evaluate(loop: RolloutLoop, name: str, parts: Parts) -> EvalResult:
    """Samples each prompt of ``parts.evals[name]`` ``num_generations_eval`` times and scores it.

    ``filter_prompt`` and ``compute_advantages`` are not asked: nothing is trained here. Rollouts that failed for good
    are left out of the means.

    Raises:
        ServerError: every rollout failed; with the server's words.
    """
    rows, version = parts.evals[name], parts.version()
    config = loop.config
    limit = asyncio.Semaphore(max(1, config.max_concurrent_rollouts // config.num_generations_eval))
    tasks = [asyncio.ensure_future(_group(loop, name, index, parts, limit)) for index in range(len(rows))]
    try:
        groups = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    scored = [group for group in groups if isinstance(group, RolloutGroup)]
    if not scored:
        errors = [group for group in groups if isinstance(group, ServerError)]
        raise ServerError(f"every rollout of the evaluation {name!r} failed; the last one: {errors[-1]}")
    return _summary(name, version, len(rows), scored)


async def _group(
    loop: RolloutLoop, name: str, index: int, parts: Parts, limit: asyncio.Semaphore
) -> RolloutGroup | ServerError:
    """One evaluation prompt, scored; or why none of its rollouts came through."""
    async with limit:
        group = await _sampled(loop, name, index, parts)
    if not group.finished:
        return group.failures[0]
    assembled = group.assemble()
    await parts.scorer.score(assembled)
    return assembled


async def _sampled(loop: RolloutLoop, name: str, index: int, parts: Parts) -> PendingGroup:
    config = loop.config
    prompt = make_prompt(parts.evals[name], index, Position(0, index), loop.tokenizer, config.chat_template_kwargs)
    # Training groups count from 0 upwards.
    group = PendingGroup(prompt, group_id=-1 - index, wanted=config.num_generations_eval)

    async def one(number: int) -> None:
        result = await loop.one_rollout(prompt, number, group.group_id, f"eval/{name}")
        if isinstance(result, ServerError):
            group.failures[number] = result
        else:
            group.finished[number] = result

    # Each in a task, and so in a context of its own.
    await asyncio.gather(*(asyncio.ensure_future(one(number)) for number in range(group.wanted)))
    return group


def _summary(name: str, version: int, prompts: int, groups: list[RolloutGroup]) -> EvalResult:
    totals = np.concatenate([group.rewards for group in groups if group.rewards is not None])
    sources = sorted({source for group in groups for source in group.func_rewards})
    means = {s: _mean(np.concatenate([g.func_rewards[s] for g in groups if s in g.func_rewards])) for s in sources}
    reward = _mean(totals)
    named = {f"eval/{name}/reward": reward} | {f"eval/{name}/{source}": mean for source, mean in means.items()}
    stats: Stats = {metric: Last(value) for metric, value in named.items() if not math.isnan(value)}
    return EvalResult(name, version, prompts, len(totals), reward, means, dict(stats))


def _mean(values: np.ndarray) -> float:
    """Mean of the scored ones; NaN if there is none."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if scored.size else math.nan
