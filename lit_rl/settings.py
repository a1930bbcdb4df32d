"""Frozen option groups, checked on creation; the messages name the key that a user types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lit_rl.errors import SettingsError


def require(key: str, value: Any, ok: bool, remedy: str) -> None:
    """Raises SettingsError naming ``key`` and ``value`` unless ``ok``."""
    if not ok:
        raise SettingsError(key, value, remedy)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Each field is sent even where it is neutral, so that no model default leaks in.

    Args:
        temperature: Above 0; the trainer divides its logits by the same number.
        extra: More fields of the server's sampling parameters, for instance ``{"stop": ["\\n"]}``.
    """

    temperature: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # vLLM lifts temperatures below 0.01 to 0.01, and 0 means greedy: neither is a distribution to train on.
        require("data.sampling.temperature", self.temperature, self.temperature >= 0.01, "give 0.01 or more")
        named = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "logprobs", "n", "seed"}
        clash = sorted(named & set(self.extra))
        require("data.sampling.extra", self.extra, not clash, f"{clash} have keys of their own or are set by lit_rl")


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset for ``datasets.load_dataset``: ``{path, name, split}`` and what else that function takes.

    Args:
        path: Hub id, folder, or a builder such as ``json``.
        name: Configuration of the dataset.
        split: Which split; one dataset must come back.
        data_files: Files of a builder dataset.
        kwargs: More arguments of ``load_dataset``.
    """

    path: str
    name: str | None = None
    split: str = "train"
    data_files: str | list[str] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetFunction:
    """A dataset made by a function: its import path and its arguments.

    Args:
        fn: Import path of a function that returns a ``datasets.Dataset``, for instance ``lit_rl.tasks.arithmetic``.
        kwargs: Its keyword arguments.
    """

    fn: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """One reward function and how it counts.

    Args:
        fn: Import path, or a module-level callable in Python. Called with ``prompts``, ``completions``,
            ``completion_ids``, ``truncated`` and the dataset's other columns as keyword arguments, one entry a rollout;
            returns one float or None per rollout. May be ``async``.
        weight: Its factor in the sum.
        name: Its name in the metrics; the function's own name by default.
        timeout: Seconds after which a call counts as hung.
    """

    fn: str | Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        require("data.rewards[].timeout", self.timeout, self.timeout > 0, "give seconds above 0")


@dataclass(frozen=True)
class EndpointSpec:
    """What the rollout process knows of the servers: addresses and the protocol, nothing else.

    Attributes:
        urls: Base URLs; requests are spread over them.
        model_name: The name under which the model is served.
        timeout: Seconds that one request may take.
        generate_route: True where every server has the token-in/token-out route ``/inference/v1/generate``.
        send_seeds: Whether each request carries a seed of its own (a CPU server dies of it).
    """

    urls: tuple[str, ...]
    model_name: str
    timeout: float = 1800.0
    generate_route: bool = False
    send_seeds: bool = False


@dataclass(frozen=True)
class RolloutSettings:
    """Everything that the rollout process needs, in one picklable record made by ``RolloutDataModule``.

    Attributes:
        num_generations: Rollouts of a prompt.
        num_generations_eval: Rollouts of an evaluation prompt.
        max_completion_length: Generated tokens of a rollout over all its turns.
        max_concurrent_rollouts: Ceiling of rollouts in flight.
        queue_maxsize: Samples that the rollout queue holds before generation waits.
        score_queue_maxsize: Groups that wait for scoring before generation waits.
        max_retries: Tries of one request beyond the first.
        heartbeat_s: Seconds between two signs of life.
        seed: Of the prompt order and of request seeds.
        shuffle: Whether each epoch's order is a permutation by seed and epoch.
        max_epochs: Passes over the prompts; None = until told to stop.
        num_sampler_logprobs: Most likely tokens of each position that the sampler tells; 0 = only the sampled one.
        drop_equal_rewards: GRPO's rule; objectives say whether they have it.
        release_by_version: 0, or how many groups may start per policy version (``max_staleness = 0``).
        sampling: Sampling options.
        chat_template_kwargs: Handed to the chat template.
        parent_pid: The child ends when this process is gone.
        loop_options: Init arguments of a ``RolloutLoop`` subclass, read as ``self.config.<name>``.
    """

    num_generations: int = 8
    num_generations_eval: int = 1
    max_completion_length: int = 2048
    max_concurrent_rollouts: int = 8
    queue_maxsize: int = 1024
    score_queue_maxsize: int = 16
    max_retries: int = 3
    heartbeat_s: float = 1.0
    seed: int = 42
    shuffle: bool = False
    max_epochs: int | None = None
    num_sampler_logprobs: int = 0
    drop_equal_rewards: bool = True
    release_by_version: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    parent_pid: int = 0
    loop_options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """``self.config.pass_rate_cap`` reads the loop's own option of that name."""
        options = self.__dict__.get("loop_options", {})
        if name in options:
            return options[name]
        raise AttributeError(name)
