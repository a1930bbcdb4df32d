"""Records of plain Python and numpy that cross walls; no torch here.

They follow a sample on its way (see ``README.md``): a dataset row is a ``Prompt``; one conversation sampled for it is
a ``Rollout`` of ``TurnRecord``s; reconciling its turns gives ``Sequence``s; all rollouts of a prompt are a
``RolloutGroup``, which is scored as one; its ``Sequence``s with an advantage are ``Sample``s, and travel to the trainer
as one ``SampleGroup``. A group that will not be trained travels as a ``DroppedGroup``, so that the ledger hears of it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

Message = dict[str, Any]
"""One chat message: at least ``role`` and ``content``."""

PromptContent = str | list[Message]
"""A prompt as the dataset has it: plain text (no template is applied) or a message list."""


class Position(NamedTuple):
    """Where a prompt stands in the run: pass over the data, and place in that pass's order (not the dataset row)."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls


@dataclass(frozen=True, slots=True)
class Prompt:
    """Stop 1: one dataset row that may be sampled.

    Attributes:
        position: Its place in the ledger.
        row_index: The row's index in the dataset.
        content: Plain text or a message list.
        prompt_ids: ``content`` as tokens: templated when it is a message list, encoded as it stands when it is text.
        columns: The other columns of the row, handed to the rewards.
    """

    position: Position
    row_index: int
    content: PromptContent
    prompt_ids: list[int]
    columns: dict[str, Any]


