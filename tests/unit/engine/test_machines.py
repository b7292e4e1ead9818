from __future__ import annotations

from itertools import pairwise, product

import pytest

from kvtier.core.block_state import ANSWERS, BlockState
from kvtier.engine.link.circuit_breaker import BREAKER_TABLE, Breaker, BreakerEvent, BreakerState
from kvtier.engine.primary import slot_table
from kvtier.engine.primary.slot_table import SLOT_TABLE, SlotEvent, SlotState, SlotTable
from kvtier.errors import InternalError

SLOT_MOVES = {
    SlotEvent.TAKEN: slot_table.SLOT_TAKEN,
    SlotEvent.FILLED: slot_table.SLOT_FILLED,
    SlotEvent.FILL_FAILED: slot_table.SLOT_FILL_FAILED,
    SlotEvent.EVICTED: slot_table.SLOT_EVICTED,
    SlotEvent.ABANDONED: slot_table.SLOT_ABANDONED,
    SlotEvent.RELEASED: slot_table.SLOT_RELEASED,
    SlotEvent.FILLED_LATE: slot_table.SLOT_FILLED_LATE,
}


@pytest.mark.parametrize(("state", "event"), list(product(SlotState, SlotEvent)))
def test_a_slot_moves_as_a_row_says_or_raises(state: SlotState, event: SlotEvent) -> None:
    row = SLOT_TABLE.get((state, event))
    if row is None:
        with pytest.raises(InternalError, match=f"{state.name} cannot be {event.name}"):
            SLOT_MOVES[event][int(state)]
    else:
        assert SLOT_MOVES[event][int(state)] == row


@pytest.mark.parametrize(("state", "event"), list(product(BreakerState, BreakerEvent)))
def test_a_breaker_moves_as_a_row_says_or_raises(state: BreakerState, event: BreakerEvent) -> None:
    breaker = Breaker(3, 1.0, 8.0)
    breaker.state = state
    row = BREAKER_TABLE.get((state, event))
    if row is None:
        with pytest.raises(InternalError, match=f"{state.name} cannot be {event.name}"):
            breaker._move(event)
    else:
        breaker._move(event)
        assert breaker.state is row


@pytest.mark.parametrize(
    ("table", "kinds", "first"),
    [
        (SLOT_TABLE, SlotState, SlotState.FREE),
        (BREAKER_TABLE, BreakerState, BreakerState.CLOSED),
    ],
)
def test_every_state_is_reached_and_left(table: dict, kinds: type, first: object) -> None:
    assert {after for _, after in table.items()} | {first} == set(kinds)
    assert {before for before, _ in table} == set(kinds)


def test_every_state_of_a_block_has_an_answer() -> None:
    assert set(ANSWERS) == set(BlockState)
    assert [state for state, said in ANSWERS.items() if said] == [BlockState.READY]


def test_a_slot_without_such_a_reader_is_not_unpinned() -> None:
    slots = SlotTable(2)
    (slot,) = slots.allocate_for_gpu([b"key"], "r")
    slots.fill([slot], slots.gpu_fills)
    with pytest.raises(InternalError, match="has no reader"):
        slots.unpin([slot])


def test_a_quarantined_slot_is_free_when_its_last_user_lets_go() -> None:
    slots = SlotTable(1)
    (slot,) = slots.allocate_for_gpu([b"key"], "r")
    slots.fill([slot], slots.gpu_fills)
    slots.pin([slot, slot])  # two loads of the GPU, which releases both at once
    slots.pin([slot, slot])  # two cascades
    slots.reset({slot: 2})
    assert slots.quarantined == {slot: 3}
    slots.gpu_flushed()
    assert slots.release(slot)
    assert not slots.free_count()
    assert slots.release(slot)
    assert slots.audit().free == (slot,)
    assert not slots.release(slot)


# --- the breaker ---


def opened() -> Breaker:
    breaker = Breaker(2, 1.0, 3.0)
    breaker.failed(0.0)
    assert breaker.try_acquire()
    breaker.failed(0.0)
    assert breaker.state is BreakerState.OPEN, "failures in a row"
    assert not breaker.try_acquire()
    return breaker


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker(2, 1.0, 3.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_trial_is_one_piece_of_work() -> None:
    breaker = opened()
    breaker.pass_time(0.5)
    assert not breaker.try_acquire()
    breaker.pass_time(1.0)
    assert breaker.try_acquire()
    assert not breaker.try_acquire(), "it is under way"
    breaker.showed_nothing()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.try_acquire(), "another one follows"
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.try_acquire()


def test_each_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    breaker = opened()
    now = 0.0
    for pause, longer in pairwise([1.0, 2.0, 3.0, 3.0]):
        now += pause
        breaker.pass_time(now)
        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.try_acquire()
        breaker.failed(now)
        breaker.pass_time(now + longer - 0.01)
        assert breaker.state is BreakerState.OPEN


def test_a_stall_opens_the_breaker_at_once() -> None:
    breaker = Breaker(100, 1.0, 3.0)
    breaker.stalled(0.0)
    assert breaker.state is BreakerState.OPEN
    breaker.pass_time(1.0)
    assert breaker.try_acquire()
    breaker.stalled(1.0)
    breaker.pass_time(2.9)
    assert breaker.state is BreakerState.OPEN, "the trial has failed: the pause is twice as long"


def test_only_a_restart_ends_a_cut_off() -> None:
    breaker = opened()
    breaker.broke()
    breaker.broke()
    breaker.succeeded()
    breaker.failed(1.0)
    breaker.pass_time(100.0)
    assert breaker.state is BreakerState.DISABLED
    assert not breaker.try_acquire()
    breaker.on_restart()
    assert breaker.try_acquire()
