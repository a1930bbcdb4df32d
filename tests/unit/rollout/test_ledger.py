"""The ledger: what is settled, what must be dispatched again, and its state in a checkpoint."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.errors import SettingsError
from lit_rl.rollout.ledger import Ledger, LedgerStart
from lit_rl.types import DropReason, Position

COUNTING = [reason for reason in DropReason if reason.counts_for_epoch]


def places(epoch, *indices):
    return [Position(epoch, index) for index in indices]


def test_a_new_run_starts_at_the_beginning():
    assert Ledger(3).start() == LedgerStart(0, 0, [])


def test_one_stale_group_does_not_hold_back_the_saved_position():
    ledger = Ledger(12)
    for position in places(0, 0, 1, 3, 4, 5, 6, 7, 8):
        ledger.trained(position)
    ledger.dropped(Position(0, 2), DropReason.STALE)
    assert ledger.start() == LedgerStart(0, 9, places(0, 2))


def test_what_was_in_flight_when_the_run_ended_is_dispatched_again():
    ledger = Ledger(6)
    for position in places(0, 0, 4):
        ledger.trained(position)
    assert ledger.start() == LedgerStart(0, 5, places(0, 1, 2, 3))


def test_an_epoch_that_was_drawn_ahead_keeps_the_one_before_it_open():
    ledger = Ledger(3)
    ledger.trained(Position(0, 0))
    ledger.trained(Position(1, 0))
    assert ledger.start() == LedgerStart(1, 1, places(0, 1, 2))


def test_a_finished_epoch_starts_the_next_one():
    ledger = Ledger(2)
    for position in places(0, 1, 0):
        ledger.trained(position)
    assert ledger.epoch_done(0) and not ledger.epoch_done(1)
    assert ledger.start() == LedgerStart(1, 0, [])


def test_the_last_place_of_an_epoch_may_be_settled_before_the_first():
    ledger = Ledger(2)
    ledger.trained(Position(0, 1))
    assert ledger.start() == LedgerStart(1, 0, places(0, 0))


@pytest.mark.parametrize("reason", list(DropReason))
def test_a_drop_counts_for_the_epoch_by_its_reason(reason):
    ledger = Ledger(1)
    assert ledger.dropped(Position(0, 0), reason) is reason.counts_for_epoch
    assert ledger.epoch_done(0) is reason.counts_for_epoch


def test_a_second_outcome_of_one_place_is_told_apart():
    ledger = Ledger(2)
    assert ledger.trained(Position(0, 0)) is True
    assert ledger.trained(Position(0, 0)) is False
    assert ledger.counted(0) == 1


def test_outstanding_counts_what_can_still_arrive():
    ledger = Ledger(4)
    for position in places(0, 0, 1, 2):
        ledger.trained(position)
    assert ledger.outstanding(until_epoch=2, buffered=0) == 5
    assert ledger.outstanding(until_epoch=2, buffered=3) == 2
    assert ledger.outstanding(until_epoch=None, buffered=3) == sys.maxsize


def test_a_finished_run_has_nothing_outstanding():
    ledger = Ledger(1)
    ledger.trained(Position(0, 0))
    assert ledger.outstanding(until_epoch=1, buffered=0) == 0


def test_a_place_outside_the_dataset_is_an_error():
    with pytest.raises(ValueError, match="outside a dataset of 2"):
        Ledger(2).trained(Position(0, 2))


@pytest.mark.parametrize(
    ("change", "key"),
    [({"prompts": 3}, "data.train"), ({"seed": 1}, "data.seed"), ({"shuffle": True}, "data.shuffle")],
)
def test_a_state_of_other_data_or_order_is_refused_by_name(change, key):
    state = Ledger(2, seed=0).state_dict()
    with pytest.raises(SettingsError, match=key):
        Ledger(**({"prompts": 2, "seed": 0} | change)).load_state_dict(state)


def test_a_state_of_another_dataset_of_the_same_size_is_refused():
    with pytest.raises(SettingsError, match=r"data\.train"):
        Ledger(2, fingerprint="b").load_state_dict(Ledger(2, fingerprint="a").state_dict())


def test_a_state_of_another_schema_is_refused():
    with pytest.raises(SettingsError, match="schema"):
        Ledger(2).load_state_dict(Ledger(2).state_dict() | {"schema": 99})


def test_the_state_stays_small_when_places_settle_in_order():
    ledger = Ledger(100_000)
    for index in range(50_000):
        ledger.trained(Position(0, index))
    assert len(json.dumps(ledger.state_dict())) < 200


outcomes = st.sampled_from(["trained", *DropReason])


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.integers(1, 6),
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), outcomes), max_size=60),
)
def test_whatever_the_order_nothing_is_lost_and_nothing_is_trained_twice(prompts, events):
    ledger, settled = Ledger(prompts), set()
    for epoch, index, outcome in events:
        position = Position(epoch, index % prompts)
        if outcome == "trained":
            new = ledger.trained(position)
        else:
            new = ledger.dropped(position, outcome)
        counts = outcome == "trained" or outcome.counts_for_epoch
        assert new is (counts and position not in settled)
        settled |= {position} if counts else set()

    start = ledger.start()
    drawn = {
        Position(e, i) for e in range(start.epoch, 5) for i in range(prompts) if (e, i) >= (start.epoch, start.index)
    }
    everything = {Position(e, i) for e in range(5) for i in range(prompts)}
    assert len(start.redispatch) == len(set(start.redispatch))
    assert drawn.isdisjoint(start.redispatch)
    assert drawn | set(start.redispatch) == everything - settled
    assert all(ledger.settled(p) is (p in settled) for p in everything)
    assert [ledger.counted(e) for e in range(5)] == [sum(p.epoch == e for p in settled) for e in range(5)]

    copy = Ledger(prompts)
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert copy.start() == start and copy.state_dict() == ledger.state_dict()
