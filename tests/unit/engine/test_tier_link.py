"""What a link sends to its tier, and what it does with the answers, late or wrong."""

from __future__ import annotations

import pytest

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
    pending,
    promote,
    story_of_a_tier,
    tier_of,
)

BLOCK_BYTES = 16
FAR = 1e6


def end_pause(story: Story) -> None:
    """Let time pass until a breaker lets something be tried."""
    story.now += 1.0
    story.facade.step_end()


# --- storing ---


def test_a_full_tier_is_given_nothing_to_store_for_a_while() -> None:
    """Trying each block would only cost its pin. Loads go on meanwhile."""
    story = Story(slots=8, breaker_pause_s=5.0)
    full, later, again = keys_of(1, b"f"), keys_of(1, b"l"), keys_of(1, b"a")
    cascade(story, full)
    assert [batch.keys for batch in story.answer_all(Outcome.FULL)] == [tuple(full)]
    assert counts_of(story).full == 1
    story.now += 4.9
    story.facade.step_end()
    cascade(story, later)
    assert story.answer_all() == []
    assert counts_of(story).stores_deferred == 2
    assert story.facade.statistics().primary.pinned_slots == 0
    story.now += 0.1
    story.facade.step_end()
    cascade(story, again)
    stored = [key for batch in story.answer_all() for key in batch.keys]
    assert sorted(stored) == sorted([*full, *later, *again]), "what was deferred is stored too"
    assert counts_of(story).cascades_dropped == 0


def test_a_tier_that_was_full_is_given_blocks_once_it_is_restarted() -> None:
    story = Story(slots=8)
    cascade(story, keys_of(1, b"f"))
    story.answer_all(Outcome.FULL)
    tier_of(story).inbox.post(wire.TierBroke(reason="test"))
    tier_of(story).inbox.post(wire.TierFenced())
    tier_of(story).inbox.post(wire.TierRestarted())
    story.runtime.cell.settle()
    cascade(story, keys_of(1, b"l"))
    stored = [key for batch in story.answer_all() for key in batch.keys]
    assert sorted(stored) == [*keys_of(1, b"f"), *keys_of(1, b"l")]


def test_a_store_is_cut_into_jobs_and_what_has_no_room_is_deferred() -> None:
    """The share of slots that cascades may read at once is bounded."""
    story = Story(slots=8, cascade_slots_fraction_max=0.75, job_blocks_max=4)
    keys = keys_of(8)
    cascade(story, keys)
    story.runtime.cell.settle()
    assert link_of(story).in_flight() == (0, 0, 2)
    assert story.facade.statistics().tiers[0].cascade_slots == 6
    assert counts_of(story).stores_deferred == 2
    assert story.facade.statistics().primary.pinned_slots == 6
    stored = [key for batch in story.answer_all() for key in batch.keys]
    assert stored == keys, "the rest follows once there is room"
    counts = counts_of(story)
    assert counts.cascade_jobs == 3
    assert (counts.write_bytes, counts.read_bytes) == (8 * BLOCK_BYTES, 0)
    assert story.facade.statistics().tiers[0].cascade_slots == 0
    assert story.facade.statistics().primary.pinned_slots == 0


def test_a_store_that_hangs_is_counted_at_its_deadline_and_ends_once() -> None:
    story = Story(slots=8)
    cascade(story, keys_of(2))
    batch = pending(story)
    timeout_s = link_of(story)._tier_config.store_timeout_s
    story.now += timeout_s - 0.01
    story.facade.step_end()
    assert counts_of(story).jobs_timed_out == 0
    assert story.facade.has_pending_work()
    story.now += 0.01
    story.facade.step_end()
    story.facade.step_end()
    assert counts_of(story).jobs_timed_out == 1
    assert not story.facade.has_pending_work()
    assert story.facade.statistics().primary.pinned_slots == 2, "the tier may read them yet"
    tier_of(story).answer(batch, [Outcome.DONE] * 2)
    story.runtime.cell.settle()
    assert counts_of(story).late_completions == 1
    assert story.facade.statistics().primary.pinned_slots == 0
    assert story.facade.statistics().tiers[0].cascade_slots == 0


def test_no_more_jobs_are_in_flight_than_are_allowed_and_the_others_follow() -> None:
    story = Story(slots=8, jobs_in_flight_max=1, job_blocks_max=1)
    keys = keys_of(3)
    cascade(story, keys)
    for key in keys:
        assert link_of(story).in_flight() == (0, 0, 1)
        assert story.answer_batch().keys == (key,)
    assert link_of(story).in_flight() == (0, 0, 0)
    assert counts_of(story).cascades_dropped == 0
    assert story.facade.statistics().primary.pinned_slots == 0


# --- a tier that takes nothing ---


