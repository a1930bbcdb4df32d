"""The ``lit-rl`` command: Lightning's command line over ``PolicyModule`` and ``RolloutDataModule``."""

from __future__ import annotations

import os

# Read by the OpenMP runtime when torch loads it, so it stands before torch. On a CPU that trainer and server share, a
# thread that spins while it waits for its siblings takes the core that they need: six times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lit_rl.ending import Ending, without_traceback

all_is_imported = without_traceback()  # a Ctrl-C meanwhile: the imports take seconds

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lit_rl.capabilities import check_checkpoint_path, check_one_rank, check_trainer_flags
from lit_rl.serve import serve
from lit_rl.train.callbacks import Staleness, WeightSync
from lit_rl.train.data import RolloutDataModule
from lit_rl.train.module import PolicyModule
from lit_rl.usage import Parser, refusals_of_lightning

all_is_imported()

TRAINER_DEFAULTS = {"max_epochs": 3, "gradient_clip_val": 1.0, "log_every_n_steps": 1, "num_sanity_val_steps": 1}
"""The documents' defaults where Lightning's differ."""

ENDING = Ending()

OURS = {"gradient_clip_val": None, "gradient_clip_algorithm": None, "accumulate_grad_batches": 1}
"""Trainer flags that module and data carry out, and what the Trainer itself, which refuses them, is given."""


LIVE = ("logger", "callbacks", "plugins", "profiler", "strategy")
"""Trainer options that may be objects: ``serve`` makes none of them."""


class CommandLineTrainer(pl.Trainer):
    """Lightning's, with a method for the subcommand that Lightning lacks."""

    def serve(self, ckpt_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Starts the server that ``fit`` would launch, in this terminal; ``--print`` shows it.

        Args:
            ckpt_path: An option of ``fit``, so that one configuration serves both; a server starts from
                ``model.pretrained`` and is given the weights by the trainer.
            weights_only: The same.
        """
        raise NotImplementedError("`lit-rl serve` runs LitRLCLI.serve, without a Trainer")


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml into the run's folder and hands it to the loggers."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config = self.parser.dump(self.config, skip_none=False)
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": config})


class LitRLCLI(LightningCLI):
    """Adds the forced callbacks under keys of their own, the links, and one folder per run."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in self.trainer_defaults.items()})
        # `model.model` takes a live object and exists for Python only
        skip = {"model", "default_callbacks"}
        parser.add_class_arguments(PolicyModule, "model", fail_untyped=False, sub_configs=True, skip=skip)
        parser.add_class_arguments(RolloutDataModule, "data", fail_untyped=False, sub_configs=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(WeightSync, "weight_sync")
        parser.add_lightning_class_args(Staleness, "staleness")
        for flag in ("gradient_clip_val", "gradient_clip_algorithm"):
            parser.link_arguments(f"trainer.{flag}", f"model.{flag}")
        parser.link_arguments("trainer.accumulate_grad_batches", "data.accumulate_grad_batches")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        skip = {"model", "datamodule"}
        return {
            "fit": {*skip, "train_dataloaders", "val_dataloaders"},
            "validate": {*skip, "dataloaders"},
            "serve": set(),
        }

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "serve":  # as a method's argument it would be `--print true`
            parser.add_argument("--print", action="store_true", help="Print the command line and environment only.")
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        self.words = sys.argv[1:] if args is None else args
        super().parse_arguments(parser, args)

    def serve(self, **_: Any) -> None:
        """What ``lit-rl serve`` runs; like ``fit``, it gets what was made of the configuration."""
        config = self.config[self.subcommand]
        serve(self.model, self.datamodule, config["trainer"], words=self.words, show=config["print"])

    def before_instantiate_classes(self) -> None:
        """Gives each run a folder of its own below ``trainer.default_root_dir``; loggers without one write there."""
        trainer = self.config[self.config.subcommand]["trainer"]
        if self.subcommand == "serve":  # it has no run, and no objects of a Trainer
            for name in LIVE:
                trainer[name] = None
            return
        root = Path(trainer.get("default_root_dir") or "runs")
        folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        trainer["default_root_dir"] = str(folder)
        loggers = trainer.get("logger")
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            args = getattr(logger, "init_args", None)
            if args is not None and args.get("save_dir", "") in (None, ".", ""):
                args["save_dir"] = str(folder)

    def before_fit(self) -> None:
        """What is wrong is told before a logger opens a run."""
        self.datamodule.check(self.trainer, self.model)

    before_validate = before_fit

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        if self.subcommand == "serve":
            return self.trainer_class  # nothing asks it for more than the name of its method
        trainer = self._get(self.config_init, "trainer", default={})
        if trainer.get("max_steps", -1) != -1:
            kwargs["max_epochs"] = -1  # max_steps wins where it is set
        check_checkpoint_path(self._get(self.config, "ckpt_path"))
        check_trainer_flags(trainer, gpus=CUDAAccelerator.auto_device_count())
        with refusals_of_lightning(vars(trainer)):
            created = super().instantiate_trainer(**OURS, **kwargs)
        check_one_rank(created)
        ENDING.step = lambda: created.global_step
        return created


@contextlib.contextmanager
def wandb_first() -> Iterator[None]:
    """Ends a failed run's W&B before the message: W&B's farewell would come after it, as the interpreter ends."""
    try:
        yield
    except Exception:
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None:
            wandb.finish(exit_code=1)
        raise


def main(args: list[str] | None = None) -> None:
    """Entry of the ``lit-rl`` command."""
    # said by Lightning's own use of torch, at every step's first batch, and nothing that a user could change
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with ENDING, wandb_first():
        LitRLCLI(
            PolicyModule,
            RolloutDataModule,
            save_config_callback=SaveConfig,
            trainer_class=CommandLineTrainer,
            parser_class=Parser,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=42,
            auto_configure_optimizers=False,
            # the parser in front of the subcommands would take --print for a short form of its --print_config
            parser_kwargs={"prog": "lit-rl", "allow_abbrev": False, "fit": {"description": "Train a policy."}},
            args=args,
        )
