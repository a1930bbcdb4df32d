"""Tree attention on CPU beside a plain causal call, a dense mask, and each sample alone.

    python scripts/bench/attention.py

One layer of SmolLM2-135M's shape in float32, forward and backward, on all cores, under the trainer's allocator. Each
case is a row. ``cpu`` is timed as a layer of a model uses it: one layer's attention and a thirtieth of the planning of
its calls, which 30 layers share. Sides take turns, in rounds over all cases, so that what disturbs the machine for a
while disturbs few of a case's turns; the fastest turn of each counts, since all that others add is the machine's.

Judged is the time for each (query, key) pair that the row has, over that of plain causal attention over as many tokens
(N (N + 1) / 2 pairs). Reported are the times of the other ways to the same result over that of ``cpu``: a dense mask
over the row, and causal attention over each sample alone. Short samples that share nothing are reported only: the plain
kernel itself takes longer for a pair of 256 tokens than of 16 thousand, as their time alone shows.

What does not depend on the tree, plain causal attention and the dense mask, is timed once for all rows of a size; they
differ by 3 tokens in a thousand at most. Samples of one length are alike: one of them stands for all.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lit_rl.packing.trie import pack
from lit_rl.policy.tree_attention.cascade import blocks
from lit_rl.policy.tree_attention.cpu import cpu_attention
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.policy.tree_attention.reference import reference_attention
from lit_rl.train.allocator import keep_freed_memory
from lit_rl.types import Sample, Sequence

LAYERS, HEADS, KEY_HEADS, WIDTH = 30, 9, 3, 64
TOKENS_BY_SIZE = {"1k": 1024, "4k": 4096, "16k": 16_384}
MOST_BY_SIZE = {"1k": 1.5, "4k": 1.5, "16k": 1.25}
ROUNDS = 3
TURNS_BY_SIZE = {"1k": 15, "4k": 4, "16k": 2}  # in each round; what is only reported takes one

SHORT = "short samples that share nothing"

draw = np.random.default_rng(0)


def run(tokens: int) -> np.ndarray:
    """Tokens that nothing else in the row begins with."""
    return draw.integers(0, 2**40, tokens)


def groups(count: int, size: int, prompt: int, completion: int) -> list[np.ndarray]:
    """``count`` prompts with ``size`` completions each."""
    prompts = [run(prompt) for _ in range(count)]
    return [np.concatenate([prompt, run(completion)]) for prompt in prompts for _ in range(size)]


def forked_conversation(turns: int, question: int, answer: int) -> list[np.ndarray]:
    """A conversation whose every answer goes on otherwise than it was sampled: each turn leaves a branch behind."""
    history, samples = run(0), []
    for _ in range(turns):
        history = np.concatenate([history, run(question)])
        samples.append(np.concatenate([history, run(answer)]))
        history = np.concatenate([history, run(answer)])
    return samples


def binary_tree(levels: int, segment: int) -> list[np.ndarray]:
    """A sample for each leaf."""
    paths = [run(segment)]
    for _ in range(levels - 1):
        paths = [np.concatenate([path, run(segment)]) for path in paths for _ in range(2)]
    return paths


def ragged(prompt: int, shortest: int, longest: int) -> list[np.ndarray]:
    """Eight completions of one prompt, their lengths evenly spread."""
    shared = run(prompt)
    return [np.concatenate([shared, run(int(length))]) for length in np.linspace(shortest, longest, 8)]


ROWS = {
    "1k, nothing shared": groups(1, 1, 512, 512),
    "1k, 8 of one prompt": groups(1, 8, 512, 64),
    "1k, 8 of one long prompt": groups(1, 8, 800, 28),
    "1k, forked conversation": forked_conversation(3, 150, 115),
    "1k, binary tree": binary_tree(3, 146),
    "4k, nothing shared": groups(2, 1, 1024, 1024),
    "4k, 8 of one prompt": groups(1, 8, 2048, 256),
    "4k, 8 ragged ones of one prompt": ragged(1024, 64, 704),
    "4k, 4 groups of 8": groups(4, 8, 256, 96),
    "4k, forked conversation": forked_conversation(10, 162, 130),
    "4k, binary tree": binary_tree(4, 273),
    "16k, nothing shared": groups(4, 1, 2048, 2048),
    "16k, 8 of one long prompt": groups(1, 8, 14_336, 256),
    "16k, 4 groups of 8": groups(4, 8, 1024, 384),
    "16k, forked conversation": forked_conversation(20, 234, 300),
    "16k, binary tree": binary_tree(6, 260),
    **{f"{size}, {SHORT}": groups(tokens // 256, 1, 128, 128) for size, tokens in TOKENS_BY_SIZE.items()},
}


def _sample(tokens: np.ndarray) -> Sample:
    untrained = np.zeros(len(tokens), bool)
    sequence = Sequence(tokens, untrained, np.zeros(len(tokens), np.float32))
    return Sample(sequence, 0.0, 0.0, rollout_id="r", group_id=0, version_first=1)


class Layer:
    """Queries, keys and values of one layer, and the gradient of what comes out, laid out as transformers does."""

    def __init__(self, tokens: int) -> None:
        heads = (HEADS, KEY_HEADS, KEY_HEADS)
        self.inputs = [torch.randn(1, tokens, count, WIDTH).transpose(1, 2).requires_grad_() for count in heads]
        self.grad = torch.randn(1, tokens, HEADS, WIDTH)

    def __call__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Forward and backward."""
        torch.autograd.grad(attention(*self.inputs), self.inputs, self.grad)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