def test_what_a_full_mailbox_refuses_ends_at_once() -> None:
    story, (key,) = story_of_a_tier(breaker_failures_max=100)
    tier_of(story).is_full = True
    story.facade.on_request_started("r")
    assert story.facade.lookup_state(key, "r") is BlockState.FILLING
    assert story.facade.lookup_state(b"u" + bytes(5), "r") is BlockState.PROBING
    story.facade.step_end()
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert story.facade.lookup_state(b"u" + bytes(5), "r") is BlockState.ABSENT
    cascade(story, keys_of(2, b"s"))
    counts = counts_of(story)
    assert (counts.promotions_dropped, counts.stores_deferred) == (1, 2)
    assert link_of(story).in_flight() == (0, 0, 0)
    seen = story.facade.statistics()
    assert (seen.tiers[0].cascade_slots, seen.primary.pinned_slots) == (0, 0)
    assert seen.primary.filling_from_tiers_slots == 0


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


# --- loading ---


def test_what_was_read_is_counted_by_blocks_and_outcomes() -> None:
    story, keys = story_of_a_tier(4, job_blocks_max=4)
    written = counts_of(story).write_bytes
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys, "r")
    for key in keys:
        story.facade.lookup(key, "r")
    story.facade.step_end()
    batch = pending(story)
    outcomes = [Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED]
    tier_of(story).answer(batch, outcomes, seconds=2.5)
    story.runtime.cell.settle()
    counts = counts_of(story)
    assert counts.read_bytes == BLOCK_BYTES
    assert counts.read_seconds == 2.5
    assert counts.write_bytes == written
    assert (counts.promotion_jobs, counts.promotion_jobs_failed) == (1, 1)
    assert counts.cascade_jobs_failed == 0
    assert (counts.absent, counts.damaged, counts.failed, counts.full) == (1, 1, 1, 0)
    assert (counts.queries, counts.hits) == (4, 4)
    assert link_of(story).promotion_seconds.drain() == [(0.0, False)]


def test_a_load_in_flight_holds_its_slots_and_is_worth_stepping_on() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.facade.lookup_state(b"u" + bytes(5), "r")
    story.facade.step_end()
    assert link_of(story).in_flight() == (1, 1, 0)
    assert link_of(story).awaited() == 2
    assert story.facade.has_pending_work()
    assert story.facade.statistics().tiers[0].promotion_slots == 1


def test_too_many_abandoned_loads_keep_a_tier_from_being_asked_for_more() -> None:
    """Their slots are lost until the tier releases them."""
    story, keys = story_of_a_tier(
        3, abandoned_slots_fraction_max=0.1, breaker_pause_s=1.0, job_blocks_max=1
    )
    promote(story, keys[0])
    first = pending(story)
    story.now += FAR
    story.facade.step_end()
    assert link_of(story).audit().abandoned_slots == 1
    end_pause(story)
    promote(story, keys[1], "s")
    assert story.facade.lookup_state(keys[1], "s") is BlockState.ABSENT
    assert counts_of(story).promotions_dropped == 1
    tier_of(story).answer(first, [Outcome.DONE])
    story.runtime.cell.settle()
    assert link_of(story).audit().abandoned_slots == 0
    promote(story, keys[2], "t")
    assert link_of(story).in_flight() == (0, 1, 0)


# --- answers ---


def test_an_answer_that_nothing_waits_for_is_late_if_its_number_was_given_and_else_unknown() -> (
    None
):
    story = Story()
    story.store(keys_of(1))
    inbox = tier_of(story).inbox
    for number in (1, 0, -1, 2, 1000):
        inbox.post(wire.JobEnded(job=number, outcomes=(Outcome.DONE,), seconds=0.0))
    inbox.post(wire.ProbeAnswer(probe=1, present=(True,)))
    story.runtime.cell.settle()
    counts = counts_of(story)
    assert (counts.late_completions, counts.unknown_completions) == (2, 4)


def test_a_probe_with_the_wrong_number_of_answers_is_a_failure_and_a_miss() -> None:
    story = Story(breaker_failures_max=2)
    story.facade.on_request_started("r")
    for number, key in enumerate(keys_of(2), 1):
        assert link_of(story).audit().breaker is BreakerState.CLOSED
        story.facade.lookup_state(key, "r")
        story.facade.step_end()
        tier_of(story).inbox.post(wire.ProbeAnswer(probe=number, present=(True, True)))
        story.runtime.cell.settle()
        assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert link_of(story).audit().breaker is BreakerState.OPEN


def test_a_job_with_the_wrong_number_of_outcomes_has_failed() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    story.runtime.cell.settle()
    (job,) = link_of(story).audit().jobs
    tier_of(story).inbox.post(wire.JobEnded(job=job, outcomes=(), seconds=0.0))
    story.runtime.cell.settle()
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    assert counts_of(story).failed == 1


