"""Stop 11: one row through the policy, giving the log-prob and entropy of each loss term."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.errors import SettingsError
from lit_rl.policy.head import CHUNK_BYTES, HeadOptions, target_scores
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.tensors import LossTerms, PackedRow, TokenScores


def score_row(
    model: PreTrainedModel, row: PackedRow, *, temperature: float = 1.0, chunk_bytes: int = CHUNK_BYTES
) -> TokenScores:
    """Log-probs of the row's loss terms under the policy, at the training temperature.

    A row without terms runs the whole model too, and its empty result hangs on every parameter that a full row's hangs
    on: ``scores.logprobs.sum()`` is a zero whose backward gives each of them a gradient of zeros and keeps a rank in
    step with the others.

    Args:
        model: A model from ``build_policy``, or one with a tree attention backend.
        row: The row, on the model's device.
        temperature: Logits are divided by it.
        chunk_bytes: Most bytes of logits alive at a time.

    Returns:
        Scores [M] in float32 (float64 for a float64 model); the entropy carries no gradient.
    """
    hidden = hidden_states(model, row)
    return score_terms(model, hidden, row.terms, temperature=temperature, chunk_bytes=chunk_bytes)


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """[N, H] final hidden states of the row's tokens."""
    tree = row.tree
    output = model.base_model(
        input_ids=tree.token_ids[None],
        position_ids=tree.position_ids[None],
        attention_mask=None,
        use_cache=False,
        tree=TreePlan(tree),
    )
    return output.last_hidden_state[0]


def score_terms(
    model: PreTrainedModel, hidden: Tensor, terms: LossTerms, *, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> TokenScores:
    """Scores of loss terms from hidden states [N, H]; each predicting place is scored once."""
    head = output_head(model)
    places, place = torch.unique(terms.target_index, return_inverse=True)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    options = HeadOptions(scale=logit_scale(model), softcap=softcap, temperature=temperature, chunk_bytes=chunk_bytes)
    predicting = hidden.index_select(0, places)
    logprobs, entropy = target_scores(predicting, head.weight, head.bias, place, terms.target_ids, options)
    return TokenScores(logprobs=logprobs, entropy=entropy)


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The head as a plain linear layer.

    Raises:
        SettingsError: it is something else, for instance inside an adapter, and its weight alone would be wrong.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise SettingsError(
            "model.pretrained",
            type(model).__name__,
            f"its output head is a {type(head).__name__}, not a plain linear layer; leave the head out of adapters and "
            "quantisation, or use a causal language model",
        )
    return head


def logit_scale(model: PreTrainedModel) -> float:
    """The factor that the model puts on its logits (Cohere multiplies, Granite divides)."""
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(factor if factor is not None else 1.0) / float(divisor if divisor is not None else 1.0)
