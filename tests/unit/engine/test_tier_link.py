"""What a link sends to its tier, and what it does with the answers, late or wrong."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import BackendTraits, Outcome
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

BLOCK_BYTES = 16
UNKNOWN = b"u" + bytes(5)


def stored(story: Story, outcome: Outcome = Outcome.DONE) -> list[bytes]:
    """Have the tier answer all that it is asked; return the keys, in the order of the calls."""
    return [key for batch in story.answer_all(outcome) for key in batch.keys]


# --- storing ---


def test_a_full_tier_is_given_nothing_to_store_for_a_while() -> None:
    """Trying each block would only cost its pin. Loads go on meanwhile."""
    story = Story(slots=8, breaker_pause_s=5.0)
    full, later, again = keys_of(1, b"f"), keys_of(1, b"l"), keys_of(1, b"a")
    cascade(story, full)
    assert stored(story, Outcome.FULL) == full
    assert counts_of(story).stores_rejected == 1
    story.let_pass(4.9)
    cascade(story, later)
    assert stored(story) == []
    assert counts_of(story).stores_deferred == 2
    assert story.primary.pinned_slots == 0
    story.let_pass(0.1)
    cascade(story, again)
    assert sorted(stored(story)) == sorted([*full, *later, *again]), "what was deferred too"
    assert counts_of(story).cascades_dropped == 0


def test_a_tier_that_was_full_is_given_blocks_once_it_is_restarted() -> None:
    story = Story(slots=8)
    cascade(story, keys_of(1, b"f"))
    story.answer_all(Outcome.FULL)
    story.restart()
    cascade(story, keys_of(1, b"l"))
    assert sorted(stored(story)) == [*keys_of(1, b"f"), *keys_of(1, b"l")]


def test_a_store_is_cut_into_jobs_and_what_has_no_room_is_deferred() -> None:
    """The share of slots that cascades may read at once is bounded."""
    story = Story(slots=8, cascade_slots_fraction_max=0.75, job_blocks_max=4)
    keys = keys_of(8)
    cascade(story, keys)
    story.runtime.cell.settle()
    assert link_of(story).in_flight() == (0, 0, 2)
    assert story.facade.statistics().tiers[0].cascade_slots == 6
    assert counts_of(story).stores_deferred == 2
    assert story.primary.pinned_slots == 6
    assert stored(story) == keys, "the rest follows once there is room"
    counts = counts_of(story)
    assert counts.cascade_jobs == 3
    assert (counts.write_bytes, counts.read_bytes) == (8 * BLOCK_BYTES, 0)
    assert story.facade.statistics().tiers[0].cascade_slots == 0
    assert story.primary.pinned_slots == 0


def test_a_store_that_hangs_is_counted_at_its_deadline_and_ends_once() -> None:
    story = Story(slots=8)
    cascade(story, keys_of(2))
    batch = pending(story)
    story.let_pass(link_of(story)._config.tiers[0].store_timeout_s - 0.01)
    assert counts_of(story).jobs_timed_out == 0
    assert story.facade.has_pending_work()
    story.let_pass(0.01)
    story.facade.step_end()
    assert counts_of(story).jobs_timed_out == 1
    assert not story.facade.has_pending_work()
    assert story.primary.pinned_slots == 2, "the tier may read them yet"
    tier_of(story).answer(batch, [Outcome.DONE] * 2)
    story.runtime.cell.settle()
    assert counts_of(story).late_completions == 1
    assert story.primary.pinned_slots == 0
    assert story.facade.statistics().tiers[0].cascade_slots == 0


# --- a tier that takes nothing ---


def test_what_a_full_mailbox_refuses_ends_at_once() -> None:
    story, (key,) = story_of_a_tier(breaker_failures_max=100)
    tier_of(story).is_full = True
    story.facade.on_request_started("r")
    assert story.facade.lookup_state(key, "r") is BlockState.FILLING
    assert story.facade.lookup_state(UNKNOWN, "r") is BlockState.PROBING
    story.facade.step_end()
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert story.facade.lookup_state(UNKNOWN, "r") is BlockState.ABSENT
    cascade(story, keys_of(2, b"s"))
    counts = counts_of(story)
    assert (counts.promotions_dropped, counts.stores_deferred) == (1, 2)
    assert link_of(story).in_flight() == (0, 0, 0)
    assert story.facade.statistics().tiers[0].cascade_slots == 0
    assert (story.primary.pinned_slots, story.primary.filling_from_tiers_slots) == (0, 0)


def test_a_generation_that_a_full_mailbox_refused_is_told_with_the_next_step() -> None:
    story = Story(on_reset="new_generation")
    story.runtime.cell.settle()
    tier_of(story).is_full = True
    story.facade.reset()
    told: list[wire.Message] = []
    story.runtime.cell.on_post = lambda _mailbox, message: told.append(message)
    tier_of(story).is_full = False
    story.facade.step_end()
    story.facade.step_end()
    began = [each for each in told if isinstance(each, wire.GenerationBegan)]
    assert [each.epoch for each in began] == [1], "once is enough"


# --- answers, and what is counted of them ---


def test_what_was_read_is_counted_by_blocks_and_outcomes() -> None:
    story, keys = story_of_a_tier(4, job_blocks_max=4)
    written = counts_of(story).write_bytes
    story.facade.on_request_started("r")
    for key in keys:
        story.facade.lookup(key, "r")
    story.facade.step_end()
    outcomes = [Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED]
    tier_of(story).answer(pending(story), outcomes, seconds=2.5)
    story.runtime.cell.settle()
    counts = counts_of(story)
    assert (counts.read_bytes, counts.read_seconds) == (BLOCK_BYTES, 2.5)
    assert counts.write_bytes == written
    assert (counts.promotion_jobs, counts.promotion_jobs_failed) == (1, 1)
    assert counts.cascade_jobs_failed == 0
    assert (counts.load_misses, counts.damaged, counts.failed) == (1, 1, 1)
    assert counts.stores_rejected == 0
    assert (counts.queries, counts.hits) == (4, 4)
    job = link_of(story).ended_jobs.drain()[-1]
    assert (job.is_load, job.is_whole, job.size_bytes) == (True, False, BLOCK_BYTES)


def test_a_job_took_from_its_sending_to_its_end_however_many_calls_it_was() -> None:
    """The calls' times, added up, made a tier with 16 threads look ten times slower than it was."""
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.let_pass(5.0)
    tier_of(story).answer(pending(story), [Outcome.DONE], seconds=40.0, at=story.now - 3.0)
    story.facade.step_end()
    story.runtime.cell.settle()
    job = link_of(story).ended_jobs.drain()[-1]
    assert (job.seconds, job.tier_seconds) == (pytest.approx(5.0), pytest.approx(2.0))


