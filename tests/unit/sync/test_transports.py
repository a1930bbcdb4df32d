"""What a weight sync promises whatever carries its bytes; case 14 of a failed sync among it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch

from lit_rl.errors import SettingsError, SyncError
from tests.fakes import nccl
from tests.fakes.server import FakeServer
from tests.unit.sync.carriers import (
    GLOO,
    NCCL,
    Carrier,
    held,
    holds,
    leave_in_an_update,
    left_usable,
    metadata,
    opened,
    weights,
)

SEQUENCE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


@pytest.fixture(params=[GLOO, NCCL], ids=["gloo", "nccl"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Carrier:
    if request.param is NCCL:
        nccl.install(monkeypatch)
    return request.param


@pytest.fixture
def server(carrier: Carrier) -> Iterator[FakeServer]:
    with carrier.server() as running:
        yield running


# ---- what goes well -------------------------------------------------------------------------------------------------


def test_every_tensor_arrives_bit_for_bit_the_tied_head_too(carrier: Carrier, server: FakeServer) -> None:
    opened(carrier, server).push(weights(0.5).items(), 1)

    assert list(held(server)[0]) == list(weights(0.5))
    assert holds(server, 0.5)


def test_a_sync_pauses_updates_labels_and_resumes_in_this_order(carrier: Carrier, server: FakeServer) -> None:
    transport = opened(carrier, server)
    before = len(server.calls())
    timings = transport.push(weights(1.0).items(), 7)

    assert [call.route for call in server.calls()[before:]] == SEQUENCE
    assert server.calls("/pause")[0].query["mode"] == "keep"  # running requests go on afterwards
    assert server.weights.version == "7"
    assert 0 < timings.pause_s + timings.transfer_s <= timings.total_s


def test_one_meeting_serves_sync_after_sync(carrier: Carrier, server: FakeServer) -> None:
    transport = opened(carrier, server)
    for version in (1, 2, 3):
        transport.push(weights(float(version)).items(), version)

        assert holds(server, float(version))
    assert len(server.calls("/init_weight_transfer_engine")) == 1


def test_a_tensor_that_is_no_contiguous_block_is_sent_as_its_values(carrier: Carrier, server: FakeServer) -> None:
    turned = torch.arange(120, dtype=torch.float32).reshape(10, 12).T
    opened(carrier, server).push((weights(0.0) | {"lm_head.weight": turned}).items(), 1)

    assert torch.equal(held(server)[0]["lm_head.weight"], turned)


def test_closing_twice_is_fine_and_ends_the_servers_part(carrier: Carrier, server: FakeServer) -> None:
    transport = opened(carrier, server)
    transport.close()
    transport.close()

    assert len(server.calls("/shutdown_weight_transfer_engine")) == 1


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_a_refused_update_quotes_the_server_and_the_next_push_works(carrier: Carrier, server: FakeServer) -> None:
    transport = opened(carrier, server)
    transport.push(weights(1.0).items(), 1)
    server.script("/update_weights", nth={1}, status=500, body="boom")
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"version 2 did not reach.*/update_weights with status 500: boom"):
        transport.push(weights(2.0).items(), 2)

    assert time.monotonic() - started < 10
    assert left_usable(server) and server.weights.version == "1"
    transport.push(weights(3.0).items(), 2)
    assert holds(server, 3.0) and server.weights.version == "2"
    assert len(server.calls("/init_weight_transfer_engine")) == 2


def test_an_update_that_is_never_answered_names_route_and_timeout(carrier: Carrier, server: FakeServer) -> None:
    transport = opened(carrier, server, timeout=2.0)
    server.script("/update_weights", nth={0}, never=True)
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"/update_weights gave no answer within 2 s.*weight_sync\.timeout is 2 s"):
        transport.push(weights(1.0).items(), 1)

    assert time.monotonic() - started < 15
    assert left_usable(server) and server.weights.version == "default"


def test_a_connection_closed_during_the_update_is_an_error_at_once(carrier: Carrier, server: FakeServer) -> None:
    transport = opened(carrier, server)
    server.script("/update_weights", nth={0}, close=True)

    with pytest.raises(SyncError, match="/update_weights ended without an answer"):
        transport.push(weights(1.0).items(), 1)

    assert left_usable(server)


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/finish_weight_update", "/resume"])
def test_every_other_step_that_is_refused_is_quoted_too(carrier: Carrier, server: FakeServer, route: str) -> None:
    transport = opened(carrier, server)
    server.script(route, nth={0}, status=500, body="no such day")

    with pytest.raises(SyncError, match=f"{route}.* with status 500: no such day"):
        transport.push(weights(1.0).items(), 1)

    assert left_usable(server)


def test_a_tensor_that_changed_its_shape_is_named(carrier: Carrier, server: FakeServer) -> None:
    resized = weights(1.0) | {"model.norm.weight": torch.zeros(8, dtype=torch.bfloat16)}

    with pytest.raises(SyncError, match=r"'model\.norm\.weight' torch\.bfloat16 \[16\] was announced.*\[8\] came"):
        opened(carrier, server).push(resized.items(), 1)

    assert left_usable(server)


def test_a_tensor_that_is_missing_is_named(carrier: Carrier, server: FakeServer) -> None:
    with pytest.raises(SyncError, match=r"a tensor less .*'lm_head\.weight'"):
        opened(carrier, server).push(list(weights(1.0).items())[:3], 1)


# ---- opening --------------------------------------------------------------------------------------------------------


def test_a_refused_meeting_is_quoted(carrier: Carrier, server: FakeServer) -> None:
    server.script("/init_weight_transfer_engine", status=500, body="Weight transfer not configured.")
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"could be opened.*Weight transfer not configured\."):
        opened(carrier, server)
    assert time.monotonic() - started < 10


def test_a_server_that_is_gone_is_named_by_its_address(carrier: Carrier) -> None:
    with pytest.raises(SyncError, match=r"nothing listens at http://127\.0\.0\.1:9"):
        carrier.transport(["http://127.0.0.1:9"], timeout=2).open(metadata())


def test_a_taken_port_is_named_by_its_key(carrier: Carrier, server: FakeServer) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(SettingsError, match=f"data.engine.transfer_port = {port}.*another port"):
            carrier.transport([server.url], timeout=5, port=port).open(metadata())
    assert not server.calls("/init_weight_transfer_engine")


def test_a_server_that_a_killed_run_left_in_an_update_is_recovered(carrier: Carrier, server: FakeServer) -> None:
    leave_in_an_update(server)

    opened(carrier, server).push(weights(4.0).items(), 1)

    assert holds(server, 4.0) and left_usable(server)
