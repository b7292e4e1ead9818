"""When a tier that is declined is tried all the same."""

from __future__ import annotations

from kvtier.core.messages import LoadCost
from kvtier.engine.decide.reprobing import FIRST_S, LAST_S, REQUESTS, Reprobing

IDLE, OWES = LoadCost(0.0, 1.0, 0, 0.1), LoadCost(0.0, 1.0, 16, 0.1)


def test_it_is_tried_after_some_requests_however_fast_they_come() -> None:
    reprobing = Reprobing(0.0)
    due = [reprobing.try_if_due(0.0, IDLE) for _ in range(3 * (REQUESTS + 1))]
    assert due == 3 * ([False] * REQUESTS + [True])


def test_while_it_owes_something_it_is_tried_at_growing_intervals_only() -> None:
    """A tier that hangs would collect blocks."""
    reprobing = Reprobing(0.0)
    tried = [now for now in range(1, 300) if reprobing.try_if_due(float(now), OWES)]
    assert tried == [1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert tried[0] == FIRST_S
    assert tried[-1] - tried[-2] == LAST_S


def test_it_is_tried_by_time_where_requests_are_few() -> None:
    assert Reprobing(0.0).try_if_due(FIRST_S, IDLE)


def test_one_whose_last_load_was_far_faster_is_tried_as_soon_as_it_owes_nothing() -> None:
    reprobing = Reprobing(0.0)
    seen = [each._replace(may_be_less=True) for each in (OWES, IDLE, OWES, IDLE)]
    assert [reprobing.try_if_due(0.0, each) for each in seen] == [False, True, False, True]


def test_one_that_was_faster_for_a_while_is_tried_as_often_as_at_first() -> None:
    reprobing = Reprobing(0.0)
    for now in (1.0, 3.0, 7.0):
        assert reprobing.try_if_due(now, OWES)
    assert reprobing.try_if_due(15.0, OWES._replace(may_be_less=True))
    assert reprobing.try_if_due(15.0 + FIRST_S, OWES)
