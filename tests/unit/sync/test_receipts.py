"""Decision 12: a sync that delivers nothing, or not all, is found out. Figures: SmolLM2-135M, float32, lr 1e-6."""

from __future__ import annotations

import numpy as np
import pytest

from lit_rl.errors import ReceiptError, ServerError
from lit_rl.sync.receipts import judge, server_logprobs
from tests.fakes.server import FakeServer

OLD = np.array([-1.0, -2.0, -3.0, -4.0])
NEW = OLD + np.array([0.02, -0.02, 0.02, -0.02])


def test_a_server_at_the_new_policy_passes() -> None:
    receipt = judge(NEW + 1e-5, NEW, OLD)

    assert receipt.error == pytest.approx(1e-5)
    assert receipt.moved == pytest.approx(0.02)
    assert receipt.conclusive


def test_an_engine_that_accepts_everything_and_delivers_nothing_is_caught() -> None:
    with pytest.raises(ReceiptError, match="accepted but did not arrive at http://s"):
        judge(OLD, NEW, OLD, url="http://s")


def test_a_head_that_was_left_behind_is_caught() -> None:
    left_behind = NEW + np.array([3e-4, -3e-4, 3e-4, -3e-4])  # one hundredth of the move

    with pytest.raises(ReceiptError, match=r"3\.00e-04 nats"):
        judge(left_behind, NEW, OLD)


def test_bfloat16_differs_by_more_and_passes() -> None:
    assert judge(NEW + 0.02, NEW, OLD, dtype="bfloat16").error == pytest.approx(0.02)


def test_in_bfloat16_a_clear_move_must_have_arrived() -> None:
    far = OLD + 0.09

    with pytest.raises(ReceiptError, match="left tensors behind"):
        judge(OLD, far, OLD, dtype="bfloat16")


def test_a_step_that_moved_nothing_proves_nothing_but_passes() -> None:
    receipt = judge(OLD, OLD, OLD)

    assert (receipt.error, receipt.moved, receipt.conclusive) == (0.0, 0.0, False)


def test_the_first_sync_has_no_before() -> None:
    assert not judge(NEW, NEW).conclusive


def test_a_server_full_of_nan_is_caught() -> None:
    with pytest.raises(ReceiptError, match="nan"):
        judge(np.full(4, np.nan), NEW, OLD)


def test_the_server_is_asked_for_the_log_prob_of_each_given_token() -> None:
    with FakeServer(model_name="policy", score=lambda ids: [-float(i) for i in ids[1:]]) as server:
        scores = server_logprobs(server.url, "policy", [5, 6, 7], timeout=5)

        assert scores.tolist() == [-6.0, -7.0]
        assert server.generations[0].body["prompt_logprobs"] == 0


def test_a_token_that_occurs_twice_is_scored_at_each_place() -> None:
    with FakeServer(model_name="policy", score=lambda ids: [-1.0, -2.0, -3.0]) as server:
        assert server_logprobs(server.url, "policy", [5, 5, 5, 5], timeout=5).tolist() == [-1.0, -2.0, -3.0]


def test_a_server_without_prompt_log_probs_is_named() -> None:
    with FakeServer(model_name="policy") as server:
        server.script("/v1/completions", status=200, body="ok")

        with pytest.raises(ServerError, match="log-prob of each of the 2 prompt tokens"):
            server_logprobs(server.url, "policy", [5, 6], timeout=5)
