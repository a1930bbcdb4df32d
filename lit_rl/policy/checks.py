"""What a row of shared prefixes cannot be trained with, refused by name before anything is trained."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lit_rl.errors import PackingError, SettingsError
from lit_rl.policy.forward import hidden_states, output_head, score_terms
from lit_rl.policy.tree_attention.flex_blocks import BLOCK
from lit_rl.policy.tree_attention.plan import TreePlan
from lit_rl.policy.tree_attention.registry import PREFIX
from lit_rl.tensors import LossTerms, PackedRow, TreeLayout

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_BOUND_ROPES = {"dynamic", "longrope"}
_HALVES = (torch.bfloat16, torch.float16)
# Layers that carry a state along the packed row, past the end of a branch.
_STATEFUL = (
    "mamba",
    "deltanet",
    "shortconv",
    "rwkv",
    "recurrent",
    "lightningattention",
    "linearattention",
    "retention",
)


def refuse_unsupported(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raises SettingsError where packing would silently train something else than each sample alone.

    Args:
        model: The policy, not yet trained.
        dtype: What it will compute in: autocast's type, or the weights'.
    """
    _refuse_layers(model)
    _refuse_dropout(model)
    output_head(model)
    _probe(model, dtype)


def dropout_attributes(owner: object) -> list[str]:
    """Names of the dropout probabilities above 0 that hang on a module or a configuration."""
    return [
        name
        for name, value in vars(owner).items()
        if isinstance(value, float) and value > 0 and ("dropout" in name or name.endswith(("pdrop", "drop_rate")))
    ]


def _refuse_layers(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__

    def refuse(why: str) -> SettingsError:
        return SettingsError("model.pretrained", name, f"{why}; choose a model with full or sliding attention")

    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if kinds - _LAYER_TYPES:
        raise refuse(
            f"layers of type {', '.join(sorted(kinds - _LAYER_TYPES))} cannot run over a row of shared prefixes"
        )
    stateful = {type(m).__name__ for m in model.modules() if any(s in type(m).__name__.lower() for s in _STATEFUL)}
    if stateful or any(isinstance(m, torch.nn.Conv1d) for m in model.modules()):
        what = ", ".join(sorted(stateful)) or "convolutions"
        raise refuse(f"{what}: a state that runs along the packed row would leak from one branch into the next")
    if any(parameter.endswith("sinks") for parameter, _ in model.named_parameters()):
        raise refuse("attention sinks are not part of the tree attention backends")
    if not str(config._attn_implementation).startswith(PREFIX):
        raise refuse(f"its attention is {config._attn_implementation!r}, which tree attention cannot replace")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in _LENGTH_BOUND_ROPES:
        raise refuse(f"its {kind} positions depend on the longest sample of a row")


def _refuse_dropout(model: PreTrainedModel) -> None:
    """A shared token would have one dropout mask for all of its samples."""
    found = {name for module in model.modules() for name in dropout_attributes(module)}
    modules = [
        name for name, m in model.named_modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0
    ]
    found.update(modules[:3])
    if found:
        raise SettingsError(
            "model.disable_dropout",
            False,
            f"the model drops out ({', '.join(sorted(found))}), which shared tokens cannot; set it to true",
        )


def _probe(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Runs [1, 2, 3] and [1, 2, 4, 5] (or longer ones) as a tree and alone, and the head against the model's own.

    This catches what no list of names does: a layer that looks along the row, positions that are ignored, logits that
    the model changes in a way of its own. Errors of that kind are of the size of the values, far above any rounding.
    """
    parameter = next(model.parameters())
    on_cpu = parameter.device.type == "cpu"
    if parameter.is_meta or (on_cpu and parameter.dtype in _HALVES):
        return  # nothing to run, or half precision on CPU, where a large model would take minutes
    training = model.training
    model.eval()
    mixed = not on_cpu and dtype in _HALVES and dtype != parameter.dtype
    try:
        with torch.no_grad(), torch.autocast(parameter.device.type, dtype if mixed else None, enabled=mixed):
            flex = str(model.config.get_text_config()._attn_implementation).endswith("flex")
            shared = [1, 2] * (BLOCK if flex else 1)  # rows of one block never reach that backend's kernel
            _compare(model, shared, tolerance=0.1 if mixed or parameter.dtype in _HALVES else 1e-3)
    finally:
        model.train(training)


def _compare(model: PreTrainedModel, shared: list[int], tolerance: float) -> None:
    def refuse(why: str) -> SettingsError:
        return SettingsError("model.pretrained", type(model).__name__, f"{why}; choose another model")

    n = len(shared)
    tree = _row(model, [*shared, 4, 5, 3], [*range(n + 2), n], [0, n, n + 2, n + 3], [-1, 0, 0], [n + 3, n + 2, n + 3])
    long, short = _row(model, [*shared, 4, 5]), _row(model, [*shared, 3])
    try:
        packed, alone = hidden_states(model, tree), hidden_states(model, long)
    except (PackingError, TypeError) as cause:
        raise refuse(f"tree attention does not fit it ({cause})") from cause
    expected = torch.cat([alone, hidden_states(model, short)[n:]]).double()
    apart = (packed.double() - expected).norm(dim=-1)
    if bool((apart > tolerance * expected.norm(dim=-1).clamp(min=1e-6)).any()):
        raise refuse("tokens of one branch reach another in a packed row")
    own = model(
        input_ids=long.tree.token_ids[None],
        position_ids=long.tree.position_ids[None],
        use_cache=False,
        tree=TreePlan(long.tree),
    ).logits[0]
    own = own.float().log_softmax(-1).gather(1, long.terms.target_ids[:, None])[:, 0].double()
    ours = score_terms(model, alone, long.terms, temperature=1.0).logprobs.double()
    if bool(((ours - own).abs() > tolerance * own.abs().clamp(min=1.0)).any()):
        raise refuse("its logits are made in a way that the chunked head does not know")


def _row(
    model: PreTrainedModel,
    tokens: list[int],
    depths: list[int] | None = None,
    starts: list[int] | None = None,
    parents: list[int] | None = None,
    ends: list[int] | None = None,
) -> PackedRow:
    """A row by hand; one branch unless told otherwise; every place predicts the token behind it."""
    size = len(tokens)
    columns = tokens, depths or list(range(size)), starts or [0, size], parents or [-1], ends or [size]
    tree = TreeLayout(*(torch.tensor(column) for column in columns))
    index, none = torch.arange(size), torch.zeros(size)
    terms = LossTerms(index, tree.token_ids.roll(-1), none, none, torch.zeros_like(index))
    return PackedRow(tree, terms).to(next(model.parameters()).device)
