"""When a link gives up what it waits for, how much that may be, and how its breaker takes it."""

from __future__ import annotations

import pytest

from kvtier import TierConfig
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.engine.link.circuit_breaker import BreakerState, Work
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import (
    Story,
    cascade,
    counts_of,
    keys_of,
    link_of,
    look_up,
    pending,
    promote,
    story_of_a_tier,
    tier_of,
)

UNKNOWN = b"u" + bytes(5)
PROBE_S = TierConfig("test", "1:test").probe_timeout_s
LOAD_S = TierConfig("test", "1:test").promote_timeout_s
FAR_S = 1e6


# --- deadlines ---


def test_a_probe_and_a_load_are_given_up_at_their_deadlines_and_no_sooner() -> None:
    """The slot is used again only when the tier has released it."""
    story, (key,) = story_of_a_tier()
    facade = story.facade
    story.let_pass(50.0)
    promote(story, key)
    load = pending(story)
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.PROBING
    facade.step_end()
    story.let_pass(PROBE_S - 0.25)
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.PROBING
    story.let_pass(0.25)
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.ABSENT
    story.let_pass(LOAD_S - PROBE_S - 0.25)
    assert facade.lookup_state(key, "r") is BlockState.FILLING
    story.let_pass(0.25)
    assert facade.lookup_state(key, "r") is BlockState.ABSENT
    counts = counts_of(story)
    assert (counts.probes_timed_out, counts.jobs_timed_out) == (1, 1)
    assert story.primary.quarantined_slots == 1
    assert facade.get_finished() == 1, "given up, and not ended"
    assert not facade.has_pending_work(), "nothing to step on for: it may never end"
    tier_of(story).answer(load, [Outcome.DONE])
    story.runtime.cell.settle()
    assert facade.get_finished() == 0
    assert story.primary.quarantined_slots == 0
    assert counts_of(story).late_completions == 1


# --- how much at once ---


def test_no_more_probes_are_in_flight_than_are_allowed_and_the_next_one_follows() -> None:
    story = Story(jobs_in_flight_max=1)
    first, second = keys_of(2)
    assert look_up(story, first, "r") is BlockState.PROBING
    assert look_up(story, second, "s") is BlockState.PROBING
    assert story.facade.statistics().tiers[0].probes_in_flight == 1
    assert story.answer_batch(Outcome.ABSENT).keys == (first,)
    assert story.facade.lookup_state(first, "r") is BlockState.ABSENT
    assert story.facade.lookup_state(second, "s") is BlockState.PROBING
    assert story.answer_batch(Outcome.ABSENT).keys == (second,)
    assert story.facade.lookup_state(second, "s") is BlockState.ABSENT
    assert link_of(story).audit().breaker is BreakerState.CLOSED, "that was no fault of the tier's"


def test_what_is_in_flight_is_told_by_its_kind_and_is_worth_stepping_on() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.facade.lookup_state(UNKNOWN, "r")
    story.facade.step_end()
    cascade(story, keys_of(2, b"s"))
    seen = story.facade.statistics().tiers[0]
    assert seen.probes_in_flight == 1
    assert (seen.promotion_jobs_in_flight, seen.cascade_jobs_in_flight) == (1, 1)
    assert (seen.promotion_slots, seen.cascade_slots) == (1, 2)
    assert link_of(story).in_flight() == (1, 1, 1)
    assert link_of(story).awaited() == 3
    assert story.facade.has_pending_work()
    story.answer_all()
    seen = story.facade.statistics().tiers[0]
    assert (seen.probes_in_flight, seen.promotion_slots, seen.cascade_slots) == (0, 0, 0)


def test_the_end_of_a_load_makes_room_for_a_store_and_the_other_way_round() -> None:
    story, (key,) = story_of_a_tier(jobs_in_flight_max=1)
    promote(story, key)
    (first,) = keys_of(1, b"s")
    cascade(story, [first])
    assert pending(story).keys == (key,)
    assert story.answer_batch().keys == (key,)
    assert pending(story).keys == (first,), "it does not wait for the next step"
    story.facade.on_request_finished("r")
    primary = story.runtime.primary
    other = next(each for each in keys_of(8, b"n") if primary.slot_of(each) is None)
    promote(story, other)
    assert story.answer_batch().keys == (first,)
    assert pending(story).keys == (other,)


def test_too_many_abandoned_loads_keep_a_tier_from_being_asked_for_more() -> None:
    """Their slots are lost until the tier releases them."""
    story, keys = story_of_a_tier(
        3, abandoned_slots_fraction_max=0.1, breaker_pause_s=1.0, job_blocks_max=1
    )
    promote(story, keys[0])
    first = pending(story)
    story.let_pass(FAR_S)
    assert link_of(story).audit().abandoned_slots == 1
    story.let_pass(1.0)  # the breaker's pause
    promote(story, keys[1], "s")
    assert story.facade.lookup_state(keys[1], "s") is BlockState.ABSENT
    assert counts_of(story).promotions_dropped == 1
    tier_of(story).answer(first, [Outcome.DONE])
    story.runtime.cell.settle()
    assert link_of(story).audit().abandoned_slots == 0
    promote(story, keys[2], "t")
    assert link_of(story).in_flight() == (0, 1, 0)


# --- the breaker ---


