"""Stop 13: the LightningModule: every row's forward and backward, then one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from lit_rl.capabilities import check_module, compute_dtype
from lit_rl.metrics import Last, Mean, Stats, Sum, merge_into
from lit_rl.tensors import PackedRow, StepBatch, TokenScores
from lit_rl.train.allocator import keep_freed_memory
from lit_rl.train.gradients import ClipAlgorithm, clip_gradients, gradient_norm
from lit_rl.train.objectives import GRPO, Objective
from lit_rl.types import EvalResult

if TYPE_CHECKING:  # transformers costs seconds, and `--help` and `--print_config` need none of it
    from transformers import PreTrainedModel


class PolicyModule(pl.LightningModule):
    """The policy and its objective; one batch is one optimizer step (a ``StepBatch``).

    Args:
        pretrained: Hub id or folder of the checkpoint that training starts from.
        objective: What is minimised.
        model: The policy as a ``PreTrainedModel`` instead (Python only); ``pretrained`` still names its tokenizer and
            the checkpoint that the server starts from.
        dtype: Of the weights as loaded: ``float32``, ``bfloat16``, ``float16`` or ``auto``.
        init_kwargs: More arguments of ``from_pretrained``, for instance ``{revision: main}``.
        trust_remote_code: Whether code shipped with the checkpoint may run; reaches the tokenizer too.
        tokenizer: Hub id or folder of the tokenizer; the policy's own by default.
        attention: Tree attention backend: ``auto``, or one by name.
        gradient_checkpointing: Recompute activations in the backward pass.
        disable_dropout: Set every dropout to 0; needed where the checkpoint has any: a shared token is forwarded once.
        compile: Run each decoder layer through ``torch.compile``, with dynamic shapes.
        optimizer: Built from the parameters.
        lr_scheduler: Built from the optimizer, stepped once per optimizer step; constant by default.
        gradient_clip_val: Set through ``trainer.gradient_clip_val`` on the command line. None does not clip.
        gradient_clip_algorithm: Set through ``trainer.gradient_clip_algorithm``: ``norm`` or ``value``.
        default_callbacks: Add weight sync, staleness, epochs and metrics callbacks where the trainer has none.
    """

    def __init__(
        self,
        pretrained: str,
        objective: Objective = GRPO(),  # noqa: B008  (frozen)
        *,
        model: Any = None,
        dtype: str = "float32",
        init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        tokenizer: str | None = None,
        attention: str = "auto",
        gradient_checkpointing: bool = True,
        disable_dropout: bool = False,
        compile: bool = False,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        gradient_clip_val: float | None = 1.0,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
        default_callbacks: bool = True,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pretrained = pretrained
        self.objective = objective
        self.dtype_name = dtype
        self.init_kwargs = init_kwargs or {}
        self.trust_remote_code = trust_remote_code
        self.tokenizer_name = tokenizer or pretrained
        self.attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        self.disable_dropout = disable_dropout
        self.compile_layers = compile  # a module's `compile` is torch's own method
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm: ClipAlgorithm = gradient_clip_algorithm or "norm"
        self.default_callbacks = default_callbacks
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._given_model = model
        self.policy: PreTrainedModel | None = None
        self.forwarded_tokens = 0
        self._stats: Stats = {}
        check_module(self)

    @property
    def is_given(self) -> bool:
        """Whether the policy is an object that the user made, and no checkpoint."""
        return self._given_model is not None

    # ---- construction -------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """The callbacks that training cannot do without, where the trainer lacks them."""
        from lit_rl.train.callbacks import missing_defaults

        return missing_defaults(self.trainer.callbacks) if self.default_callbacks else []

    def configure_model(self) -> None:
        if self.policy is not None:
            return
        from lit_rl.policy.build import build_policy

        keep_freed_memory()
        precision = "32-true" if self._trainer is None else str(self.trainer.precision)
        self.policy = build_policy(
            self._given_model if self._given_model is not None else self.pretrained,
            dtype=self.dtype_name,
            init_kwargs=self.init_kwargs,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            gradient_checkpointing=self.gradient_checkpointing,
            disable_dropout=self.disable_dropout,
            compile_layers=self.compile_layers,
            device=torch.get_default_device(),  # Lightning's, which moves the module there only later
            compute_dtype=compute_dtype(precision, self.dtype_name),
        )

    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        optimizer = self._optimizer([p for p in self.policy.parameters() if p.requires_grad])
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}

    # ---- one step -----------------------------------------------------------------------------------------------

    def score(self, row: PackedRow, temperature: float) -> TokenScores:
        """Log-probs and entropy of the row's loss terms under the policy, at ``temperature``."""
        from lit_rl.policy.forward import score_row

        assert self.policy is not None
        return score_row(self.policy, row, temperature=temperature)

    @property
    def temperature(self) -> float:
        """The sampling temperature; its one home is ``data.sampling.temperature``."""
        return float(self.trainer.datamodule.sampling.temperature)

    def training_step(self, batch: StepBatch, batch_idx: int) -> None:
        """Forward and backward of each row, clip, step, schedule.

        A step without loss terms leaves the optimizer alone: momentum and decay would move the weights.
        """
        self.contribute(batch.stats)
        if batch.totals.loss_terms == 0:
            self.contribute({"batch/skipped_steps_total": Sum(1)})
            return
        with self._timed("perf/fwd_bwd_s"):
            loss = self._accumulate_gradients(batch)
        with self._timed("perf/optimizer_s"):
            norm = self._optimizer_step()
        self.forwarded_tokens += int(batch.stats.get("batch/forwarded_tokens_per_step", Mean(0)).total)
        self.contribute(
            {
                "loss": Mean(loss),
                "grad_norm": Mean(norm),
                "lr": Last(self.optimizers().param_groups[0]["lr"]),
                "num_tokens": Last(self.forwarded_tokens),
            }
        )

    def _accumulate_gradients(self, batch: StepBatch) -> float:
        """Adds every row's gradient; returns the step's loss."""
        total, forward_s, world = 0.0, 0.0, self.trainer.world_size
        for micro_batch, row in enumerate(batch.rows):
            started = time.perf_counter()
            scores = self.score(row, self.temperature)
            loss, stats = self.objective.row_loss(scores, row, batch.totals, micro_batch=micro_batch, world_size=world)
            forward_s += time.perf_counter() - started
            self.manual_backward(loss)
            self.contribute(stats)
            total += float(loss.detach()) / world
        self.contribute({"perf/fwd_s": Mean(forward_s)})
        return total

    def _optimizer_step(self) -> float:
        """Clips, steps, schedules; returns the gradient norm before clipping."""
        assert self.policy is not None
        optimizer = self.optimizers()
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = gradient_norm(parameters)
        clip_gradients(parameters, norm=norm, limit=self.gradient_clip_val, algorithm=self.gradient_clip_algorithm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        return float(norm)

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def validation_step(self, batch: EvalResult, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The rollout process sampled and scored the held-out prompts; here their means are recorded."""
        found = {"reward": batch.reward, **batch.func_rewards}
        named = {f"eval/{batch.name}/{name}": value for name, value in found.items()}
        self.contribute({name: Last(value) for name, value in named.items()})
        # for `ModelCheckpoint(monitor=...)` and what `trainer.validate` returns; the metrics callback feeds the loggers
        self.log_dict(named, logger=False, add_dataloader_idx=False, batch_size=1, rank_zero_only=True)

    # ---- metrics ------------------------------------------------------------------------------------------------

    def contribute(self, stats: Stats) -> None:
        """Adds metric contributions to the current window; the metrics callback ships them."""
        merge_into(self._stats, stats)

    def drain_stats(self) -> Stats:
        """The window's contributions; a new window begins."""
        drained, self._stats = self._stats, {}
        return drained

    def peek(self, name: str) -> float | None:
        """The current window's value of one metric, or None where nothing was contributed."""
        stat = self._stats.get(name)
        return None if stat is None else stat.value()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.contribute({name: Mean(time.perf_counter() - started)})
