"""Weights over real gloo, between a transport and fake servers whose workers really receive."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lit_rl.errors import SettingsError, SyncError
from lit_rl.sync.gloo import GlooTransport
from lit_rl.sync.transport import Metadata
from tests.fakes.worker import WeightServer

DEV_ROUTES = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def weights(value: float) -> dict[str, Tensor]:
    """A small tied model: 1.2 kB, several chunks of 256 bytes, two dtypes, a tensor that crosses a chunk's border."""
    embed = torch.arange(120, dtype=torch.float32).reshape(12, 10) + value
    return {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": torch.full((7,), value, dtype=torch.bfloat16),
        "lm_head.weight": embed,
    }


def metadata(value: float = 0.0) -> Metadata:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights(value).items()]


@pytest.fixture
def server() -> Iterator[WeightServer]:
    with WeightServer() as running:
        yield running


def opened(*servers: WeightServer, timeout: float = 5.0) -> GlooTransport:
    transport = GlooTransport([server.url for server in servers], timeout=timeout, chunk_bytes=256)
    transport.open(metadata())
    return transport


def holds(server: WeightServer, value: float) -> bool:
    return all(torch.equal(server.weights_held[name], tensor) for name, tensor in weights(value).items())


def routes_after(server: WeightServer, route: str) -> list[str]:
    """The routes asked after the last request of ``route``."""
    asked = [call.route for call in server.calls()]
    return asked[len(asked) - asked[::-1].index(route) :]


# ---- what goes well -------------------------------------------------------------------------------------------------


def test_every_tensor_arrives_bit_for_bit_the_tied_head_too(server: WeightServer) -> None:
    opened(server).push(weights(0.5).items(), 1)

    assert list(server.weights_held) == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert holds(server, 0.5)


def test_a_sync_pauses_updates_labels_and_resumes_in_this_order(server: WeightServer) -> None:
    transport = opened(server)
    before = len(server.calls())
    timings = transport.push(weights(1.0).items(), 7)

    assert [call.route for call in server.calls()[before:]] == DEV_ROUTES
    assert server.calls("/pause")[0].query["mode"] == "keep"  # running requests go on afterwards
    assert server.weights.version == "7"
    assert 0 < timings.pause_s + timings.transfer_s <= timings.total_s


def test_the_group_serves_sync_after_sync(server: WeightServer) -> None:
    transport = opened(server)
    for version in (1, 2, 3):
        transport.push(weights(float(version)).items(), version)

        assert holds(server, float(version))
    assert len(server.calls("/init_weight_transfer_engine")) == 1


def test_two_servers_get_the_same_weights_from_one_sending() -> None:
    with WeightServer() as first, WeightServer() as second:
        sent = list(weights(2.0).items())
        opened(first, second).push(iter(sent), 1)  # an iterator gives each tensor once

        assert holds(first, 2.0) and holds(second, 2.0)
        offsets = [s.calls("/init_weight_transfer_engine")[0].body["init_info"]["rank_offset"] for s in (first, second)]
        assert offsets == [1, 2]


def test_a_tensor_that_is_no_contiguous_block_is_sent_as_its_values(server: WeightServer) -> None:
    turned = torch.arange(120, dtype=torch.float32).reshape(10, 12).T
    opened(server).push((weights(0.0) | {"lm_head.weight": turned}).items(), 1)

    assert torch.equal(server.weights_held["lm_head.weight"], turned)


def test_closing_twice_is_fine_and_frees_the_servers_buffers(server: WeightServer) -> None:
    transport = opened(server)
    transport.close()
    transport.close()

    assert len(server.calls("/shutdown_weight_transfer_engine")) == 1


# ---- case 14: what fails --------------------------------------------------------------------------------------------


def test_a_refused_update_quotes_the_server_and_leaves_it_running(server: WeightServer) -> None:
    transport = opened(server)
    transport.push(weights(1.0).items(), 1)
    server.script("/update_weights", nth={1}, status=500, body="boom")
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"version 2 did not reach.*/update_weights with status 500: boom"):
        transport.push(weights(2.0).items(), 2)

    assert time.monotonic() - started < 5
    assert not server.weights.paused and not server.weights.updating
    assert server.weights.version == "1"


def test_after_a_refused_update_the_same_transport_works(server: WeightServer) -> None:
    transport = opened(server)
    server.script("/update_weights", nth={0}, status=500, body="boom")
    with pytest.raises(SyncError):
        transport.push(weights(1.0).items(), 1)

    transport.push(weights(2.0).items(), 1)

    assert holds(server, 2.0)


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


def test_a_connection_closed_during_the_update_is_an_error_at_once(server: WeightServer) -> None:
    transport = opened(server)
    server.script("/update_weights", nth={0}, close=True)

    with pytest.raises(SyncError, match="/update_weights ended without an answer"):
        transport.push(weights(1.0).items(), 1)

    assert not server.weights.paused


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


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/finish_weight_update", "/resume"])
def test_every_other_step_that_is_refused_is_quoted_too(server: WeightServer, route: str) -> None:
    transport = opened(server)
    server.script(route, nth={0}, status=500, body="no such day")

    with pytest.raises(SyncError, match=f"{route}.* with status 500: no such day"):
        transport.push(weights(1.0).items(), 1)

    assert not server.weights.paused and not server.weights.updating


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


def test_a_tensor_that_changed_its_shape_is_named(server: WeightServer) -> None:
    resized = weights(1.0) | {"model.norm.weight": torch.zeros(8, dtype=torch.bfloat16)}

    with pytest.raises(SyncError, match=r"'model\.norm\.weight' torch\.bfloat16 \[7\] was announced.*\[8\] came"):
        opened(server).push(resized.items(), 1)


def test_a_tensor_that_is_missing_is_named(server: WeightServer) -> None:
    with pytest.raises(SyncError, match=r"a tensor less .*'lm_head\.weight'"):
        opened(server).push(list(weights(1.0).items())[:2], 1)


# ---- opening --------------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_quoted() -> None:
    with WeightServer() as server:
        server.script("/init_weight_transfer_engine", status=500, body="Weight transfer not configured.")

        with pytest.raises(SyncError, match=r"could be opened.*Weight transfer not configured\."):
            opened(server)


def test_a_server_that_is_gone_is_named_by_its_address() -> None:
    with pytest.raises(SyncError, match=r"nothing listens at http://127\.0\.0\.1:9"):
        GlooTransport(["http://127.0.0.1:9"], timeout=2).open(metadata())


def test_a_taken_port_is_named_by_its_key(server: WeightServer) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(SettingsError, match=f"data.engine.transfer_port = {port}.*another port"):
            GlooTransport([server.url], timeout=2, port=port).open(metadata())


def test_a_server_that_a_killed_run_left_in_an_update_is_recovered(server: WeightServer) -> None:
    server.weights.paused = server.weights.updating = True
    server.weights.initialised = {}

    opened(server).push(weights(4.0).items(), 1)

    assert holds(server, 4.0) and not server.weights.paused