def over_tree(backend: Callable[..., tuple[Tensor, None]], plan: TreePlan) -> Callable[..., Tensor]:
    return lambda query, key, value: backend(nn.Identity(), query, key, value, None, tree=plan)[0]


class Clock:
    """Seconds of each side in all of its turns."""

    def __init__(self) -> None:
        self._took: dict[Hashable, list[float]] = defaultdict(list)

    def time(self, side: Hashable, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self._took[side].append(time.perf_counter() - started)

    def best(self, side: Hashable) -> float:
        return min(self._took[side])


class Row:
    def __init__(self, name: str, samples: list[np.ndarray]) -> None:
        self.name, self.size = name, name.split(",")[0]
        self.judged = SHORT not in name
        packed = pack([_sample(tokens) for tokens in samples])
        self.tree, self.pairs = packed.tree, packed.attention_pairs
        self.lengths = Counter(map(len, samples))
        assert abs(self.tree.num_tokens / TOKENS_BY_SIZE[self.size] - 1) < 0.003

        self.plan, self.layer = TreePlan(self.tree), Layer(self.tree.num_tokens)

    def turn(self, clock: Clock) -> None:
        clock.time((self.name, "planning"), lambda: blocks(TreePlan(self.tree), None, torch.float32))
        clock.time((self.name, "cpu"), lambda: self.layer(over_tree(cpu_attention, self.plan)))

    def alone(self, clock: Clock) -> None:
        for length in self.lengths:
            clock.time((self.name, length), partial(Layer(length), causal))

    def ratio(self, clock: Clock) -> float:
        """Time for each pair over that of the plain causal call; prints what is only reported."""
        planning = clock.best((self.name, "planning"))
        cpu = clock.best((self.name, "cpu")) + planning / LAYERS
        plain, dense = clock.best((self.size, "causal")), clock.best((self.size, "dense"))
        alone = sum(clock.best((self.name, length)) * count for length, count in self.lengths.items())
        raw = sum(length * count for length, count in self.lengths.items())
        print(
            f"{self.name}: {self.tree.num_tokens} of {raw} tokens; cpu {cpu * 1e3:.1f} ms (planning the row "
            f"{planning * 1e3:.1f} ms), plain causal {plain * 1e3:.1f} ms; over cpu: dense mask {dense / cpu:.2f}, "
            f"each sample alone {alone / cpu:.2f}"
        )
        tokens = TOKENS_BY_SIZE[self.size]
        ratio = (cpu / self.pairs) / (plain / (tokens * (tokens + 1) / 2))
        print(f"    {ratio:.2f} times the plain causal call's time for each pair")
        return ratio


def turns(size: str, rows: list[Row], clock: Clock) -> None:
    """One round of all sides of a size."""
    layer = Layer(TOKENS_BY_SIZE[size])
    for _ in range(TURNS_BY_SIZE[size]):
        clock.time((size, "causal"), partial(layer, causal))
        for row in rows:
            row.turn(clock)
    clock.time((size, "dense"), partial(layer, over_tree(reference_attention, TreePlan(rows[0].tree))))


def main() -> None:
    torch.manual_seed(0)
    keep_freed_memory()  # as in a trainer
    clock, rows = Clock(), [Row(name, samples) for name, samples in ROWS.items()]
    for number in range(ROUNDS):
        for size in TOKENS_BY_SIZE:
            turns(size, [row for row in rows if row.size == size], clock)
        for row in rows:
            if number == 0 or row.size != "16k":  # a sample of 14 thousand tokens takes as long as all others
                row.alone(clock)
    ratios = {row: round(row.ratio(clock), 3) for row in rows}
    figures = {row.name: {"value": ratios[row], "at_most": MOST_BY_SIZE[row.size]} for row in rows if row.judged}
    print(json.dumps({"bench": "attention", "cases": figures}))


if __name__ == "__main__":
    main()
