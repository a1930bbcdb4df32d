"""Weights through vLLM's own NCCL engine, between a transport and fake servers, over a stand-in communicator."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lit_rl.errors import SettingsError, SyncError
from lit_rl.sync.nccl import NCCLTransport
from lit_rl.sync.transport import Metadata
from tests.fakes import nccl
from tests.fakes.nccl import NCCLServer

SEQUENCE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def weights(value: float) -> dict[str, Tensor]:
    """A small tied model: 1 kB, so that several messages of 256 bytes travel; two dtypes."""
    embed = torch.arange(120, dtype=torch.float32).reshape(12, 10) + value
    return {
        "model.embed_tokens.weight": embed,
        "model.layers.0.norm.weight": torch.full((8,), value, dtype=torch.bfloat16),
        "model.norm.weight": torch.full((16,), value, dtype=torch.bfloat16),
        "lm_head.weight": embed,
    }


def metadata() -> Metadata:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights(0.0).items()]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.install(monkeypatch)


@pytest.fixture
def server() -> Iterator[NCCLServer]:
    with NCCLServer() as running:
        yield running


def opened(*servers: NCCLServer, timeout: float = 20.0) -> NCCLTransport:
    transport = NCCLTransport([server.url for server in servers], timeout=timeout, buffer_bytes=256)
    transport.open(metadata())
    return transport


def holds(server: NCCLServer, value: float) -> bool:
    return all(
        torch.equal(held[name], tensor) for held in server.weights_held for name, tensor in weights(value).items()
    )


def senders() -> list[str]:
    """Threads of vLLM's engine that are still in a transfer."""
    return [thread.name for thread in threading.enumerate() if thread.name == "nccl sends"]


def left_usable(server: NCCLServer) -> bool:
    return not (server.weights.paused or server.weights.updating or server.half_loaded)


# ---- what goes well -------------------------------------------------------------------------------------------------


def test_every_tensor_arrives_bit_for_bit_the_tied_head_too(server: NCCLServer) -> None:
    opened(server).push(weights(0.5).items(), 1)

    assert list(server.weights_held[0]) == list(weights(0.5))
    assert holds(server, 0.5)


def test_a_sync_pauses_updates_labels_and_resumes_in_this_order(server: NCCLServer) -> None:
    transport = opened(server)
    before = len(server.calls())
    timings = transport.push(weights(1.0).items(), 7)

    assert [call.route for call in server.calls()[before:]] == SEQUENCE
    assert server.calls("/pause")[0].query["mode"] == "keep"
    assert server.weights.version == "7"
    assert 0 < timings.pause_s + timings.transfer_s <= timings.total_s


def test_the_servers_are_told_names_dtypes_and_shapes_as_trained(server: NCCLServer) -> None:
    opened(server).push(weights(1.0).items(), 1)

    assert server.weights.updates == [
        {
            "names": list(weights(0.0)),
            "dtype_names": ["float32", "bfloat16", "bfloat16", "float32"],
            "shapes": [[12, 10], [8], [16], [12, 10]],
        }
    ]


def test_a_tensor_above_the_size_of_a_message_makes_the_messages_larger(server: NCCLServer) -> None:
    opened(server)

    assert server.calls("/init_weight_transfer_engine")[0].body["init_info"]["packed_buffer_size_bytes"] == 480


def test_one_meeting_serves_sync_after_sync(server: NCCLServer) -> None:
    transport = opened(server)
    for version in (1, 2, 3):
        transport.push(weights(float(version)).items(), version)

        assert holds(server, float(version))
    assert len(server.calls("/init_weight_transfer_engine")) == 1


def test_servers_of_several_workers_follow_each_other_in_one_group() -> None:
    with NCCLServer(workers=2) as first, NCCLServer(workers=1) as second:
        opened(first, second).push(iter(list(weights(2.0).items())), 1)  # an iterator gives each tensor once

        infos = [s.calls("/init_weight_transfer_engine")[0].body["init_info"] for s in (first, second)]
        assert [info["rank_offset"] for info in infos] == [1, 3]
        assert [info["world_size"] for info in infos] == [4, 4]
        assert holds(first, 2.0) and holds(second, 2.0)
        assert (first.weights.version, second.weights.version) == ("1", "1")


def test_a_tensor_that_is_no_contiguous_block_is_sent_as_its_values(server: NCCLServer) -> None:
    turned = torch.arange(120, dtype=torch.float32).reshape(10, 12).T
    opened(server).push((weights(0.0) | {"lm_head.weight": turned}).items(), 1)

    assert torch.equal(server.weights_held[0]["lm_head.weight"], turned)


def test_closing_twice_is_fine_and_ends_the_servers_part(server: NCCLServer) -> None:
    transport = opened(server)
    transport.close()
    transport.close()

    assert len(server.calls("/shutdown_weight_transfer_engine")) == 1


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_a_refused_update_quotes_the_server_and_the_next_push_meets_anew(server: NCCLServer) -> None:
    """The trainer is in a broadcast for which nobody comes any more when the refusal arrives."""
    transport = opened(server)
    transport.push(weights(1.0).items(), 1)
    server.script("/update_weights", nth={1}, status=500, body="boom")
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"version 2 did not reach.*/update_weights with status 500: boom"):
        transport.push(weights(2.0).items(), 2)

    assert time.monotonic() - started < 10
    assert not senders()  # aborting the communicator freed it
    assert left_usable(server) and server.weights.version == "1"
    transport.push(weights(3.0).items(), 2)
    assert holds(server, 3.0) and server.weights.version == "2"
    assert len(server.calls("/init_weight_transfer_engine")) == 2


