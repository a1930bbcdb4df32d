"""Stop 14: the weight-update routes of vLLM servers, each call with a deadline and an error in the server's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lit_rl.engines.http import Background, Deadline, get, post
from lit_rl.errors import ServerRefused, ServerUnreachable

T = TypeVar("T")


class WeightSyncClient:
    """One server. Its four update methods are those that vLLM's own trainer-side engines ask of a client.

    Args:
        url: The server's base URL.
        timeout: Seconds that one call may take.

    Raises:
        ServerRefused: the server said no; quotes route, status and reply.
        ServerUnreachable: it did not answer; names the route and the timeout.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout

    def _post(self, route: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        return post(self.url, route, body, timeout=self.timeout if timeout is None else timeout)

    def world_size(self) -> int:
        """Workers of the server, over all its parallel dimensions."""
        return int(get(self.url, "/get_world_size", timeout=self.timeout)["world_size"])

    def is_paused(self) -> bool:
        return bool(get(self.url, "/is_paused", timeout=self.timeout)["is_paused"])

    def pause(self) -> None:
        """Freezes generation where it stands; running requests go on after ``resume``.

        Their cached keys and values are dropped and computed anew by the new weights, as are cached prefixes.
        """
        self._post("/pause?mode=keep&clear_cache=true")

    def resume(self, timeout: float | None = None) -> None:
        self._post("/resume", timeout=timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self, timeout: float | None = None) -> None:
        self._post("/shutdown_weight_transfer_engine", timeout=timeout)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def abort_weight_update(self, timeout: float) -> None:
        """Ends an update that was started: the gloo engine answers it with a refusal and puts the old weights back."""
        try:
            self._post("/update_weights", {"update_info": {"abort": True}}, timeout=timeout)
        except ServerRefused:
            return


def everywhere(
    clients: Sequence[WeightSyncClient], action: Callable[[WeightSyncClient], T], what: str, deadline: Deadline
) -> list[T]:
    """``action`` on all servers at once; the results in their order.

    Raises:
        ServerUnreachable: a server did not answer before the deadline.
        Exception: what the first failing server's call raised, as soon as it did.
    """
    calls = [Background(lambda c=client: action(c), f"{what} {client.url}") for client in clients]  # type: ignore[misc]
    while not all(call.done for call in calls):
        raise_failure(calls)
        waiting = next(i for i, call in enumerate(calls) if not call.done)
        calls[waiting].wait(min(deadline.left, 0.02))
        if deadline.passed and not calls[waiting].done:
            raise ServerUnreachable(f"{clients[waiting].url}/{what} gave no answer within {deadline.seconds:g} s")
    return [call.result(0.0) for call in calls]


def raise_failure(calls: Sequence[Background[Any]]) -> None:
    """Raises what the first failed call raised, if one did."""
    for call in calls:
        if call.failure is not None:
            raise call.failure
