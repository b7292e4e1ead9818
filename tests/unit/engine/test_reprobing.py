"""When a tier that is declined is tried all the same."""

from __future__ import annotations

from kvtier.core.messages import LoadCost
from kvtier.engine.decide.reprobing import FIRST_S, LAST_S, REQUESTS, Reprobing

SLOW_S = 1.0
IDLE, OWES = LoadCost(0.0, 0.0, 0, 0.1), LoadCost(0.0, 0.0, 16, 0.1)


def test_it_is_tried_after_some_requests_however_fast_they_come() -> None:
    exploration = Reprobing(0.0, SLOW_S)
    due = [exploration.is_due(0.0, SLOW_S, IDLE) for _ in range(3 * (REQUESTS + 1))]
    assert due == 3 * ([False] * REQUESTS + [True])


def test_while_it_owes_something_it_is_tried_at_growing_intervals_only() -> None:
    """A tier that hangs would collect blocks."""
    exploration = Reprobing(0.0, SLOW_S)
    tried = [now for now in range(1, 300) if exploration.is_due(float(now), SLOW_S, OWES)]
    assert tried == [1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert tried[0] == FIRST_S
    assert tried[-1] - tried[-2] == LAST_S


def test_it_is_tried_by_time_where_requests_are_few() -> None:
    exploration = Reprobing(0.0, SLOW_S)
    assert exploration.is_due(FIRST_S, SLOW_S, IDLE)


def test_one_that_has_become_better_is_tried_at_once_and_again() -> None:
    """Each observation moves the estimate a little, and the third one is believed."""
    exploration = Reprobing(0.0, SLOW_S)
    assert [exploration.is_due(0.0, expected_s, IDLE) for expected_s in (0.8, 0.6, 0.5, 0.5)] == [
        True,
        True,
        True,
        False,
    ]


def test_one_that_was_better_for_a_while_is_tried_as_often_as_at_first() -> None:
    exploration = Reprobing(0.0, SLOW_S)
    for now in (1.0, 3.0, 7.0):
        assert exploration.is_due(now, SLOW_S, OWES)
    assert exploration.is_due(7.0, 0.5 * SLOW_S, OWES)
    assert exploration.is_due(7.0 + FIRST_S, 0.5 * SLOW_S, OWES)


def test_better_is_what_is_better_than_at_its_worst_since() -> None:
    """An estimate that has become worse in between must come down from there."""
    exploration = Reprobing(0.0, SLOW_S)
    assert not exploration.is_due(0.0, 10 * SLOW_S, IDLE)
    assert exploration.is_due(0.0, 5 * SLOW_S, IDLE)


def test_one_whose_last_load_was_far_faster_is_tried_as_soon_as_it_owes_nothing() -> None:
    exploration = Reprobing(0.0, SLOW_S)
    seen = [each._replace(may_be_less=True) for each in (OWES, IDLE, OWES, IDLE)]
    assert [exploration.is_due(0.0, SLOW_S, each) for each in seen] == [False, True, False, True]
