"""What a decision reckons with that others have to do, for as long as it should take."""

from __future__ import annotations

import pytest

from kvtier.core.messages import LoadCost
from kvtier.engine.decide.load_decision import Cut, Estimates, Rates
from kvtier.engine.primary.load_decisions import LOADING_MAX, PrefillBacklog
from kvtier.engine.primary.requests import Request
from kvtier.engine.primary.tier_directory import TierDirectory

RATES = Rates(1e-3, 0.0)
COSTS = {0: LoadCost(0.5, 0.01, 0, 0.1)}
LOADS_100 = Cut(100, ((0, 100),), 1.5, 1.6, 100, 1.5, 1.6)
COMPUTES = Cut(0, (), 0.0, 0.0, 100, 1.5, 1.6)
NEVER_SEEN = "another"


def request(name: str) -> Request:
    made = Request(TierDirectory(1, 100).start(name, 1))
    made.mark_decided()
    return made


def estimates(queue: PrefillBacklog, now: float) -> Estimates:
    return queue.estimates(request(NEVER_SEEN), RATES, COSTS, now)


def test_at_first_there_is_nothing() -> None:
    assert estimates(PrefillBacklog(), 5.0) == Estimates(RATES, COSTS)


def test_what_is_computed_takes_its_turn_and_is_over() -> None:
    queue = PrefillBacklog()
    for name in "ab":
        queue.add(request(name), COMPUTES, 2.0, estimates(queue, 10.0), 10.0)
    assert estimates(queue, 10.0).computed_s == pytest.approx(4.0)
    assert estimates(queue, 13.0).computed_s == pytest.approx(1.0)
    assert estimates(queue, 20.0).computed_s == 0


def test_a_request_that_loads_waits_until_it_should_have_loaded() -> None:
    queue = PrefillBacklog()
    queue.add(request("a"), LOADS_100, 0.0, estimates(queue, 10.0), 10.0)
    assert estimates(queue, 11.0).loads_end_s == pytest.approx((0.5,))
    assert estimates(queue, 12.0).loads_end_s == ()


def test_one_that_is_scheduled_or_decided_for_again_waits_no_more() -> None:
    queue = PrefillBacklog()
    scheduled, again = request("a"), request("b")
    for each in (scheduled, again):
        queue.add(each, LOADS_100, 0.0, estimates(queue, 0.0), 0.0)
    scheduled.end_reservation()
    assert len(estimates(queue, 0.0).loads_end_s) == 1
    assert queue.estimates(again, RATES, COSTS, 0.0).loads_end_s == ()


def test_blocks_that_are_decided_on_are_outstanding_before_the_tier_is_asked() -> None:
    """And are worked off as fast as the tier is by now."""
    queue = PrefillBacklog()
    for name in "ab":
        queue.add(request(name), LOADS_100, 0.0, estimates(queue, 0.0), 0.0)
    assert estimates(queue, 0.0).costs[0].outstanding == 200
    assert estimates(queue, 1.5).costs[0].outstanding == pytest.approx(50, abs=1)
    assert estimates(queue, 9.0).costs[0].outstanding == 0
    quick = {0: COSTS[0]._replace(block_s=1e-4)}
    assert queue.estimates(request(NEVER_SEEN), RATES, quick, 0.1).costs[0].outstanding == 0
    busier = {0: COSTS[0]._replace(outstanding=300)}
    assert queue.estimates(request(NEVER_SEEN), RATES, busier, 0.0).costs == busier


def test_a_decision_looks_at_so_many_others_at_most() -> None:
    queue = PrefillBacklog()
    for number in range(LOADING_MAX + 5):
        queue.add(request(str(number)), LOADS_100, 0.0, estimates(queue, 0.0), 0.0)
    assert len(estimates(queue, 0.0).loads_end_s) == LOADING_MAX
