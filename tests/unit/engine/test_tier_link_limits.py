"""When a link gives up what it waits for, how much that may be, and how its breaker takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier import TierConfig
from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.plugin_api.backend import BackendTraits, Outcome
from tests.unit.engine._story import (
    Story,
    cascade,
    counts_of,
    keys_of,
    link_of,
    pending,
    promote,
    story_of_a_tier,
    tier_of,
)

if TYPE_CHECKING:
    from kvtier.core.statistics import TierStatistics

UNKNOWN = b"u" + bytes(5)
PROBE_S = TierConfig("1:test", "test").probe_timeout_s
LOAD_S = TierConfig("1:test", "test").promote_timeout_s


def tier_statistics(story: Story) -> TierStatistics:
    return story.facade.statistics().tiers[0]


def last_number(story: Story) -> int:
    """Return the number of the one probe in flight."""
    story.runtime.cell.settle()
    (number,) = link_of(story).audit().probes
    return number


def let_pass(story: Story, seconds: float) -> None:
    story.now += seconds
    story.facade.step_end()


# --- deadlines ---


def test_a_probe_and_a_load_are_given_up_at_their_deadlines_and_no_sooner() -> None:
    story, (key,) = story_of_a_tier()
    facade = story.facade
    let_pass(story, 50.0)
    promote(story, key)
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.PROBING
    facade.step_end()
    let_pass(story, PROBE_S - 0.25)
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.PROBING
    let_pass(story, 0.25)
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.ABSENT
    let_pass(story, LOAD_S - PROBE_S - 0.25)
    assert facade.lookup_state(key, "r") is BlockState.FILLING
    let_pass(story, 0.25)
    assert facade.lookup_state(key, "r") is BlockState.ABSENT
    counts = counts_of(story)
    assert (counts.probes_timed_out, counts.jobs_timed_out) == (1, 1)
    assert not facade.has_pending_work()


def test_a_probe_that_is_answered_too_late_says_nothing_any_more() -> None:
    story = Story()
    facade = story.facade
    facade.on_request_started("r")
    facade.lookup_state(UNKNOWN, "r")
    facade.step_end()
    let_pass(story, PROBE_S)
    story.answer_all()
    assert facade.lookup_state(UNKNOWN, "r") is BlockState.ABSENT
    assert counts_of(story).late_completions == 1


# --- how much at once ---


def test_no_more_probes_are_in_flight_than_are_allowed_and_the_next_one_follows() -> None:
    story = Story(jobs_in_flight_max=1)
    first, second = keys_of(2)
    facade = story.facade
    for name, key in (("r", first), ("s", second)):
        facade.on_request_started(name)
        assert facade.lookup_state(key, name) is BlockState.PROBING
        facade.step_end()
    assert tier_statistics(story).probes_in_flight == 1
    assert story.answer_batch(Outcome.ABSENT).keys == (first,)
    assert facade.lookup_state(first, "r") is BlockState.ABSENT
    assert facade.lookup_state(second, "s") is BlockState.PROBING
    assert story.answer_batch(Outcome.ABSENT).keys == (second,)
    assert facade.lookup_state(second, "s") is BlockState.ABSENT
    assert tier_statistics(story).breaker == "CLOSED", "that was no fault of the tier's"


def test_what_is_in_flight_is_told_by_its_kind() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.facade.lookup_state(UNKNOWN, "r")
    story.facade.step_end()
    cascade(story, keys_of(2, b"s"))
    seen = tier_statistics(story)
    assert seen.probes_in_flight == 1
    assert (seen.promotion_jobs_in_flight, seen.cascade_jobs_in_flight) == (1, 1)
    assert (seen.promotion_slots, seen.cascade_slots) == (1, 2)
    story.answer_all()
    seen = tier_statistics(story)
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


# --- the breaker ---


@pytest.mark.parametrize("work", ["probe", "load", "store"])
def test_successes_in_between_keep_a_tier_in_use(work: str) -> None:
    """The breaker opens for failures in a row."""
    story, keys = story_of_a_tier(6, breaker_failures_max=2)
    for number, succeeds in enumerate((False, True, False, True, False)):
        name = f"r{number}"
        if work == "store":
            cascade(story, keys_of(1, bytes([100 + number])), name)
            story.answer_all(Outcome.DONE if succeeds else Outcome.FAILED)
            continue
        story.facade.on_request_started(name)
        key = keys[number] if work == "load" else bytes([number]) * 6
        story.facade.lookup_state(key, name)
        story.facade.step_end()
        if work == "load":
            story.answer_all(Outcome.DONE if succeeds else Outcome.FAILED)
        elif succeeds:
            story.answer_all(Outcome.ABSENT)
        else:
            wrong = wire.ProbeAnswer(probe=last_number(story), present=(True, True))
            tier_of(story).inbox.post(wrong)
            story.runtime.cell.settle()
    assert tier_statistics(story).breaker == "CLOSED"
    assert counts_of(story).breaker_opened == 0


@pytest.mark.parametrize("work", ["probe", "load", "store"])
def test_a_full_mailbox_is_a_failure(work: str) -> None:
    story, (key,) = story_of_a_tier(breaker_failures_max=1)
    tier_of(story).is_full = True
    if work == "store":
        cascade(story, keys_of(1, b"s"))
    else:
        story.facade.on_request_started("r")
        story.facade.lookup_state(key if work == "load" else UNKNOWN, "r")
        story.facade.step_end()
    assert tier_statistics(story).breaker == "OPEN"
    assert [each.detail for each in story.runtime.cell.notices] == [
        f"has a full mailbox: {work}s pause"
    ]


def test_a_tier_that_is_bypassed_is_given_nothing_to_store_either() -> None:
    story = Story(slots=8, breaker_failures_max=1)
    cascade(story, keys_of(1, b"f"), "first")
    story.answer_all(Outcome.FAILED)
    cascade(story, keys_of(2, b"s"), "second")
    assert story.answer_all() == []
    assert counts_of(story).stores_deferred == 3
    assert story.facade.statistics().primary.pinned_slots == 0


# --- what is counted ---


def test_what_was_written_is_counted_by_blocks_and_outcomes() -> None:
    story = Story(slots=8, job_blocks_max=4)
    cascade(story, keys_of(3))
    tier_of(story).answer(pending(story), [Outcome.DONE, Outcome.FULL, Outcome.FAILED], seconds=2.5)
    story.runtime.cell.settle()
    counts = counts_of(story)
    assert (counts.write_bytes, counts.write_seconds) == (16, 2.5)
    assert (counts.read_bytes, counts.read_seconds) == (0, 0)
    assert (counts.cascade_jobs, counts.cascade_jobs_failed) == (1, 1)
    assert (counts.promotion_jobs, counts.promotion_jobs_failed) == (0, 0)
    assert (counts.full, counts.failed, counts.absent, counts.damaged) == (1, 1, 0, 0)
    assert set(story.runtime.primary.audit().directory.known) == {keys_of(1)[0]}


def test_how_long_a_load_took_is_observed() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    let_pass(story, 0.5)
    story.answer_all()
    (seen,) = story.facade.drain_observations().tiers
    assert seen.promotion_seconds == [(0.5, True)]


def test_blocks_that_were_asked_for_in_vain_are_queries_and_no_hits() -> None:
    story = Story()
    facade = story.facade
    facade.on_request_started("r")
    for key in keys_of(3):
        facade.lookup_state(key, "r")
    facade.step_end()
    story.answer_all(Outcome.ABSENT)
    counts = counts_of(story)
    assert (counts.queries, counts.hits) == (3, 0)


def test_what_backends_count_grows_through_their_lives() -> None:
    story = Story()
    inbox = tier_of(story).inbox
    for message in (
        wire.Counted({"seen": 5}),
        wire.TierBroke(reason="x"),
        wire.TierFenced(),
        wire.TierRestarted(),
        wire.Counted({"seen": 6}),
    ):
        inbox.post(message)
    story.runtime.cell.settle()
    assert tier_statistics(story).backend["seen"] == 11


def test_what_goes_up_and_down_is_of_one_life_and_what_is_counted_of_all() -> None:
    story = Story()
    link_of(story).set_traits(BackendTraits(1, 1, levels=frozenset({"blocks_now"})))
    tier_of(story).inbox.post(wire.Counted({"seen": 5, "blocks_now": 3}))
    story.runtime.cell.settle()
    seen = tier_statistics(story)
    assert seen.backend_levels == {"blocks_now"}
    assert seen.backend == {"seen": 5, "blocks_now": 3}
    for message in (wire.TierBroke(reason="x"), wire.TierFenced(), wire.TierRestarted()):
        tier_of(story).inbox.post(message)
    story.runtime.cell.settle()
    assert tier_statistics(story).backend == {"seen": 5}, "what there is now, nobody knows yet"


# --- generations ---


def test_a_new_generation_is_told_as_an_event_of_each_tier() -> None:
    """What was announced before is not to be found any more."""
    story = Story(on_reset="new_generation", tiers=2)
    story.facade.take_events()
    story.facade.reset()
    events = [(event.tier, event.kind) for event in story.facade.take_events()]
    assert sorted(events) == [(tier, EventKind.CLEARED) for tier in (-1, 0, 1)]


def test_a_cascade_that_comes_after_a_new_generation_began_lets_go_of_its_blocks() -> None:
    """An admission gate may have held it; nobody else would ever release its slots."""
    story = Story(on_reset="new_generation", slots=4)
    cascade(story, keys_of(1))
    slot = story.runtime.primary.slot_of(keys_of(1)[0])
    assert slot is not None
    story.facade.reset()
    assert story.facade.statistics().primary.quarantined_slots == 1
    late = m.Cascade("w", tuple(keys_of(1)), (slot,), 0)
    story.runtime.cell.mailbox_of(link_of(story)).post(late)
    story.runtime.cell.run()
    assert story.facade.statistics().primary.quarantined_slots == 0
    assert counts_of(story).cascades_dropped == 1


@pytest.mark.parametrize("how", ["breaks", "is fenced"])
def test_probes_of_a_tier_that_is_gone_are_no_late_answers_of_another_generation(how: str) -> None:
    """They were sent before a reset: nobody waits for them, and nothing is counted for them."""
    story = Story(on_reset="new_generation")
    facade = story.facade
    facade.on_request_started("r")
    facade.lookup_state(UNKNOWN, "r")
    facade.step_end()
    facade.reset()
    facade.lookup_state(UNKNOWN, "r")
    inbox = tier_of(story).inbox
    inbox.post(wire.TierBroke(reason="x") if how == "breaks" else wire.TierFenced())
    story.runtime.cell.settle()
    assert counts_of(story).queries == 0
    assert tier_statistics(story).probes_in_flight == 0
