"""The life of a tier's host: each move is a row of the table, or an error of kvtier's own."""

from __future__ import annotations

from itertools import product

import pytest

from kvtier.errors import InternalError
from kvtier.hosts.life import LIFE_TABLE, Life, LifeEvent, LifeState

MAY_TOUCH_SLOTS = {LifeState.SERVING, LifeState.BROKEN, LifeState.ENDING}


def life_in(state: LifeState) -> Life:
    life = Life(has_backend=True)
    life.state = state
    return life


@pytest.mark.parametrize(("state", "event"), list(product(LifeState, LifeEvent)))
def test_a_host_moves_as_a_row_says_or_raises(state: LifeState, event: LifeEvent) -> None:
    life, row = life_in(state), LIFE_TABLE.get((state, event))
    if row is None:
        with pytest.raises(InternalError, match=f"{state.name} cannot be {event.name}"):
            life.move(event)
        assert life.state is state
    else:
        assert life.move(event) is row
        assert life.state is row


def test_every_state_is_reached() -> None:
    assert {after for _, after in LIFE_TABLE.items()} == set(LifeState)


def test_a_new_cell_comes_only_when_the_broken_one_can_touch_no_slot() -> None:
    """Two cells with the same slots would be the end of all promises about bytes."""
    rows = LIFE_TABLE.items()
    ways_to_a_cell = {before for (before, event), _ in rows if event is LifeEvent.MADE}
    assert not ways_to_a_cell & MAY_TOUCH_SLOTS
    out_of_broken = {event: after for (before, event), after in rows if before is LifeState.BROKEN}
    assert [event for event, after in out_of_broken.items() if after is LifeState.AWAY] == [
        LifeEvent.FENCED
    ]


@pytest.mark.parametrize("state", LifeState)
def test_a_host_may_be_asked_to_end_in_any_state_and_takes_nothing_then(state: LifeState) -> None:
    life = life_in(state)
    life.move(LifeEvent.ASKED_TO_END)
    assert life.ending.is_set()
    assert not life.accepts_messages
    assert life.has_ended is (state in (LifeState.AWAY, LifeState.ENDED)), "no slot is known there"


def test_nothing_follows_an_end() -> None:
    """Whatever a cell still says, in any order, no message is taken again."""
    ends = {LifeState.ENDING, LifeState.ENDED}
    for (before, _), after in LIFE_TABLE.items():
        assert before not in ends or after in ends


def test_a_reason_is_news_until_the_tier_serves_again() -> None:
    life = Life(has_backend=True)
    assert life.broke("no such file")
    assert not life.broke("no such file")
    assert life.broke("permission denied")
    for event in (LifeEvent.FENCED, LifeEvent.MADE, LifeEvent.OPENED):
        life.move(event)
    assert life.accepts_messages
    assert life.broke("permission denied")
