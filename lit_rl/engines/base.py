"""Where tokens come from, as the trainer sees it: what YAML names (``Engine``), what then runs (``RunningEngine``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_rl.settings import EndpointSpec

if TYPE_CHECKING:
    from lit_rl.sync.transport import Transport


@dataclass(frozen=True)
class EngineNeeds:
    """What a run asks of its engine; made by ``RolloutDataModule`` from the whole configuration.

    Attributes:
        model: Hub id or folder of the checkpoint that training starts from.
        tokenizer: Hub id or folder of its tokenizer.
        dtype: The trainer's compute dtype, by name.
        longest_prompt: Tokens of the longest prompt.
        max_completion_length: Generated tokens of a rollout.
        max_logprobs: Candidates per token that the objective asks for; 0 = only the sampled token's.
        device: What trainer and engine run on.
        trust_remote_code: Whether code shipped with the checkpoint may run.
        run_dir: The run's folder; logs go there.
        seed: Of what a launched engine draws by itself.
        revision: Of the checkpoint on the hub, where the user gave one.
        trainer_devices: Places, in ``visible_devices``, of the GPUs that the trainer uses.
        visible_devices: Names of the GPUs that this run may use (see ``engines/gpus.py``); None where the engine may
            be meant for another machine.
    """

    model: str
    tokenizer: str
    dtype: str
    longest_prompt: int
    max_completion_length: int
    max_logprobs: int
    device: Literal["cpu", "cuda"]
    trust_remote_code: bool
    run_dir: Path
    seed: int = 0
    revision: str | None = None
    trainer_devices: tuple[int, ...] = ()
    visible_devices: tuple[str, ...] | None = None

    @property
    def max_model_len(self) -> int:
        return self.longest_prompt + self.max_completion_length


class RunningEngine(ABC):
    """An engine that was started, or found; ends with ``stop``."""

    @abstractmethod
    def connect(self) -> tuple[EndpointSpec, int]:
        """Waits until every server answers, and checks it against the run's needs.

        Returns:
            The endpoint for the rollout process, and the server's ``max_model_len``.

        Raises:
            ServerError: dead, unreachable within the engine's timeout, or not what the run needs; with the remedy.
        """

    @abstractmethod
    def transport(self, timeout: float) -> Transport:
        """What carries weights to it; ``timeout`` bounds each call to a server, in seconds."""

    def check_alive(self, patience: float = 0.0) -> None:  # noqa: B027  (a server that was found is somebody else's)
        """Raises ServerError when what ``Engine.start`` started has ended, with what its log says.

        Args:
            patience: Seconds in which it may still be ending.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends what ``Engine.start`` started; safe to call twice."""


class Engine(ABC):
    """What YAML names under ``data.engine``. Subclasses are frozen dataclasses; creating one starts nothing."""

    timeout: float

    @abstractmethod
    def start(self, needs: EngineNeeds) -> RunningEngine:
        """Starts what must be started and returns at once; ``RunningEngine.connect`` waits for it."""
