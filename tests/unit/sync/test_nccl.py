"""What is NCCL's alone: vLLM's own engine, between a transport and fake servers, over a stand-in communicator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from torch import Tensor

from lit_rl.errors import SyncError
from tests.fakes import nccl
from tests.fakes.nccl import NCCLServer
from tests.unit.sync import carriers
from tests.unit.sync.carriers import NCCL, holds, left_usable, weights


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.install(monkeypatch)


@pytest.fixture
def server() -> Iterator[NCCLServer]:
    with NCCLServer() as running:
        yield running


opened = partial(carriers.opened, NCCL)


def senders() -> list[str]:
    """Threads of vLLM's engine that are still in a transfer."""
    return [thread.name for thread in threading.enumerate() if thread.name == "nccl sends"]


# ---- what goes well -------------------------------------------------------------------------------------------------


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


def test_servers_of_several_workers_follow_each_other_in_one_group() -> None:
    with NCCLServer(workers=2) as first, NCCLServer(workers=1) as second:
        opened(first, second).push(iter(list(weights(2.0).items())), 1)  # an iterator gives each tensor once

        infos = [s.calls("/init_weight_transfer_engine")[0].body["init_info"] for s in (first, second)]
        assert [info["rank_offset"] for info in infos] == [1, 3]
        assert [info["world_size"] for info in infos] == [4, 4]
        assert holds(first, 2.0) and holds(second, 2.0)
        assert (first.weights.version, second.weights.version) == ("1", "1")


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_a_broadcast_for_which_nobody_comes_any_more_is_freed(server: NCCLServer) -> None:
    transport = opened(server)
    server.script("/update_weights", nth={0}, status=500, body="boom")

    with pytest.raises(SyncError, match="boom"):
        transport.push(weights(2.0).items(), 1)

    assert not senders()  # aborting the communicator freed it


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


# ---- opening --------------------------------------------------------------------------------------------------------


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