def test_a_sick_tier_is_bypassed_tried_after_its_pause_and_back_with_a_success() -> None:
    story, keys = story_of_a_tier(5, breaker_failures_max=2, breaker_pause_s=10.0)
    for number in range(2):
        promote(story, keys[number], f"r{number}")
        story.answer_all(Outcome.FAILED)
    for tried in (Outcome.FAILED, Outcome.DONE):
        assert link_of(story).audit().breaker is BreakerState.OPEN
        assert counts_of(story).breaker_opened == 1, "a trial that fails is no return"
        assert look_up(story, keys[3], f"bypassed{tried}") is BlockState.ABSENT
        story.let_pass(10.0 if tried is Outcome.FAILED else 20.0)
        assert link_of(story).audit().breaker is BreakerState.HALF_OPEN
        promote(story, keys[2 if tried is Outcome.FAILED else 3], f"tries{tried}")
        story.answer_all(tried)
    assert link_of(story).audit().breaker is BreakerState.CLOSED
    promote(story, keys[4], "goes on")
    story.answer_all()
    assert story.facade.lookup(keys[4], "goes on") is True
    said = [(n.event, n.detail, n.level, n.numbers) for n in story.runtime.cell.notices]
    lost = {"seconds": 30, "blocks_not_loaded": 3}  # one of each failure, trials as well
    assert said == [
        ("tier bypassed", "failed a load: loads pause", "warning", {}),
        ("tier is back", "loads resume", "info", lost),
    ]


def test_a_tier_that_takes_stores_again_says_what_it_did_not_get() -> None:
    """What waits for it in host memory is not lost; what loads lost is of another line."""
    story = Story(breaker_failures_max=1, breaker_pause_s=10.0, slots=4)
    for number in (1, 2):
        cascade(story, keys_of(4, b"a%d" % number))
        story.facade.on_request_finished("w")
        story.answer_all(Outcome.FAILED)
        assert link_of(story).audit().breakers[Work.STORE] is BreakerState.OPEN
        story.store(keys_of(2, b"b%d" % number), "s")
        assert counts_of(story).cascades_dropped == 2 * number, "as soon as they are lost"
        story.let_pass(10.0)
        story.answer_all()
        end = story.runtime.cell.notices[-1]
        assert (end.event, end.detail) == ("tier is back", "stores resume")
        assert end.numbers == {"seconds": 10, "blocks_not_stored": 2}
        story.let_pass(1.1)
        story.answer_all()  # what has waited


def test_what_loads_lost_is_counted_from_the_last_that_succeeded() -> None:
    story, keys = story_of_a_tier(4, breaker_failures_max=1, breaker_pause_s=10.0)
    for number, outcome in enumerate((Outcome.FAILED, Outcome.DONE) * 2):
        promote(story, keys[number], f"r{number}")
        story.answer_all(outcome)
        story.let_pass(10.0)
    ends = [n.numbers for n in story.runtime.cell.notices if n.event == "tier is back"]
    assert ends == [{"seconds": 10, "blocks_not_loaded": 1}] * 2


def test_what_is_tried_of_a_sick_tier_is_all_that_a_request_wants_of_it() -> None:
    """However little the tier was given at once: what is behind the trial is refused."""
    story, keys = story_of_a_tier(6, breaker_failures_max=1, breaker_pause_s=10.0)
    promote(story, keys[0], "r")
    story.answer_all(Outcome.FAILED)
    link_of(story)._loads.pacing.window = 2
    story.let_pass(10.0)
    story.facade.on_request_started("tries")
    states = [story.facade.lookup_state(key, "tries") for key in keys[1:]]
    assert states == [BlockState.FILLING] * 5
    story.step()
    assert link_of(story).audit().breaker is BreakerState.CLOSED
    assert story.facade.lookup_prefix(keys[1:], "tries") == 5


@pytest.mark.parametrize("work", ["probe", "load", "store"])
def test_successes_in_between_keep_a_tier_in_use(work: str) -> None:
    """The breaker opens for failures in a row."""
    story, keys = story_of_a_tier(5, breaker_failures_max=2)
    for name, key in enumerate(keys):
        if work == "store":
            cascade(story, [bytes([name]) * 6], f"r{name}")
        else:
            look_up(story, key if work == "load" else bytes([name]) * 6, f"r{name}")
        if name % 2 == 0 and work == "probe":
            story.runtime.cell.settle()
            (number,) = link_of(story).audit().probes
            story.tell(wire.ProbeAnswer(probe=number, present=()))
        story.answer_all(Outcome.DONE if name % 2 else Outcome.FAILED)
    assert counts_of(story).breaker_opened == 0
    assert link_of(story).audit().breaker is BreakerState.CLOSED


HANGS = "completed none of its {0}s for too long"
FULL = "has a full mailbox"


@pytest.mark.parametrize(
    ("work", "fault"),
    [
        *(("probe", HANGS), ("load", HANGS), ("store", "failed a {0}")),
        *(("probe", FULL), ("load", FULL), ("store", FULL)),
    ],
)
def test_the_log_says_why_a_tier_is_bypassed(work: str, fault: str) -> None:
    story, (key,) = story_of_a_tier(breaker_failures_max=1)
    tier_of(story).is_full = fault is FULL
    if work == "store":
        cascade(story, keys_of(1, b"s"))
        story.answer_all(Outcome.FAILED)
    else:
        look_up(story, key if work == "load" else UNKNOWN)
    if fault is HANGS:
        story.let_pass(FAR_S)
    said = f"{fault}: {{0}}s pause".format(work)
    assert [notice.detail for notice in story.runtime.cell.notices] == [said]
    assert story.facade.statistics().tiers[0].breakers[f"{work}s"] == "OPEN"