def test_what_was_written_is_counted_by_blocks_and_outcomes() -> None:
    story = Story(slots=8, job_blocks_max=4)
    cascade(story, keys_of(3))
    tier_of(story).answer(pending(story), [Outcome.DONE, Outcome.FULL, Outcome.FAILED], seconds=2.5)
    story.runtime.cell.settle()
    counts = counts_of(story)
    assert (counts.write_bytes, counts.write_seconds) == (BLOCK_BYTES, 2.5)
    assert (counts.read_bytes, counts.read_seconds) == (0, 0)
    assert (counts.cascade_jobs, counts.cascade_jobs_failed) == (1, 1)
    assert (counts.promotion_jobs, counts.promotion_jobs_failed) == (0, 0)
    assert (counts.stores_rejected, counts.failed) == (1, 1)
    assert (counts.load_misses, counts.damaged) == (0, 0)
    assert set(story.runtime.primary.audit().directory.known) == {keys_of(1)[0]}


def test_how_long_probes_and_loads_take_is_observed() -> None:
    story, (key,) = story_of_a_tier()
    before = counts_of(story)
    promote(story, key)
    story.now += 0.5
    story.step()
    story.facade.lookup_states(keys_of(3, b"u"), "r")
    story.facade.step_end()
    story.now += 0.25
    story.step(Outcome.ABSENT)
    (seen,) = story.facade.drain_observations().tiers
    job = seen.jobs[-1]
    assert (job.is_whole, job.seconds, seen.probe_seconds) == (True, 0.5, [0.25])
    counts = counts_of(story)
    asked, found = counts.queries - before.queries, counts.hits - before.hits
    assert (asked, found) == (4, 1), "what was asked for in vain is no hit"


def test_an_answer_that_nothing_waits_for_is_late_if_its_number_was_given_and_else_unknown() -> (
    None
):
    story = Story()
    story.store(keys_of(1))
    for number in (1, 0, -1, 2, 1000):
        story.tell(wire.JobEnded(job=number, outcomes=(Outcome.DONE,), seconds=0.0))
    story.tell(wire.ProbeAnswer(probe=1, present=(True,)))
    counts = counts_of(story)
    assert (counts.late_completions, counts.unknown_completions) == (2, 4)


def test_a_probe_with_the_wrong_number_of_answers_is_a_failure_and_a_miss() -> None:
    story = Story(breaker_failures_max=2)
    story.facade.on_request_started("r")
    for number, key in enumerate(keys_of(2), 1):
        assert link_of(story).audit().breaker is BreakerState.CLOSED
        story.facade.lookup_state(key, "r")
        story.facade.step_end()
        story.tell(wire.ProbeAnswer(probe=number, present=(True, True)))
        assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert link_of(story).audit().breaker is BreakerState.OPEN


def test_a_job_with_the_wrong_number_of_outcomes_has_failed() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.runtime.cell.settle()
    (job,) = link_of(story).audit().jobs
    story.tell(wire.JobEnded(job=job, outcomes=(), seconds=0.0))
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert counts_of(story).failed == 1


# --- a tier that breaks ---


