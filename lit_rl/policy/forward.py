"""Stop 11: one row through the policy, giving the log-prob and entropy of each loss term."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.errors import SettingsError
from lit_rl.policy.head import HeadOptions, target_scores
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.tensors import LossTerms, PackedRow, TermSets, TokenScores


def score_row(
    model: PreTrainedModel, row: PackedRow, *, temperature: float = 1.0, chunk_bytes: int | None = None
) -> TokenScores:
    """Log-probs of the row's loss terms under the policy, at the training temperature.

    A row without terms runs the whole model too, and its empty result hangs on every parameter that a full row's hangs
    on: ``scores.logprobs.sum()`` is a zero whose backward gives each of them a gradient of zeros and keeps a rank in
    step with the others.

    Args:
        model: A model from ``build_policy``, or one with a tree attention backend.
        row: The row, on the model's device.
        temperature: Logits are divided by it.
        chunk_bytes: Most bytes of logits alive at a time; None = what suits the device.

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
    model: PreTrainedModel, hidden: Tensor, terms: LossTerms, *, temperature: float, chunk_bytes: int | None = None
) -> TokenScores:
    """Scores of loss terms from hidden states [N, H]; each predicting place is scored once.

    Entries of a term's sets are further targets of its place, so they cost a look at logits that are made anyway.
    """
    head = output_head(model)
    places, place = torch.unique(terms.target_index, return_inverse=True)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    options = HeadOptions(scale=logit_scale(model), softcap=softcap, temperature=temperature, chunk_bytes=chunk_bytes)
    sets = [one for one in (terms.candidates, terms.kept) if one is not None]
    place_of = torch.cat([place, *(place[one.terms] for one in sets)])
    targets = torch.cat([terms.target_ids, *(one.ids for one in sets)])
    scores, entropy = target_scores(hidden.index_select(0, places), head.weight, head.bias, place_of, targets, options)
    logprobs, *of_sets = scores.split([len(terms), *(len(one.ids) for one in sets)])
    entropy = entropy[: len(terms)]
    candidates = of_sets[0] if terms.candidates is not None else None
    if terms.kept is not None:
        log_mass = log_kept_mass(of_sets[-1], terms.kept)
        logprobs = logprobs - log_mass
        if terms.candidates is not None and candidates is not None:
            candidates = candidates - log_mass[terms.candidates.terms]
    return TokenScores(logprobs=logprobs, entropy=entropy, candidate_logprobs=candidates)


def log_kept_mass(logprobs: Tensor, kept: TermSets) -> Tensor:
    """[M] log of the probability of each term's kept set; 0 for an empty one, which stands for the vocabulary.

    A target's log-prob less this is its log-prob among what truncated sampling kept (DeepSeek-V3.2, section 3.1).

    Args:
        logprobs: [K] log-probs of the sets' entries over the vocabulary.
        kept: The sets.
    """
    term, count = kept.terms, len(kept.offsets) - 1
    empty = kept.offsets.diff() == 0
    highest = logprobs.detach().new_full((count,), -torch.inf)
    highest = highest.scatter_reduce(0, term, logprobs.detach(), "amax").masked_fill(empty, 0.0)
    total = torch.zeros_like(highest).index_add(0, term, (logprobs - highest[term]).exp())
    return total.masked_fill(empty, 1.0).log() + highest


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
