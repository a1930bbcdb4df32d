"""The ledger: what became of each prompt of each pass over the data. Pure; it lives in the trainer.

A prompt's place is its ``Position``. An outcome either settles the place (trained, or dropped for a reason that counts
for the epoch) or leaves it open (stale, cancelled, in flight when the run ended), and an open place is dispatched
again. So after a resume nothing is lost and nothing is trained twice::

    ledger = Ledger(prompts=12)
    for index in (0, 1, 3, 4):
        ledger.trained(Position(0, index))
    ledger.dropped(Position(0, 2), DropReason.STALE)
    ledger.start()    # LedgerStart(epoch=0, index=5, redispatch=[Position(0, 2)])
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lit_rl.errors import SettingsError
from lit_rl.types import DropReason, Position

SCHEMA = 1


@dataclass(frozen=True)
class LedgerStart:
    """What a new rollout process dispatches.

    Attributes:
        epoch: Epoch of the first position that was never reached.
        index: Place in that epoch's order.
        redispatch: Open places before it, in order; these come first.
    """

    epoch: int = 0
    index: int = 0
    redispatch: list[Position] = field(default_factory=list)


@dataclass
class _Epoch:
    """The settled places of one open epoch: all below ``frontier``, and the ones in ``beyond``."""

    frontier: int = 0
    beyond: set[int] = field(default_factory=set)

    @property
    def counted(self) -> int:
        return self.frontier + len(self.beyond)

    @property
    def reached(self) -> int:
        """One past the last settled place."""
        return max(self.beyond, default=self.frontier - 1) + 1

    def settled(self, index: int) -> bool:
        return index < self.frontier or index in self.beyond

    def settle(self, index: int) -> None:
        self.beyond.add(index)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def gaps(self, end: int) -> Iterator[int]:
        """The open places below ``end``."""
        return (index for index in range(self.frontier, end) if index not in self.beyond)


class Ledger:
    """Counts outcomes by position; memory grows with the places that are out of order, not with the run.

    Args:
        prompts: Rows of the dataset, that is, positions of an epoch.
        seed: Of the order; part of the state, since a position means nothing under another order.
        shuffle: Whether the order is shuffled; part of the state for the same reason.
        fingerprint: Of the dataset (see ``prompts.dataset_fingerprint``).
    """

    def __init__(self, prompts: int, *, seed: int = 42, shuffle: bool = False, fingerprint: str = "") -> None:
        if prompts < 1:
            raise ValueError(f"a ledger needs at least one prompt, got {prompts}")
        self.prompts = prompts
        self._identity: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "fingerprint": fingerprint}
        self._done = 0
        self._open: dict[int, _Epoch] = {}

    def trained(self, position: Position) -> bool:
        """Settles ``position``; False if it was settled before (its group must not be trained again)."""
        return self._settle(position)

    def dropped(self, position: Position, reason: DropReason) -> bool:
        """Settles ``position`` where ``reason`` counts for the epoch, else leaves it open.

        Returns:
            True where this call settled it.
        """
        return self._settle(position) if reason.counts_for_epoch else False

    def settled(self, position: Position) -> bool:
        """Whether ``position`` has its final outcome."""
        if position.epoch < self._done:
            return True
        epoch = self._open.get(position.epoch)
        return epoch is not None and epoch.settled(position.index)

    def counted(self, epoch: int) -> int:
        """Settled positions of ``epoch``."""
        if epoch < self._done:
            return self.prompts
        return self._open[epoch].counted if epoch in self._open else 0

    def epoch_done(self, epoch: int) -> bool:
        """Whether every position of ``epoch`` is settled."""
        return self.counted(epoch) == self.prompts

    @property
    def epochs_done(self) -> int:
        """How many epochs are complete, counted from the first without a gap."""
        return self._done

    def outstanding(self, until_epoch: int | None, buffered: int) -> int:
        """How many groups can still arrive before epoch ``until_epoch`` begins.

        Args:
            until_epoch: Passes over the data that the run makes; None = no end, and the answer is ``sys.maxsize``.
            buffered: Groups that the trainer holds already and has not settled yet.
        """
        if until_epoch is None:
            return sys.maxsize
        unsettled = sum(self.prompts - self.counted(epoch) for epoch in range(self._done, until_epoch))
        return max(0, unsettled - buffered)

    def start(self) -> LedgerStart:
        """What a new rollout process must dispatch: every open place, each once."""
        last = max(self._open, default=self._done)
        reached = self._open[last].reached if last in self._open else 0
        ends = dict.fromkeys(range(self._done, last), self.prompts) | {last: reached}
        redispatch = [Position(epoch, i) for epoch, end in ends.items() for i in self._epoch(epoch).gaps(end)]
        if reached == self.prompts:
            last, reached = last + 1, 0
        return LedgerStart(last, reached, redispatch)

    def state_dict(self) -> dict[str, Any]:
        """Plain values; ``load_state_dict`` takes them back."""
        epochs = {str(epoch): {"frontier": e.frontier, "beyond": sorted(e.beyond)} for epoch, e in self._open.items()}
        return {"schema": SCHEMA, "prompts": self.prompts, **self._identity, "done": self._done, "open": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a saved position.

        Raises:
            SettingsError: the state is of another schema, dataset, seed or order.
        """
        self._check(state)
        self._done = int(state["done"])
        self._open = {
            int(epoch): _Epoch(int(e["frontier"]), {int(i) for i in e["beyond"]}) for epoch, e in state["open"].items()
        }

    def _check(self, state: dict[str, Any]) -> None:
        if state.get("schema") != SCHEMA:
            remedy = f"this lit_rl reads schema {SCHEMA}; resume with the version that wrote the checkpoint"
            raise SettingsError("ledger schema of the checkpoint", state.get("schema"), remedy)
        keys = {"prompts": "data.train", "fingerprint": "data.train", "seed": "data.seed", "shuffle": "data.shuffle"}
        mine = {"prompts": self.prompts, **self._identity}
        for name, key in keys.items():
            if state.get(name) != mine[name]:
                was = f"the checkpoint was made with {name} {state.get(name)!r}"
                remedy = f"{was}; resume with the same data and order, or start without --ckpt_path"
                raise SettingsError(key, mine[name], remedy)

    def _epoch(self, epoch: int) -> _Epoch:
        return self._open.get(epoch) or _Epoch()

    def _settle(self, position: Position) -> bool:
        if position.epoch < 0 or not 0 <= position.index < self.prompts:
            raise ValueError(f"{position} is outside a dataset of {self.prompts} prompts")
        if self.settled(position):
            return False
        self._open.setdefault(position.epoch, _Epoch()).settle(position.index)
        while self._done in self._open and self._open[self._done].counted == self.prompts:
            del self._open[self._done]
            self._done += 1
        return True
