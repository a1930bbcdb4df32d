"""Forward and backward of SmolLM2-135M-Instruct: the tree-packed row beside three other ways to the same gradient.

    python scripts/bench/train_step.py

Float32, all cores, no gradient checkpointing, no optimizer. A case is one group: a prompt and completions of it, all of
one length, so that no side pays for padding. The loss is -(1 / samples) sum of advantage x log-prob, which RLOO's is
where the ratio is 1; each side's gradient is compared with that of ``ours`` before its figures count.

=======  ===============================================================================================================
side     what runs
=======  ===============================================================================================================
ours     ``score_row`` on the row that shares the prompt
padded   a lean batch: right-padded samples through the model as transformers has it, our chunked head at completions
trl      TRL's RLOOTrainer: ``compute_loss`` on a batch made by hand
roots    ``score_row`` on a row in which each sample is a root of its own: packed, nothing shared
=======  ===============================================================================================================

Each (case, allocator, side) is a fresh process. There two small samples warm up the libraries, and a first step warms
up the memory. Then a side and ``ours`` take turns, each in its process, and the fastest turn of each counts: all that
others add is the machine's.

Allocators: ``kept`` is ``keep_freed_memory()``, as in a trainer, for every side, and is judged: how many times faster
than the other side, over the packing ratio (raw / unique tokens). ``default`` is the C library as it comes. It keeps no
memory warm, so that the first step says what it costs, and it is the one under which memory is read.

Packing is done once, before: scripts/bench/packing.py times it, in milliseconds.

Activation memory: weights and gradients are there and touched, the kernel's record of the process's highest resident
memory is reset, one step runs, and the record less what was resident before is the peak of all that a step allocates,
inside operators too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from lit_rl.packing.trie import pack
from lit_rl.policy.build import build_policy
from lit_rl.policy.flops import FlopCount
from lit_rl.policy.forward import score_row, score_terms
from lit_rl.tensors import LossTerms, PackedRow, TreeLayout
from lit_rl.train.allocator import keep_freed_memory
from lit_rl.types import Sample, Sequence

MODEL = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"
OF_GRADIENT = 1009  # every so many entries of each parameter's gradient are compared
MOST_DIFFERENT = 1e-3
LEAST = {
    "speed over trl / packing ratio": 0.95,
    "speed over padded / packing ratio": 0.75,
    "memory of trl / ours": 3.5,
    "memory of padded / ours": 2.2,
}

Step = Callable[[], None]


@dataclass(frozen=True)
class Group:
    """One prompt and its completions, tokens drawn at random."""

    prompt: int
    completions: int
    length: int

    def tokens(self) -> np.ndarray:
        """[completions, prompt + length] token ids; the first ``prompt`` are alike."""
        draw = np.random.default_rng(0)
        shared = np.tile(draw.integers(3, 49_152, self.prompt), (self.completions, 1))
        return np.concatenate([shared, draw.integers(3, 49_152, (self.completions, self.length))], axis=1)

    def advantages(self) -> np.ndarray:
        """[completions], with mean 0."""
        return np.linspace(-1.0, 1.0, self.completions, dtype=np.float32)

    def samples(self) -> list[Sample]:
        trained, none = np.arange(self.sample) >= self.prompt, np.zeros(self.sample, np.float32)
        return [
            Sample(Sequence(tokens, trained, none), float(advantage), 1.0, rollout_id="r", group_id=0, version_first=1)
            for tokens, advantage in zip(self.tokens(), self.advantages(), strict=True)
        ]

    def terms(self) -> LossTerms:
        """The loss terms where the samples stand end to end, nothing shared."""
        places = np.arange(self.completions * self.sample).reshape(self.completions, self.sample)
        targets = self.tokens()[:, self.prompt :].flatten()
        return LossTerms(
            target_index=torch.from_numpy(places[:, self.prompt - 1 : -1].flatten()),
            target_ids=torch.from_numpy(targets),
            sampler_logprobs=torch.zeros(targets.size),
            advantages=torch.from_numpy(np.repeat(self.advantages(), self.length)),
            sample_index=torch.from_numpy(np.repeat(np.arange(self.completions), self.length)),
        )

    @property
    def sample(self) -> int:
        """Tokens of one sample."""
        return self.prompt + self.length

    @property
    def packing_ratio(self) -> float:
        return self.completions * self.sample / (self.prompt + self.completions * self.length)


CASES = {"case 1": Group(239, 8, 64), "case 2": Group(768, 5, 48)}
SMALL = Group(8, 2, 4)
TURNS = {"padded": 9, "trl": 5, "roots": 1}  # of each side with ours; the last is only reported


@dataclass(frozen=True)
class Figures:
    """What a process found before turns were taken.

    Attributes:
        seconds: Of the first step.
        memory: Bytes at its peak, over weights and gradients.
        gradient: Some entries of its gradient.
        product_rate: Floating-point operations each second of a large matrix product.
        attention: Share of a step that ``ours`` spends in tree attention.
        flops: Of a step of ``ours``.
    """

    seconds: float
    memory: int
    gradient: np.ndarray
    product_rate: float
    attention: float
    flops: int


class Ours:
    """Each side has a model and makes steps on groups."""

    def __init__(self) -> None:
        self.model = build_policy(str(MODEL), gradient_checkpointing=False)

    def row(self, group: Group) -> PackedRow:
        return pack(group.samples())

    def step(self, group: Group) -> Step:
        row = self.row(group)

        def step() -> None:
            logprobs = score_row(self.model, row).logprobs
            (-(logprobs * row.terms.advantages).sum() / group.completions).backward()

        return step

    def flops(self, group: Group) -> int:
        count = FlopCount.of(self.model)
        assert count is not None
        return count.forward_and_backward(self.row(group))


class Roots(Ours):
    def row(self, group: Group) -> PackedRow:
        tokens, starts = torch.from_numpy(group.tokens()), torch.arange(group.completions + 1) * group.sample
        tree = TreeLayout(
            token_ids=tokens.flatten(),
            position_ids=torch.arange(group.sample).repeat(group.completions),
            segment_starts=starts,
            segment_parents=torch.full_like(starts[1:], -1),
            subtree_ends=starts[1:],
        )
        pairs = group.completions * group.sample * (group.sample + 1) // 2
        return PackedRow(tree, group.terms(), attention_pairs=pairs)


class Padded:
    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()

    def step(self, group: Group) -> Step:
        tokens, terms = torch.from_numpy(group.tokens()), group.terms()
        mask = torch.ones_like(tokens)

        def step() -> None:
            output = self.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
            hidden = output.last_hidden_state.flatten(0, 1)
            logprobs = score_terms(self.model, hidden, terms, temperature=1.0).logprobs
            (-(logprobs * terms.advantages).sum() / group.completions).backward()

        return step


class Trl:
    def __init__(self) -> None:
        from datasets import Dataset
        from trl import RLOOConfig, RLOOTrainer

        config = RLOOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            num_generations=8,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            gradient_checkpointing=False,
            report_to="none",
        )
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
        prompts = Dataset.from_list([{"prompt": "never sampled"}] * 8)
        self.trainer = RLOOTrainer(self.model, lambda **_: [0.0], args=config, train_dataset=prompts)

    def step(self, group: Group) -> Step:
        tokens = torch.from_numpy(group.tokens())
        prompt, completion = tokens[:, : group.prompt], tokens[:, group.prompt :]
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": torch.ones_like(completion),
            "advantages": torch.from_numpy(group.advantages()),
            "old_logps": self._logprobs(tokens, group.length),
        }
        return lambda: self.trainer.compute_loss(self.model, inputs).backward()

    def _logprobs(self, tokens: Tensor, length: int) -> Tensor:
        """[completions] under the model itself, so that the ratio is 1."""
        with torch.no_grad():  # sample by sample: what it allocates stays small
            logprobs, *_ = self.trainer._get_per_token_logps_and_entropies(
                self.model, tokens, torch.ones_like(tokens), length, batch_size=1
            )
        return logprobs.sum(1)


SIDES: dict[str, Callable[[], Ours | Padded | Trl]] = {"ours": Ours, "padded": Padded, "trl": Trl, "roots": Roots}


# in a side's own process


def serve(parent: Connection, name: str, group: Group, allocator: str) -> None:
    """Sends the figures, then the seconds of one more step whenever it is asked."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    if allocator == "kept":
        assert keep_freed_memory()
    torch.manual_seed(0)
    side = SIDES[name]()
    step = side.step(group)
    parent.send(first_figures(side, step, group))
    while parent.recv():
        side.model.zero_grad()  # as an optimizer leaves it
        parent.send(seconds(step))