@dataclass(slots=True)
class TurnRecord:
    """One sampling request: the prompt sent and the tokens sampled for it.

    Attributes:
        prompt_ids: Token ids of the whole prompt, with all earlier turns of the conversation.
        output_ids: The sampled token ids.
        output_log_probs: The sampler's log-prob of each sampled token (natural log, at the sampling temperature).
            Needed where any of the tokens is trained.
        output_mask: One value per output token, 1 = trained, 0 = context only. None trains all of them.
        output_sampling_mask: Per output token the ids that the sampler could have chosen under truncated sampling.
            None = the whole vocabulary.
        output_sampler_logprobs: Per output token the sampler's most likely tokens, id to log-prob.
        finish_reason: ``stop`` (ended by itself) or ``length`` (cut off), as the server said; None if unknown.
        policy_versions: The policy version that produced each output token, where the server tells it.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float] = field(default_factory=list)
    output_mask: list[int] | None = None
    output_sampling_mask: list[list[int]] | None = None
    output_sampler_logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    policy_versions: list[int] | None = None


@dataclass(slots=True)
class Rollout:
    """Stop 3: the finished result of ``generate_one``.

    Attributes:
        completion: What was generated after the prompt: messages for a message prompt, text for a plain-text prompt.
        completion_ids: The generated token ids.
        turns: The sampling requests in order; the training sequences are built from them.
        tool_call_count: How many tool calls were made.
        tool_failure_count: How many of them failed.
        reward: A reward found while generating, added to those of the reward functions. None = none from here.
        rollout_id: Names the rollout in messages.
    """

    completion: PromptContent
    completion_ids: list[int]
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class TokenSets:
    """A set of vocabulary entries for each of T tokens, end to end: token t has ``ids[offsets[t] : offsets[t + 1]]``.

    Attributes:
        offsets: [T + 1] int64.
        ids: [K] int32.
        logprobs: [K] float32, the sampler's log-prob of each; None where it is not told.
    """

    offsets: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray | None = None

    @classmethod
    def of(cls, sets: list[Any]) -> TokenSets:
        """From one entry a token: None (no set), a list of ids, or a dict from id to log-prob."""
        sizes = np.fromiter((0 if one is None else len(one) for one in sets), np.int64, len(sets))
        offsets = np.zeros(len(sets) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        ids = np.fromiter((i for one in sets if one is not None for i in one), np.int32, offsets[-1])
        told = any(isinstance(one, dict) for one in sets)
        values = (value for one in sets if one is not None for value in one.values()) if told else None
        return cls(offsets, ids, None if values is None else np.fromiter(values, np.float32, offsets[-1]))


@dataclass(slots=True)
class Sequence:
    """Stop 4: tokens of one training sequence; T tokens.

    Attributes:
        token_ids: [T] int64.
        completion_mask: [T] bool, True where the token is trained.
        sampler_logprobs: [T] float32, 0 where the token is not trained.
        sampling_masks: What truncated sampling could have chosen, the sampled token included; an empty set, or None for
            all tokens, is the whole vocabulary.
        sampler_candidates: The sampler's most likely tokens with their log-probs; None = not asked for.
    """

    token_ids: np.ndarray
    completion_mask: np.ndarray
    sampler_logprobs: np.ndarray
    sampling_masks: TokenSets | None = None
    sampler_candidates: TokenSets | None = None


@dataclass(slots=True)
class RolloutGroup:
    """All rollouts of one prompt, scored together; each list has one entry per rollout that did not fail.

    Attributes:
        prompts: The prompt of each rollout (the same content).
        reward_kwargs: The other dataset columns, one value per rollout, handed to the reward functions by name.
        completions: What each rollout generated.
        completions_ids: Token ids of each completion.
        completions_sequences: The training sequences built from each rollout.
        tool_call_counts: Tool calls of each rollout.
        tool_failure_counts: Failed tool calls of each rollout.
        model_version: The policy version when the group's first rollout started.
        group_id: Counts groups in the rollout process from 0.
        row_index: The prompt's row in the dataset.
        env_rewards: Class and reward of each rollout's environment, where it has one that rewards.
        rollout_rewards: ``Rollout.reward`` of each rollout.
        queued_at: ``time.monotonic()`` when it was queued for scoring.
        rewards: [G] float64 total reward, NaN where no source scored the rollout; set before ``compute_advantages``.
        position: The prompt's place in the ledger.
        rollout_ids: Name of each rollout.
        truncated: Whether each rollout was cut off by ``max_completion_length``.
        func_rewards: Per reward source its [G] float64 values (NaN = not scored); set by scoring.
    """

    prompts: list[PromptContent]
    reward_kwargs: dict[str, list[Any]]
    completions: list[PromptContent]
    completions_ids: list[list[int]]
    completions_sequences: list[list[Sequence]]
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int
    group_id: int
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]
    queued_at: float = 0.0
    rewards: np.ndarray | None = None
    position: Position = Position(0, 0)
    rollout_ids: list[str] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    func_rewards: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True)
class Sample:
    """Stop 6: one sequence and its rollout's advantage; what the trainer packs.

    Attributes:
        sequence: The tokens, mask and sampler log-probs.
        advantage: The rollout's advantage.
        reward: The rollout's total reward.
        rollout_id: Names the rollout in messages.
        group_id: The group it belongs to; samples of a group share their prompt.
        version_first: Policy version when the group's first rollout started; staleness counts from it.
    """

    sequence: Sequence
    advantage: float
    reward: float
    rollout_id: str
    group_id: int
    version_first: int


class DropReason(str, Enum):
    """Why a group is not trained. The first five count for the epoch, the rest are dispatched again."""

    EQUAL_REWARDS = "equal_rewards"
    UNSCORABLE = "unscorable"
    OVERSIZE = "oversize"
    REJECTED = "rejected"
    FAILED = "failed"
    STALE = "stale"
    CANCELLED = "cancelled"

    @property
    def counts_for_epoch(self) -> bool:
        return self not in (DropReason.STALE, DropReason.CANCELLED)


@dataclass(slots=True)
class SampleGroup:
    """Stops 6 to 8: the samples of one prompt; one message on the rollout queue.

    Attributes:
        position: Its place in the ledger.
        group_id: Counts groups in the rollout process.
        row_index: The prompt's row in the dataset.
        version_first: Policy version when its first rollout started.
        samples: At least one.
        stats: Metric contributions of the group, by registered name (see ``lit_rl.metrics``).
        reward_group_std: Population standard deviation of the group's scorable total rewards.
        func_group_stats: Per reward source (mean, population std) over the group's scored rollouts.
        queued_at: ``time.time()`` when it was put on the rollout queue.
    """

    position: Position
    group_id: int
    row_index: int
    version_first: int
    samples: list[Sample]
    stats: dict[str, Any] = field(default_factory=dict)
    reward_group_std: float = 0.0
    func_group_stats: dict[str, tuple[float, float]] = field(default_factory=dict)
    queued_at: float = 0.0


@dataclass(slots=True)
class DroppedGroup:
    """A prompt that will not be trained: why, and the metric contributions that it still makes."""

    position: Position
    row_index: int
    reason: DropReason
    detail: str = ""
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RolloutReport:
    """Figures of the rollout process that belong to no group (throughput, concurrency, queue sizes)."""

    stats: dict[str, Any]


@dataclass(slots=True)
class EvalResult:
    """The answer to one evaluation: per reward source the mean over the scored rollouts, and the total."""

    name: str
    policy_version: int
    prompts: int
    rollouts: int
    reward: float
    func_rewards: dict[str, float]
    stats: dict[str, Any] = field(default_factory=dict)

    def to(self, device: object) -> EvalResult:
        """Lightning moves every batch; there is nothing to move here."""
        return self