def test_an_update_that_is_never_answered_names_route_and_timeout(server: NCCLServer) -> None:
    transport = opened(server, timeout=2.0)
    server.script("/update_weights", nth={0}, never=True)
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"/update_weights gave no answer within 2 s.*weight_sync\.timeout is 2 s"):
        transport.push(weights(1.0).items(), 1)

    assert time.monotonic() - started < 15
    assert left_usable(server) and server.weights.version == "default"


def test_a_connection_closed_during_the_update_is_an_error_at_once(server: NCCLServer) -> None:
    transport = opened(server)
    server.script("/update_weights", nth={0}, close=True)

    with pytest.raises(SyncError, match="/update_weights ended without an answer"):
        transport.push(weights(1.0).items(), 1)

    assert left_usable(server)


def test_a_loader_that_fails_half_way_is_quoted_and_its_update_is_closed(server: NCCLServer) -> None:
    """vLLM forgets an update that failed but leaves layers without memory: a resumed request would end the engine."""
    transport = opened(server)
    server.fail_at = "model.norm.weight"

    with pytest.raises(SyncError, match=r"no module or parameter named 'model\.norm\.weight'"):
        transport.push(weights(1.0).items(), 1)

    assert left_usable(server)
    routes = [call.route for call in server.calls()]
    assert routes[-4:] == ["/finish_weight_update", "/start_weight_update", "/finish_weight_update", "/resume"]


def test_when_one_of_two_servers_refuses_the_push_ends_with_its_words() -> None:
    with NCCLServer() as good, NCCLServer() as bad:
        transport = opened(good, bad)
        bad.script("/start_weight_update", nth={0}, status=500, body="no such day")

        with pytest.raises(SyncError, match=f"{bad.url}/start_weight_update with status 500: no such day"):
            transport.push(weights(1.0).items(), 1)

        assert left_usable(good) and left_usable(bad)
        assert (good.weights.version, bad.weights.version) == ("default", "default")


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/finish_weight_update", "/resume"])
def test_every_other_step_that_is_refused_is_quoted_too(server: NCCLServer, route: str) -> None:
    transport = opened(server)
    server.script(route, nth={0}, status=500, body="no such day")

    with pytest.raises(SyncError, match=f"{route}.* with status 500: no such day"):
        transport.push(weights(1.0).items(), 1)

    assert left_usable(server)


def test_a_failure_of_the_policy_itself_comes_through_and_frees_the_worker(
    server: NCCLServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker in NCCL cannot be called back, so it gets zeros for the rest; no version is said to have arrived."""

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(1.0).items())[:2]
        raise KeyboardInterrupt

    transport = opened(server)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        transport.push(broken(), 1)

    assert f"{server.url} has incomplete weights until its next weight sync" in caplog.text
    assert server.weights_held[0]["lm_head.weight"].count_nonzero() == 0
    assert left_usable(server) and server.weights.version == "default"
    transport.push(weights(2.0).items(), 1)
    assert holds(server, 2.0)


def test_a_tensor_that_changed_its_shape_is_named(server: NCCLServer) -> None:
    resized = weights(1.0) | {"model.norm.weight": torch.zeros(8, dtype=torch.bfloat16)}

    with pytest.raises(SyncError, match=r"'model\.norm\.weight' torch\.bfloat16 \[16\] was announced.*\[8\] came"):
        opened(server).push(resized.items(), 1)

    assert left_usable(server)


def test_a_tensor_that_is_missing_is_named(server: NCCLServer) -> None:
    with pytest.raises(SyncError, match=r"a tensor less .*'lm_head\.weight'"):
        opened(server).push(list(weights(1.0).items())[:3], 1)


# ---- opening --------------------------------------------------------------------------------------------------------


def test_a_refused_meeting_is_quoted(server: NCCLServer) -> None:
    server.script("/init_weight_transfer_engine", status=500, body="Weight transfer not configured.")
    started = time.monotonic()

    with pytest.raises(SyncError, match=r"could be opened.*Weight transfer not configured\."):
        opened(server)
    assert time.monotonic() - started < 10


def test_workers_that_do_not_come_end_the_meeting_at_its_deadline(server: NCCLServer) -> None:
    server.script("/init_weight_transfer_engine", never=True)

    with pytest.raises(SyncError, match=r"/init_weight_transfer_engine gave no answer within 2 s"):
        opened(server, timeout=2.0)


def test_a_trainer_without_nccl_is_an_error_and_no_sync_that_sends_nothing(
    server: NCCLServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's communicator turns itself off without a word where the library is missing."""
    init = nccl.Communicator.__init__

    def without_library(self: nccl.Communicator, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self.disabled = True

    monkeypatch.setattr(nccl.Communicator, "__init__", without_library)
    with pytest.raises(SyncError, match="could not load NCCL"):
        opened(server)


def test_a_taken_port_is_named_by_its_key(server: NCCLServer) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(SettingsError, match=f"data.engine.transfer_port = {port}.*another port"):
            NCCLTransport([server.url], timeout=5, port=port).open(metadata())
    assert not server.calls("/init_weight_transfer_engine")


def test_a_server_that_a_killed_run_left_in_an_update_is_recovered(server: NCCLServer) -> None:
    server.weights.paused = server.weights.updating = server.half_loaded = True
    server.weights.initialised = {}

    opened(server).push(weights(4.0).items(), 1)

    assert holds(server, 4.0) and left_usable(server)