def test_how_long_a_probe_took_is_observed() -> None:
    story = Story()
    story.facade.on_request_started("r")
    story.facade.lookup_state(keys_of(1)[0], "r")
    story.facade.step_end()
    story.now += 0.25
    story.facade.step_end()
    story.answer_all()
    assert link_of(story).probe_seconds.drain() == [0.25]


# --- the breaker ---


def test_a_sick_tier_is_bypassed_tried_after_its_pause_and_back_with_a_success() -> None:
    story, keys = story_of_a_tier(4, breaker_failures_max=2, breaker_pause_s=10.0)
    for number in range(2):
        promote(story, keys[number], f"r{number}")
        story.answer_all(Outcome.FAILED)
    assert link_of(story).audit().breaker is BreakerState.OPEN
    assert counts_of(story).breaker_opened == 1
    story.facade.on_request_started("bypassed")
    assert story.facade.lookup_state(keys[2], "bypassed") is BlockState.ABSENT
    story.now += 10.0
    story.facade.step_end()
    assert link_of(story).audit().breaker is BreakerState.HALF_OPEN
    promote(story, keys[2], "tries")
    story.answer_all()
    assert link_of(story).audit().breaker is BreakerState.CLOSED
    promote(story, keys[3], "goes on")
    story.answer_all()
    assert story.facade.lookup(keys[3], "goes on") is True
    said = [(notice.event, notice.detail) for notice in story.runtime.cell.notices]
    assert said == [
        ("tier bypassed", "failed a load: loads pause"),
        ("tier is back", "loads go on"),
    ]


def test_what_is_tried_of_a_sick_tier_is_all_that_a_request_wants_of_it() -> None:
    """However little the tier was given at once: what is behind the trial is refused."""
    story, keys = story_of_a_tier(6, breaker_failures_max=1, breaker_pause_s=10.0)
    promote(story, keys[0], "r")
    story.answer_all(Outcome.FAILED)
    link_of(story)._loads.pacing.window = 2
    story.now += 10.0
    story.facade.step_end()
    story.facade.on_request_started("tries")
    states = [story.facade.lookup_state(key, "tries") for key in keys[1:]]
    assert states == [BlockState.FILLING] * 5
    story.facade.step_end()
    story.answer_all()
    assert link_of(story).audit().breaker is BreakerState.CLOSED
    assert story.facade.lookup_prefix(keys[1:], "tries") == 5


def test_a_trial_that_fails_is_no_return() -> None:
    story, keys = story_of_a_tier(2, breaker_failures_max=1, breaker_pause_s=10.0)
    promote(story, keys[0], "r")
    story.answer_all(Outcome.FAILED)
    story.now += 10.0
    story.facade.step_end()
    promote(story, keys[1], "tries")
    story.answer_all(Outcome.FAILED)
    assert link_of(story).audit().breaker is BreakerState.OPEN
    assert counts_of(story).breaker_opened == 1, "it was not closed meanwhile"
    assert [notice.event for notice in story.runtime.cell.notices] == ["tier bypassed"]


@pytest.mark.parametrize(
    ("work", "detail"),
    [
        ("probe", "did nothing of its probes for too long: probes pause"),
        ("load", "did nothing of its loads for too long: loads pause"),
        ("store", "failed a store: stores pause"),
    ],
)
def test_the_log_says_why_a_tier_is_bypassed(work: str, detail: str) -> None:
    story, (key,) = story_of_a_tier(breaker_failures_max=1)
    if work == "store":
        cascade(story, keys_of(1, b"s"))
        story.answer_all(Outcome.FAILED)
    else:
        story.facade.on_request_started("r")
        story.facade.lookup_state(key if work == "load" else b"u" + bytes(5), "r")
        story.facade.step_end()
        story.now += FAR
        story.facade.step_end()
    assert [notice.detail for notice in story.runtime.cell.notices] == [detail]


# --- a tier that breaks ---


