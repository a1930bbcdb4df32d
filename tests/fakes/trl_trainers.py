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

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_grpo_trainer as trainer_module
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

from lit_rl.types import Sample
from tests.fakes.attention_kernel import seen

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
    repeats = query.shape[1] // keys.shape[1]
    ends_q, ends_k, outputs = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), []
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)
        among = slice(ends_k[i], ends_k[i + 1])
        k, v = (x[among].transpose(0, 1).repeat_interleave(repeats, 0) for x in (keys, values))
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen(q.shape[1], k.shape[1], None), -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


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


def for_collator(sample: Sample) -> dict[str, Any]:
    """A sample as TRL's queue hands it on."""
    sequence = sample.sequence
    return {
        "input_ids": torch.from_numpy(sequence.token_ids),
        "completion_mask": torch.from_numpy(sequence.completion_mask.astype(np.int64)),
        "old_log_probs": torch.from_numpy(sequence.sampler_logprobs),
        "advantage": sample.advantage,
        "group_id": sample.group_id,
        "metrics": {"reward": sample.reward},
    }


def collated(samples: list[Sample]) -> dict[str, Tensor]:
    """One micro-batch of one rank: TRL's tree row of these samples, as its collator gives it to the loss."""
    row = packing.TreeRow()
    for sample in samples:
        row.add(for_collator(sample))
    return DataCollatorForRollout(pad_token_id=0)([[row]])
