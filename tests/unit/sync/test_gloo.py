"""What is gloo's alone: weights over real gloo, between a transport and fake servers whose workers really receive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lit_rl.errors import SyncError
from lit_rl.sync.gloo import GlooTransport
from tests.fakes.worker import WeightServer
from tests.unit.sync import carriers
from tests.unit.sync.carriers import GLOO, holds, weights


@pytest.fixture
def server() -> Iterator[WeightServer]:
    with WeightServer() as running:
        yield running


opened = partial(carriers.opened, GLOO, timeout=5.0)


def routes_after(server: WeightServer, route: str) -> list[str]:
    """The routes asked after the last request of ``route``."""
    asked = [call.route for call in server.calls()]
    return asked[len(asked) - asked[::-1].index(route) :]


# ---- what goes well -------------------------------------------------------------------------------------------------


def test_tensors_of_odd_sizes_arrive_too(server: WeightServer) -> None:
    odd = {"a": torch.full((7,), 0.5, dtype=torch.bfloat16), "b": torch.arange(3.0), "c": torch.ones(1)}
    transport = GlooTransport([server.url], timeout=5.0, chunk_bytes=100)
    transport.open([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in odd.items()])
    transport.push(odd.items(), 1)

    assert all(torch.equal(server.weights_held[name], tensor) for name, tensor in odd.items())


def test_two_servers_get_the_same_weights_from_one_sending() -> None:
    with WeightServer() as first, WeightServer() as second:
        sent = list(weights(2.0).items())
        opened(first, second).push(iter(sent), 1)  # an iterator gives each tensor once

        assert holds(first, 2.0) and holds(second, 2.0)
        offsets = [s.calls("/init_weight_transfer_engine")[0].body["init_info"]["rank_offset"] for s in (first, second)]
        assert offsets == [1, 2]


# ---- case 14: what fails --------------------------------------------------------------------------------------------


def test_an_update_that_is_never_answered_names_route_and_timeout(server: WeightServer) -> None:
    transport = opened(server, timeout=1.0)
    server.script("/update_weights", nth={0}, never=True)
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"/update_weights gave no answer within 1 s.*weight_sync\.timeout is 1 s"):
        transport.push(weights(1.0).items(), 1)

    assert time.monotonic() - started < 5
    assert routes_after(server, "/start_weight_update") == ["/update_weights", "/update_weights", "/resume"]
    assert server.calls("/update_weights")[1].body == {"update_info": {"abort": True}}
    assert not server.weights.paused and server.weights.version == "default"


def test_a_loader_that_fails_half_way_is_quoted_and_the_next_run_works(server: WeightServer) -> None:
    transport = opened(server)
    server.fail_at = "model.norm.weight"

    with pytest.raises(SyncError, match=r"no module or parameter named 'model\.norm\.weight'"):
        transport.push(weights(1.0).items(), 1)

    server.fail_at = None
    opened(server).push(weights(3.0).items(), 1)
    assert holds(server, 3.0)


def test_a_worker_that_hangs_up_while_loading_is_an_error_at_once(server: WeightServer) -> None:
    transport = opened(server)
    server.hang_up()

    with pytest.raises(SyncError, match="did not reach the server"):
        transport.push(weights(1.0).items(), 1)

    assert not server.weights.paused


def test_when_one_of_two_servers_refuses_both_go_on_with_the_old_label() -> None:
    with WeightServer() as good, WeightServer() as bad:
        transport = opened(good, bad)
        bad.fail_at = "lm_head.weight"

        with pytest.raises(SyncError, match=f"{bad.url}/update_weights"):
            transport.push(weights(1.0).items(), 1)

        for server in (good, bad):
            server.wait_for(lambda s: not s.weights.paused and not s.weights.updating)
            assert server.weights.version == "default"


def test_a_failure_of_the_policy_itself_comes_through_and_resumes_the_server(server: WeightServer) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(1.0).items())[:2]
        raise ZeroDivisionError("a gather failed")

    transport = opened(server)
    with pytest.raises(ZeroDivisionError, match="a gather failed"):
        transport.push(broken(), 1)

    server.wait_for(lambda s: not s.weights.paused and not s.weights.updating)
    transport.push(weights(2.0).items(), 1)
    assert holds(server, 2.0)


# ---- opening --------------------------------------------------------------------------------------------------------