def first_figures(side: Ours | Padded | Trl, step: Step, group: Group) -> Figures:
    for _ in range(2):
        side.step(SMALL)()
    for parameter in side.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    memory, took = peak(step)
    gradient = torch.cat([parameter.grad.flatten()[::OF_GRADIENT] for parameter in side.model.parameters()])
    return Figures(
        seconds=took,
        memory=memory,
        gradient=gradient.numpy(),
        product_rate=product_rate(),
        attention=in_attention(step) if type(side) is Ours else 0.0,
        flops=side.flops(group) if type(side) is Ours else 0,
    )


def peak(step: Step) -> tuple[int, float]:
    """Bytes that the process's resident memory rose by while the step ran, and its seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that none of it hides what the step takes
    Path("/proc/self/clear_refs").write_text("5")  # the record starts again from what is resident now
    before = resident("VmRSS")
    took = seconds(step)
    return resident("VmHWM") - before, took


def resident(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def product_rate() -> float:
    """Operations each second of a product of 2048 x 2048 matrices."""
    left, right = torch.randn(2, 2048, 2048)
    return 2 * 2048**3 / statistics.median(seconds(lambda: left @ right) for _ in range(9))


def in_attention(step: Step) -> float:
    """Share of one step in the tree attention, forward and backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        took = seconds(step)
    names = ("_TreeAttention", "_TreeAttentionBackward")
    return sum(event.cpu_time_total for event in profile.key_averages() if event.key in names) / 1e6 / took