def test_a_tier_that_breaks_is_disabled_and_its_loads_are_given_up() -> None:
    story, keys = story_of_a_tier(2)
    promote(story, keys[0])
    story.facade.lookup_state(b"u" + bytes(5), "r")
    story.facade.step_end()
    cascade(story, keys_of(1, b"s"))
    inbox = tier_of(story).inbox
    inbox.post(wire.TierBroke(reason="a bug"))
    inbox.post(wire.TierBroke(reason="again"))
    story.runtime.cell.settle()
    assert story.facade.lookup_state(keys[0], "r") is BlockState.ABSENT
    assert story.facade.lookup_state(b"u" + bytes(5), "r") is BlockState.ABSENT
    story.facade.on_request_started("later")
    assert story.facade.lookup_state(keys[1], "later") is BlockState.ABSENT
    assert counts_of(story).broke == 1
    said = [(notice.event, notice.detail) for notice in story.runtime.cell.notices]
    assert said == [("tier disabled", "a bug")]
    primary = story.facade.statistics().primary
    assert (primary.quarantined_slots, primary.pinned_slots) == (1, 1)
    assert not story.facade.has_pending_work()
    inbox.post(wire.TierFenced())
    story.runtime.cell.settle()
    primary = story.facade.statistics().primary
    assert (primary.quarantined_slots, primary.pinned_slots) == (0, 0)
    seen = link_of(story).audit()
    assert (seen.abandoned_slots, seen.cascade_slots, seen.jobs) == (0, 0, {})


def test_a_fence_ends_loads_that_nobody_has_given_up() -> None:
    story, (key,) = story_of_a_tier()
    promote(story, key)
    tier_of(story).inbox.post(wire.TierFenced())
    story.runtime.cell.settle()
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    primary = story.facade.statistics().primary
    assert (primary.quarantined_slots, primary.filling_from_tiers_slots) == (0, 0)
    assert link_of(story).in_flight() == (0, 0, 0)
    assert link_of(story).audit().breaker is BreakerState.DISABLED


def test_a_probe_that_a_broken_tier_owes_is_a_miss_for_good() -> None:
    """Its request is served by no tier that never said that it has the block."""
    story = Story()
    (key,) = keys_of(1)
    story.facade.on_request_started("r")
    assert story.facade.lookup_state(key, "r") is BlockState.PROBING
    story.facade.step_end()
    for message in (wire.TierBroke(reason="x"), wire.TierFenced(), wire.TierRestarted()):
        tier_of(story).inbox.post(message)
    story.runtime.cell.settle()
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT


def test_a_restarted_tier_serves_again_and_has_nothing_until_it_says_so() -> None:
    story, (key,) = story_of_a_tier()
    inbox = tier_of(story).inbox
    story.facade.take_events()
    for message in (
        wire.TierBroke(reason="x"),
        wire.TierFenced(),
        wire.TierRestarted(BackendTraits(1, 1, 7)),
    ):
        inbox.post(message)
    story.runtime.cell.settle()
    link = link_of(story)
    assert link.tells_uses, "its new backend evicts"
    assert link.audit().breaker is BreakerState.CLOSED
    story.facade.on_request_started("r")
    assert story.facade.lookup_state(key, "r") is BlockState.PROBING, "it is asked"
    assert [each.kind for each in story.facade.take_events()] == [EventKind.CLEARED]


def test_what_a_probe_finds_in_an_unbounded_tier_is_told() -> None:
    """Others may have stored it, or this engine before a restart: no list of it comes."""
    story = Story(slots=4)
    here, away = keys_of(2)
    story.facade.on_request_started("r")
    for key in (here, away):
        story.facade.lookup_state(key, "r")
    story.facade.step_end()
    tier_of(story).inbox.post(wire.ProbeAnswer(probe=1, present=(True, False)))
    story.runtime.cell.settle()
    events = [(each.tier, each.kind, each.keys) for each in story.facade.take_events()]
    assert events == [(0, EventKind.STORED, (here,))]


def test_what_a_tier_says_of_another_generation_says_nothing_of_this_one() -> None:
    story = Story(on_reset="new_generation", slots=4)
    (key,) = keys_of(1)
    story.facade.reset()
    inbox = tier_of(story).inbox
    inbox.post(wire.PresenceChanged(added=(key,), removed=(), since=0))
    story.runtime.cell.settle()
    assert story.runtime.primary.audit().directory.known == {}
    inbox.post(wire.PresenceChanged(added=(key,), removed=(), since=1))
    story.runtime.cell.settle()
    assert set(story.runtime.primary.audit().directory.known) == {key}
    events = [(each.tier, each.kind, each.keys) for each in story.facade.take_events()]
    assert events[-1] == (0, EventKind.STORED, (key,))
    inbox.post(wire.PresenceChanged(added=(), removed=(key,), since=1))
    story.runtime.cell.settle()
    assert story.runtime.primary.audit().directory.known == {}


def test_a_cascade_of_older_weights_is_dropped() -> None:
    story = Story(on_reset="new_generation", slots=4)
    cascade(story, keys_of(1))
    batch = pending(story)
    story.facade.reset()
    story.facade.on_reset_flushed()
    tier_of(story).answer(batch, [Outcome.DONE])
    story.runtime.cell.settle()
    assert story.runtime.primary.audit().directory.known == {}, "of other weights"
    assert story.facade.statistics().primary.quarantined_slots == 0