def test_a_tier_that_breaks_is_disabled_and_its_loads_are_given_up() -> None:
    story, keys = story_of_a_tier(2)
    promote(story, keys[0])
    story.facade.lookup_state(UNKNOWN, "r")
    story.facade.step_end()
    cascade(story, keys_of(1, b"s"))
    story.tell(wire.TierBroke(reason="a bug"), wire.TierBroke(reason="again"))
    assert story.facade.lookup_state(keys[0], "r") is BlockState.ABSENT
    assert story.facade.lookup_state(UNKNOWN, "r") is BlockState.ABSENT
    assert look_up(story, keys[1], "later") is BlockState.ABSENT
    assert counts_of(story).crashes == 1
    assert not story.runtime.cell.notices, "its host logs it"
    assert link_of(story).lost_blocks() == {"blocks_not_loaded": 1, "blocks_not_stored": 0}
    assert (story.primary.quarantined_slots, story.primary.pinned_slots) == (1, 1)
    assert not story.facade.has_pending_work()
    story.tell(wire.TierFenced())
    assert (story.primary.quarantined_slots, story.primary.pinned_slots) == (0, 0)
    seen = link_of(story).audit()
    assert (seen.abandoned_slots, seen.cascade_slots, seen.jobs) == (0, 0, {})


def test_a_fence_ends_loads_that_nobody_has_given_up() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.tell(wire.TierFenced())
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert (story.primary.quarantined_slots, story.primary.filling_from_tiers_slots) == (0, 0)
    assert link_of(story).in_flight() == (0, 0, 0)
    assert link_of(story).audit().breaker is BreakerState.DISABLED


def test_a_probe_that_a_broken_tier_owes_is_a_miss_for_good() -> None:
    """Its request is served by no tier that never said that it has the block."""
    story = Story()
    (key,) = keys_of(1)
    assert look_up(story, key) is BlockState.PROBING
    story.restart()
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT


def test_a_restarted_tier_serves_again_and_has_nothing_until_it_says_so() -> None:
    story, (key,) = story_of_a_tier()
    story.facade.take_events()
    story.restart(traits=BackendTraits(1, 1, 7))
    assert link_of(story).tells_uses, "its new backend evicts"
    assert link_of(story).audit().breaker is BreakerState.CLOSED
    assert look_up(story, key) is BlockState.PROBING, "it is asked"
    assert [each.kind for each in story.facade.take_events()] == [EventKind.CLEARED]


def test_what_backends_count_grows_through_their_lives_and_gauges_are_of_one() -> None:
    story = Story()
    story.tell(wire.Counted({"seen": 5}, {"blocks_now": 3}))
    seen = story.facade.statistics().tiers[0]
    assert (seen.backend_counters, seen.backend_gauges) == ({"seen": 5}, {"blocks_now": 3})
    story.restart()
    seen = story.facade.statistics().tiers[0]
    assert (seen.backend_counters, seen.backend_gauges) == ({"seen": 5}, {}), "not known yet"
    story.tell(wire.Counted({"seen": 6}))
    assert story.facade.statistics().tiers[0].backend_counters["seen"] == 11


# --- generations ---


def test_what_a_tier_says_of_another_generation_says_nothing_of_this_one() -> None:
    story = Story(on_reset="new_generation", slots=4)
    (key,) = keys_of(1)
    story.facade.reset()
    known = story.runtime.primary._directory._known
    story.tell(wire.PresenceChanged(added=(key,), removed=(), since=0))
    assert known == {}
    story.tell(wire.PresenceChanged(added=(key,), removed=(), since=1))
    assert set(known) == {key}
    events = [(each.tier, each.kind, each.keys) for each in story.facade.take_events()]
    assert events[-1] == (0, EventKind.STORED, (key,))
    story.tell(wire.PresenceChanged(added=(), removed=(key,), since=1))
    assert known == {}


def test_a_cascade_of_older_weights_is_dropped() -> None:
    story = Story(on_reset="new_generation", slots=4)
    cascade(story, keys_of(1))
    batch = pending(story)
    story.facade.reset()
    story.facade.on_reset_flushed()
    tier_of(story).answer(batch, [Outcome.DONE])
    story.runtime.cell.settle()
    assert story.runtime.primary.audit().directory.known == {}, "of other weights"
    assert story.primary.quarantined_slots == 0


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
    (key,) = keys_of(1)
    cascade(story, [key])
    slot = story.runtime.primary.slot_of(key)
    assert slot is not None
    story.facade.reset()
    assert story.primary.quarantined_slots == 1
    story.runtime.cell.mailbox_of(link_of(story)).post(m.Cascade("w", (key,), (slot,), 0))
    story.runtime.cell.run()
    assert story.primary.quarantined_slots == 0
    assert counts_of(story).cascades_dropped == 1


@pytest.mark.parametrize("end", [wire.TierBroke(reason="x"), wire.TierFenced()])
def test_probes_of_a_tier_that_is_gone_are_no_late_answers_of_another_generation(
    end: wire.Message,
) -> None:
    """They were sent before a reset: nobody waits for them, and nothing is counted for them."""
    story = Story(on_reset="new_generation")
    look_up(story, UNKNOWN)
    story.facade.reset()
    story.facade.lookup_state(UNKNOWN, "r")
    story.tell(end)
    assert counts_of(story).queries == 0
    assert story.facade.statistics().tiers[0].probes_in_flight == 0
