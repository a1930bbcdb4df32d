"""Stop 10: the LightningDataModule: datasets, the sampling server, the rollout process and the stream out of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rl.capabilities import check_data, check_trainer, compute_dtype
from lit_rl.engines.base import Engine, EngineNeeds, RunningEngine
from lit_rl.engines.gpus import visible_gpus
from lit_rl.engines.vllm_server import VLLMServer
from lit_rl.errors import SettingsError
from lit_rl.packing.planner import FixedCountPlanner, Planner, TokenBudgetPlanner
from lit_rl.rollout.handle import RolloutHandle
from lit_rl.rollout.ledger import Ledger
from lit_rl.rollout.process import import_loop
from lit_rl.rollout.prompts import check_dataset, dataset_fingerprint, encode_prompt, longest_prompt
from lit_rl.rollout.reward_functions import check_picklable, load_rewards
from lit_rl.settings import DatasetFunction, DatasetSpec, EndpointSpec, Reward, RolloutSettings, Sampling
from lit_rl.train.datasets import build_dataset
from lit_rl.train.stream import EvalStream, RolloutStream, bounded_length
from lit_rl.types import EvalResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_rl.train.callbacks.staleness import Staleness
    from lit_rl.train.module import PolicyModule

DatasetChoice = DatasetSpec | DatasetFunction
RewardChoice = str | Reward

DEFAULT_EVAL_SET = "heldout"


class RolloutDataModule(pl.LightningDataModule):
    """Prompts in, optimizer steps out; everything between runs in a server and a child process that it owns.

    Args:
        train: Prompts: ``{path, name, split}`` for ``datasets.load_dataset``, or ``{fn, kwargs}``; in Python also a
            ``Dataset``. Needs a column ``prompt`` (message lists or plain text); the others reach the rewards.
        rewards: Reward functions by import path, or ``{fn, weight, name, timeout}``; in Python also callables.
        eval: Held-out prompts, or several sets by name.
        engine: Where tokens come from.
        sampling: How they are sampled.
        num_generations: Rollouts of a prompt; they share an advantage baseline.
        num_generations_eval: Rollouts of a held-out prompt.
        max_completion_length: Generated tokens of a rollout.
        samples_per_rank: Samples of a row without a token budget; in every mode the base of the in-flight ceiling.
        token_budget: Unique tokens of a row; null takes the server's ``max_model_len``, 0 or less packs
            ``samples_per_rank`` samples a row instead.
        accumulate_grad_batches: Set through ``trainer.accumulate_grad_batches``: rows per rank and step.
        chat_template_kwargs: Handed to the chat template.
        max_concurrent_rollouts: Rollouts in flight; null = as many as can be trained before they are stale.
        queue_maxsize: Samples that wait for the trainer before generation waits.
        score_queue_maxsize: Finished groups that wait for scoring before generation waits.
        worker_timeout: Seconds without a heartbeat after which the rollout process counts as hung.
        eval_timeout: Seconds that one evaluation may take.
        shuffle: Whether each epoch has an order of its own.
        seed: Of that order, of request seeds, and of a launched server.
        loop: A ``lit_rl.RolloutLoop`` subclass by import path; in Python also the class.
        loop_options: Its own options, read as ``self.config.<name>``.
    """

    def __init__(
        self,
        train: DatasetChoice,
        rewards: list[RewardChoice],
        *,
        eval: DatasetChoice | dict[str, DatasetChoice] | None = None,
        engine: Engine = VLLMServer(),  # noqa: B008  (frozen)
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        num_generations: int = 8,
        num_generations_eval: int = 1,
        max_completion_length: int = 2048,
        samples_per_rank: int = 8,
        token_budget: int | None = None,
        accumulate_grad_batches: int = 1,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_concurrent_rollouts: int | None = None,
        queue_maxsize: int = 1024,
        score_queue_maxsize: int = 16,
        worker_timeout: float = 300.0,
        eval_timeout: float = 1800.0,
        shuffle: bool = False,
        seed: int = 42,
        loop: str | None = None,
        loop_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.train, self.rewards = train, rewards
        self.eval = eval if isinstance(eval, dict) else {} if eval is None else {DEFAULT_EVAL_SET: eval}
        self.engine, self.sampling = engine, sampling
        self.num_generations, self.num_generations_eval = num_generations, num_generations_eval
        self.max_completion_length = max_completion_length
        self.samples_per_rank, self.token_budget = samples_per_rank, token_budget
        self.accumulate_grad_batches = accumulate_grad_batches
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.queue_maxsize, self.score_queue_maxsize = queue_maxsize, score_queue_maxsize
        self.worker_timeout, self.eval_timeout = worker_timeout, eval_timeout
        self.shuffle, self.seed = shuffle, seed
        self.loop, self.loop_options = loop, loop_options or {}
        self.staleness: Staleness | None = None  # the callback registers itself
        self.endpoint: EndpointSpec | None = None
        self.policy_version = 0
        self.sampler: RunningEngine | None = None
        self._handle: RolloutHandle | None = None
        self._ledger_state: dict[str, Any] | None = None
        self._is_checked = False
        check_data(self)

    # ---- set-up -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Loads and checks the data, and starts the server where one is to be launched; waits for nothing."""
        trainer, module = self._trainer, self._module
        self.check(trainer, module)
        # the rollout process loads the very same one, whatever revision or pad token it has
        self._tokenizer_folder = str(_made(Path(trainer.default_root_dir) / "tokenizer"))
        self.tokenizer.save_pretrained(self._tokenizer_folder)
        self.ledger = Ledger(
            len(self._train_set),
            seed=self.seed,
            shuffle=self.shuffle,
            fingerprint=dataset_fingerprint(self._train_set),
        )
        if self._ledger_state is not None:
            self.ledger.load_state_dict(self._ledger_state)
        on_cuda = trainer.strategy.root_device.type == "cuda"
        needs = self.engine_needs(
            module,
            precision=str(trainer.precision),
            device="cuda" if on_cuda else "cpu",
            trainer_devices=tuple(trainer.device_ids) if on_cuda else (),
            visible_devices=visible_gpus(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")),
            run_dir=Path(trainer.default_root_dir),
        )
        self.sampler = self.engine.start(needs)

    def check(self, trainer: pl.Trainer, module: PolicyModule) -> None:
        """Loads and checks, once, all that needs neither server nor policy: wrong input is told before slow work."""
        if self._is_checked:
            return
        check_trainer(trainer, module, self)
        self._rewards = [reward if isinstance(reward, Reward) else Reward(reward) for reward in self.rewards]
        check_picklable(self._rewards)
        load_rewards(self._rewards)  # a wrong import path is told here, not by the child a minute later
        import_loop(self.loop)
        _check_attention(trainer, module)
        self.load_prompts(module)
        self._is_checked = True

    def load_prompts(self, module: PolicyModule) -> None:
        """Loads the tokenizer and every dataset, and checks them."""
        if not module.is_given:
            from lit_rl.policy.checkpoint import require_model

            require_model(module.pretrained, module.init_kwargs)
        self.tokenizer = _load_tokenizer(module)
        self._train_set = _checked(self.train, "data.train")
        self._eval_sets = {name: _checked(choice, f"data.eval.{name}") for name, choice in self.eval.items()}

    def engine_needs(
        self,
        module: PolicyModule,
        *,
        precision: str,
        device: Literal["cpu", "cuda"],
        trainer_devices: tuple[int, ...],
        visible_devices: tuple[str, ...] | None,
        run_dir: Path,
    ) -> EngineNeeds:
        """What this run asks of its engine, from its loaded prompts and from what the trainer is told.

        Args:
            module: The policy; its weights need not be loaded.
            precision: ``trainer.precision`` in Lightning's long form, for instance ``32-true``.
            device: What the trainer runs on.
            trainer_devices: As ``EngineNeeds``.
            visible_devices: As ``EngineNeeds``.
            run_dir: The run's folder.
        """
        sets = (self._train_set, *self._eval_sets.values())
        return EngineNeeds(
            model=module.pretrained,
            tokenizer=module.tokenizer_name,
            dtype=compute_dtype(precision, module.dtype_name),
            longest_prompt=max(longest_prompt(rows, self.tokenizer, self.chat_template_kwargs) for rows in sets),
            max_completion_length=self.max_completion_length,
            # one more than is kept: see rollout/sampler.py
            max_logprobs=module.objective.candidates + 1 if module.objective.candidates else 0,
            device=device,
            trust_remote_code=module.trust_remote_code,
            run_dir=run_dir,
            seed=self.seed,
            revision=module.init_kwargs.get("revision"),
            trainer_devices=trainer_devices,
            visible_devices=visible_devices,
        )

    def connect(self) -> None:
        """Waits until every server answers, checks them, and starts the rollout process, which waits for version 1."""
        if self._handle is not None:
            return
        assert self.sampler is not None
        self.endpoint, self.max_model_len = self.sampler.connect()
        self._handle = RolloutHandle(
            self._rollout_settings(),
            self.endpoint,
            train=self._train_set,
            evals=self._eval_sets,
            rewards=self._rewards,
            tokenizer=self._tokenizer_folder,
            trust_remote_code=self._module.trust_remote_code,
            eos_token_ids=_eos_token_ids(self._module, self.tokenizer),
            loop=self.loop,
            start=self.ledger.start(),
            worker_timeout=self.worker_timeout,
        )
        self._handle.start()

    def _rollout_settings(self) -> RolloutSettings:
        per_step = self.samples_per_rank * self.accumulate_grad_batches * self._trainer.world_size
        staleness = self.staleness.max if self.staleness is not None else None
        ceiling = self.max_concurrent_rollouts
        if ceiling is None:  # what can be trained before it is stale; without a rule, one step ahead
            ceiling = max(staleness if staleness is not None else 1, 1) * per_step
        return RolloutSettings(
            num_generations=self.num_generations,
            num_generations_eval=self.num_generations_eval,
            max_completion_length=self.max_completion_length,
            max_concurrent_rollouts=ceiling,
            queue_maxsize=self.queue_maxsize,
            score_queue_maxsize=self.score_queue_maxsize,
            seed=self.seed,
            shuffle=self.shuffle,
            max_epochs=self._max_epochs,
            num_sampler_logprobs=self._module.objective.candidates,
            drop_equal_rewards=self._module.objective.drop_equal_rewards,
            release_by_version=-(-per_step // self.num_generations) if staleness == 0 else 0,
            sampling=self.sampling,
            chat_template_kwargs=self.chat_template_kwargs,
            parent_pid=os.getpid(),
            loop_options=self.loop_options,
        )

    # ---- the streams --------------------------------------------------------------------------------------------

    def train_dataloader(self) -> RolloutStream:
        assert self._handle is not None, "the weight sync callback connects before the first batch"
        trainer = self._trainer
        self.stream = RolloutStream(
            producer=self._handle,
            planner=self._planner(),
            ledger=self.ledger,
            max_epochs=self._max_epochs,
            length=bounded_length(
                len(self._train_set), self.num_generations, trainer.max_steps, steps_done=trainer.global_step
            ),
            policy_version=lambda: self.policy_version,
            staleness=self.staleness,
            look=self._look,
        )
        return self.stream

    def val_dataloader(self) -> list[EvalStream]:
        return [EvalStream(self._evaluation(name)) for name in self._eval_sets]

    def _evaluation(self, name: str) -> Callable[[], EvalResult]:
        def evaluate() -> EvalResult:
            assert self._handle is not None, "the weight sync callback connects before the first evaluation"
            return self._handle.evaluate(name, deadline_s=self.eval_timeout, look=self._look)

        return evaluate

    def _look(self) -> None:
        """What the trainer asks while it waits for rollouts: was it told to end, and does the launched server live?"""
        if self._trainer.received_sigterm:
            raise SIGTERMException
        if self.sampler is not None:
            self.sampler.check_alive()

    def _planner(self) -> Planner:
        ranks, rows = self._trainer.world_size, self.accumulate_grad_batches
        if self.token_budget is not None and self.token_budget <= 0:
            return FixedCountPlanner(self.samples_per_rank, ranks=ranks, micro_batches=rows)
        return TokenBudgetPlanner(self.token_budget or self.max_model_len, ranks=ranks, micro_batches=rows)

    def set_policy_version(self, version: int) -> None:
        """The weights of this version have arrived; rollouts that start from now on carry it."""
        self.policy_version = version
        assert self._handle is not None
        self._handle.set_policy_version(version)

    def probe_prompts(self, count: int) -> list[list[int]]:
        """Token ids of the first prompts, for the receipt of the cold sync."""
        rows = [self._train_set[i] for i in range(min(count, len(self._train_set)))]
        return [encode_prompt(self.tokenizer, row["prompt"], self.chat_template_kwargs) for row in rows]

    # ---- state and end ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ledger_state = state_dict["ledger"]

    def on_exception(self, exception: BaseException) -> None:
        self._stop()

    def teardown(self, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        """Ends the child, then the server; safe to call twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.stop()
        sampler, self.sampler = self.sampler, None
        if sampler is not None:
            sampler.stop()

    # ---- what the trainer knows ---------------------------------------------------------------------------------

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def _module(self) -> PolicyModule:
        return self._trainer.lightning_module

    @property
    def _max_epochs(self) -> int | None:
        """Passes over the prompts; ``max_steps`` wins where it is set."""
        trainer = self._trainer
        return None if trainer.max_steps != -1 or trainer.max_epochs == -1 else trainer.max_epochs


def _made(folder: Path) -> Path:
    """A folder of the run's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        remedy = f"the run's folder cannot be made ({cause.strerror}); give one where you may write"
        raise SettingsError("trainer.default_root_dir", str(folder.parent), remedy) from cause
    return folder


def _checked(choice: Any, key: str) -> Any:
    dataset = build_dataset(choice, key)
    check_dataset(dataset, key)
    return dataset


def _check_attention(trainer: pl.Trainer, module: PolicyModule) -> None:
    from lit_rl.policy.tree_attention.registry import require_backend

    require_backend(module.attention, trainer.strategy.root_device)


def _load_tokenizer(module: PolicyModule) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from lit_rl.policy.checkpoint import require_files

    name, key = module.tokenizer_name, "model.tokenizer"
    require_files(name, key, files={"tokenizer": ("*token*", "*vocab*", "*.model")})
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=module.trust_remote_code, **_revision(module))
    except (OSError, ValueError) as cause:
        raise SettingsError(key, name, f"no tokenizer could be loaded from it: {cause}") from cause
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _revision(module: PolicyModule) -> dict[str, Any]:
    """The checkpoint's revision is also its tokenizer's, but not that of a tokenizer from elsewhere."""
    given = module.init_kwargs.get("revision")
    return {"revision": given} if given is not None and module.tokenizer_name == module.pretrained else {}


def _eos_token_ids(module: PolicyModule, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends an answer: the tokenizer's, the model's and its generation config's."""
    found = [tokenizer.eos_token_id]
    for config in (module.policy.config, getattr(module.policy, "generation_config", None)):  # type: ignore[union-attr]
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids]
    return sorted({int(i) for i in found if i is not None})
