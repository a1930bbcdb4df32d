"""TRL's trainer on CPU, made by its own constructor and asked for nothing but losses.

No server, no worker, no generation. Of TRL's code two functions are replaced, which only GPUs have: the flash kernel
under its tree attention, by dense arithmetic with the same arguments, and the look-up of the device's peak speed, which
serves its figures of throughput.
"""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_grpo_trainer as trainer_module
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

from lit_rl.types import Sample
from scripts.bench.packing import for_trl
from tests.fakes.attention_kernel import dense_forward

PROMPTS = Dataset.from_list([{"prompt": "never sampled"}] * 8)


def dense_flash_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """[N, heads, head_dim] for operands laid end to end; causal, aligned at the ends."""
    assert causal and window_size == (-1, -1)
    return dense_forward(query, keys, values, cu_seqlens_q, cu_seqlens_k, softmax_scale, None, None)[0]


def run_without_gpu(patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins in TRL's modules."""
    patch.setattr(trainer_module, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    patch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=dense_flash_attention))


def async_grpo_trainer(model_dir: Path, output_dir: Path, *, temperature: float, **options: Any) -> AsyncGRPOTrainer:
    """With a worker that never works and a transfer that moves nothing, both of which its constructor takes."""
    worker = SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue(), check_health=lambda _: None)
    config = AsyncGRPOConfig(
        output_dir=str(output_dir),
        temperature=temperature,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **options,
    )
    return AsyncGRPOTrainer(
        str(model_dir), args=config, train_dataset=PROMPTS, rollout_worker=worker, weight_transfer=SimpleNamespace()
    )


def collated(samples: list[Sample]) -> dict[str, Tensor]:
    """One micro-batch of one rank: TRL's tree row of these samples, as its collator gives it to the loss."""
    row = packing.TreeRow()
    for sample in samples:
        row.add(for_trl(sample) | {"metrics": {"reward": sample.reward}})
    return DataCollatorForRollout(pad_token_id=0)([[row]])
