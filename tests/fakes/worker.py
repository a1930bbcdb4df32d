"""A fake vLLM server whose worker really receives: over gloo, by lit_rl's own receiving end, into a dictionary."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from torch import Tensor

from lit_rl.errors import SyncError
from lit_rl.sync.group import Group, Receiver, announce, join_store
from lit_rl.sync.wire import Layout
from tests.fakes.server import Call, FakeServer, _error


class WeightServer(FakeServer):
    """``FakeServer`` with weights.

    Attributes:
        weights_held: The tensors of the last update that arrived, by name.
        fail_at: Name of a tensor at which loading fails, as a real loader does for a name that it does not know.
        deaf: Accepts every update and loads nothing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weights_held: dict[str, Tensor] = {}
        self.fail_at: str | None = None
        self.deaf = False
        self._group: Group | None = None
        self._receiver: Receiver | None = None

    async def _init_transfer(self, call: Call) -> web.Response:
        info = call.body["init_info"]
        try:
            await asyncio.to_thread(self._join, info)
        except SyncError as cause:
            return _error(500, str(cause))
        return super()._init_transfer(call)

    def _join(self, info: dict[str, Any]) -> None:
        self.hang_up()
        store = join_store(info["master_address"], info["master_port"], info["meet_timeout_s"])
        announce(store, info["group"], info["rank_offset"])
        self._group = Group(
            store,
            info["group"],
            info["rank_offset"],
            info["world_size"],
            address="127.0.0.1",
            meet_timeout=info["meet_timeout_s"],
            timeout=info["timeout_s"],
        )
        layout = Layout.from_json(info["names"], info["dtypes"], info["shapes"], info["chunk_bytes"])
        self._receiver = Receiver(self._group, layout)

    async def _update(self, call: Call) -> web.Response:
        response = super()._update(call)
        if response.status != 200:
            return response
        try:
            if call.body["update_info"].get("abort"):
                raise SyncError("the trainer gave up this weight update")
            await asyncio.to_thread(self._load)
        except (SyncError, ValueError) as cause:
            self.weights.updating = False  # as vLLM's worker does
            return _error(500, f"Worker failed with error '{cause}'")
        return response

    def _load(self) -> None:
        assert self._receiver is not None
        for name, tensor in self._receiver.receive():
            if name == self.fail_at:
                raise ValueError(f"There is no module or parameter named {name!r}")
            if not self.deaf:
                self.weights_held[name] = tensor.clone()

    def hang_up(self) -> None:
        """What a dying worker does to its connections."""
        group, self._group, self._receiver = self._group, None, None
        if group is not None:
            group.give_up()

    def stop(self) -> None:
        self.hang_up()
        super().stop()