# in the parent


class Process:
    """A side in a process of its own. Raises EOFError where that has died; its own error stands above."""

    def __init__(self, name: str, group: Group, allocator: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, name, group, allocator), daemon=True)
        self._process.start()
        child.close()
        self.figures: Figures = self._pipe.recv()

    def step(self) -> float:
        """Seconds of one more step."""
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def compare(case: str, allocator: str) -> dict[str, float]:
    """What is judged, by name; prints everything."""
    group = CASES[case]
    ours = Process("ours", group, allocator)
    mine, judged = ours.figures, {}
    print(f"{case}, {allocator}, ours: {described(mine)}; {mine.attention:.0%} of a step in attention", flush=True)
    for name in TURNS if allocator == "kept" else ("padded", "trl"):
        other = Process(name, group, allocator)
        different = differ(other.figures.gradient, mine.gradient)
        assert different < MOST_DIFFERENT, f"{name} computes something else: gradients differ by {different:.1e}"
        print(
            f"{case}, {allocator}, {name}: {described(other.figures)}; gradient {different:.0e} from ours", flush=True
        )
        if allocator == "kept":
            judged[f"speed over {name} / packing ratio"] = take_turns(case, name, ours, other)
        else:
            judged[f"memory of {name} / ours"] = other.figures.memory / mine.memory
        other.close()
    ours.close()
    return judged


def described(figures: Figures) -> str:
    rate = f"products of 2048 x 2048 matrices {figures.product_rate / 1e9:.0f} GFLOP/s"
    return f"first step {figures.seconds:.2f} s, memory {figures.memory / 2**20:.0f} MiB, {rate}"


def take_turns(case: str, name: str, ours: Process, other: Process) -> float:
    """How many times faster ours is, over the packing ratio."""
    turns = [(ours.step(), other.step()) for _ in range(TURNS[name])]
    mine, theirs = map(min, zip(*turns, strict=True))
    ratio = CASES[case].packing_ratio
    print(
        f"{case}, kept: {name} {theirs:.2f} s, ours {mine:.2f} s ({ours.figures.flops / mine / 1e9:.0f} GFLOP/s): "
        f"{theirs / mine:.2f} times faster at a packing ratio of {ratio:.2f}",
        flush=True,
    )
    return theirs / mine / ratio


def differ(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


def main() -> None:
    if not MODEL.is_dir():
        sys.exit(f"{MODEL} is not there; make it: python scripts/prepare_model.py")
    figures = {}
    for case in CASES:
        for name, value in (compare(case, "kept") | compare(case, "default")).items():
            if name in LEAST:
                figures[f"{case}: {name}"] = {"value": round(value, 3), "at_least": LEAST[name]}
    print(json.dumps({"bench": "train_step", "cases": figures}))


if __name__ == "__main__":
    main()
