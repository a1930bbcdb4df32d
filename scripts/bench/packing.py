"""Plan, pack and tensorise one row, beside TRL's ``TreeRow`` on the same samples.

    python scripts/bench/packing.py

Each case is one row: samples are offered to a planner with a token budget, and the row comes out as tensors. Medians of
warm repeats, first of one side, then of the other, in this process. ``linear`` is the time for each unique token of a
row of a million tokens over that of a row of 131 thousand.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from trl.experimental.async_grpo.packing import TreeRow

from lit_rl.packing.planner import TokenBudgetPlanner, Verdict
from lit_rl.tensors import PackedRow
from lit_rl.train.allocator import keep_freed_memory
from lit_rl.types import Sample, Sequence

REPEATS = 15
TIMES_FASTER = 30.0
MOST_UNLINEAR = 1.5
VOCABULARY = 50_000


def groups(count: int, size: int, prompt: int, completion: int) -> list[Sample]:
    """``count`` prompts with ``size`` completions each; the completions are trained."""
    draw = np.random.default_rng(0)
    samples = []
    for group in range(count):
        shared = draw.integers(0, VOCABULARY, prompt)
        samples += [_sample(shared, draw.integers(0, VOCABULARY, completion), group) for _ in range(size)]
    return samples


def forked_conversation(turns: int, question: int, answer: int) -> list[Sample]:
    """One conversation that forks in each turn: turn t is trained under the history of the turns before it."""
    draw = np.random.default_rng(0)
    history, samples = np.zeros(0, np.int64), []
    for _ in range(turns):
        history = np.concatenate([history, draw.integers(0, VOCABULARY, question)])
        samples.append(_sample(history, draw.integers(0, VOCABULARY, answer), 0))
        history = np.concatenate([history, draw.integers(0, VOCABULARY, answer)])  # rendered otherwise
    return samples


def _sample(prompt: np.ndarray, completion: np.ndarray, group: int) -> Sample:
    tokens = np.concatenate([prompt, completion])
    trained = np.arange(len(tokens)) >= len(prompt)
    logprobs = np.where(trained, -1.5, 0.0).astype(np.float32)
    return Sample(Sequence(tokens, trained, logprobs), 0.5, 1.0, rollout_id="r", group_id=group, version_first=1)


CASES = {
    "4 x 8 x (512 + 512)": groups(4, 8, 512, 512),
    "2 x 16 x (1024 + 2048)": groups(2, 16, 1024, 2048),
    "30 turns, forked each turn": forked_conversation(30, 300, 430),
}


def ours(samples: list[Sample], budget: int) -> PackedRow:
    planner = TokenBudgetPlanner(budget, ranks=1, micro_batches=1)
    for sample in samples:
        assert planner.offer(sample) is Verdict.PLACED
    return planner.close(policy_version=1).rows[0][0]


def theirs(samples: list[dict], budget: int) -> dict[str, torch.Tensor]:
    row = TreeRow()
    for sample in samples:
        assert row.fits(sample, budget)
        row.add(sample)
    return row.pack()


def for_trl(sample: Sample) -> dict:
    sequence = sample.sequence
    return {
        "input_ids": torch.from_numpy(sequence.token_ids),
        "completion_mask": torch.from_numpy(sequence.completion_mask.astype(np.int64)),
        "old_log_probs": torch.from_numpy(sequence.sampler_logprobs),
        "advantage": sample.advantage,
        "group_id": sample.group_id,
    }


def seconds(work: Callable[[], object]) -> float:
    """Median of warm repeats."""
    work()
    gc.collect()
    return statistics.median(_once(work) for _ in range(REPEATS))


def _once(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(samples: list[Sample]) -> tuple[float, float, PackedRow]:
    """Seconds of ours and theirs, and our row."""
    budget = sum(len(sample.sequence.token_ids) for sample in samples)
    same = [for_trl(sample) for sample in samples]
    row, packed = ours(samples, budget), theirs(same, budget)
    assert len(row.terms) == len(packed["token_index"])  # both hold the same
    return seconds(lambda: ours(samples, budget)), seconds(lambda: theirs(same, budget)), row


def per_token(tokens: int) -> float:
    """Seconds for each unique token of a row of about ``tokens``."""
    samples = groups(tokens // 16_384, 8, 2_048, 1_792)  # 16,384 unique tokens a group
    budget = 2 * tokens
    unique = ours(samples, budget).tree.num_tokens
    return seconds(lambda: ours(samples, budget)) / unique


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a trainer
    cases = {}
    for name, samples in CASES.items():
        mine, other, row = compare(samples)
        tokens, raw = row.tree.num_tokens, row.raw_tokens
        print(f"{name}: {tokens} of {raw} tokens; lit_rl {mine * 1e3:.2f} ms, TreeRow {other * 1e3:.1f} ms")
        cases[name] = {"value": round(other / mine, 1), "at_least": TIMES_FASTER}
    small, large = per_token(2**17), per_token(2**20)
    print(f"per unique token: {small * 1e9:.0f} ns in 131 thousand, {large * 1e9:.0f} ns in a million")
    cases["linear"] = {"value": round(large / small, 2), "at_most": MOST_UNLINEAR}
    print(json.dumps({"bench": "packing", "cases": cases}))


if __name__ == "__main__":
    main()
