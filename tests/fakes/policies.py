"""Tiny random policies in float64, and what each sample scores when it is forwarded alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_rl.policy.build import prepare_policy
from lit_rl.types import Sample

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def tiny_model(
    config: type[PretrainedConfig], *, dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    """A model of two layers with transformers' own attention, always with the same weights."""
    torch.manual_seed(0)
    # transformers' eager attention and its norms compute in float32, whose rounding would hide errors below 1e-7
    attention = "eager" if options.get("attn_logit_softcapping") else "sdpa"  # no other caps scores
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **options}), dtype=dtype, attn_implementation=attention)
    if dtype == torch.float64:
        _keep_norms_in_float64(model)
    return model.train()


def tiny_policy(
    config: type[PretrainedConfig], *, attention: str = "auto", gradient_checkpointing: bool = False, **options: Any
) -> PreTrainedModel:
    """The same model as a policy."""
    model = tiny_model(config, **options)
    return prepare_policy(model, attention=attention, gradient_checkpointing=gradient_checkpointing)


def _keep_norms_in_float64(model: nn.Module) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
        return (offset + module.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(forward, module)


def scored_alone(model: PreTrainedModel, samples: list[Sample], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all loss terms, sample by sample through a ``tiny_model``."""
    logprobs, entropies = [], []
    for one in samples:
        ids = torch.from_numpy(one.sequence.token_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        scores = logits.log_softmax(-1)
        at = torch.from_numpy(one.sequence.completion_mask[1:]).nonzero()[:, 0]
        logprobs.append(scores[at, ids[1:][at]])
        entropies.append(-(scores * scores.exp()).sum(-1)[at])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: PreTrainedModel, objective: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; a missing one is an error."""
    model.zero_grad()
    objective.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"no gradient reached {missing}"
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of any gradient, relative to the largest gradient of all."""
    size = max(float(gradient.abs().max()) for gradient in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / max(size, 1e-300)
