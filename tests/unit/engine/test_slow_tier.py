"""A tier that is slow and sound: what waits for it, in which order, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.core.block_state import BlockState
from kvtier.engine.link.pacing import Pacing
from kvtier.plugin_api.backend import BackendTraits, Outcome
from tests.unit.engine._story import (
    Story,
    cascade,
    counts_of,
    keys_of,
    link_of,
    look_up,
    promote,
    story_of_a_tier,
    tier_of,
)

if TYPE_CHECKING:
    from tests.support.cell import Batch

ABSENT, FILLING, READY = BlockState.ABSENT, BlockState.FILLING, BlockState.READY
BLOCK_S = 0.5
BLOCK_BYTES = 16
COUNT = 24


class SlowTier:
    """A tier with blocks that takes half a second for each, one after the other."""

    def __init__(self, **settings: object) -> None:
        settings = {"slots": 96, "store_reserve_fraction": 0.1, "on_reset": "keep", **settings}
        self.story, self.keys = story_of_a_tier(2 * COUNT, **settings)
        self.facade = self.story.facade
        self.story.forget()
        self.loaded: list[bytes] = []
        taught, self.keys = self.keys[:3], self.keys[3:]
        for number, key in enumerate(taught):
            promote(self.story, key, f"taught{number}")
            self.serve()
            self.facade.on_request_finished(f"taught{number}")
        self.loaded.clear()

    def ask(self, request: str, keys: list[bytes]) -> None:
        self.facade.on_request_started(request)
        assert self.facade.lookup_states(keys, request) == [FILLING] * len(keys)
        self.facade.step_end()

    def serve(self, blocks: int = 1) -> None:
        """Have the tier end so many loads, each after its time."""
        enough = len(self.loaded) + blocks
        while len(self.loaded) < enough:
            self.story.runtime.cell.settle()
            self.pass_time(BLOCK_S * len(self.batch.keys))
            self.loaded += self.story.answer_batch().keys
        self.facade.step_end()

    @property
    def batch(self) -> Batch:
        """What the backend works at."""
        return tier_of(self.story).batches[0]

    def pass_time(self, seconds: float) -> None:
        self.story.pass_time(seconds)

    @property
    def breakers(self) -> set[str]:
        return set(self.facade.statistics().tiers[0].breakers.values())


# --- waiting is no failure ---


def test_a_queue_of_many_times_the_limit_is_worked_off_and_the_tier_stays_in_use() -> None:
    slow = SlowTier()
    limit_s = link_of(slow.story)._config.tiers[0].promote_timeout_s
    asked = slow.keys[:40]
    slow.ask("r", asked)
    assert len(asked) * BLOCK_S > limit_s
    slow.serve(len(asked))
    assert slow.loaded == asked, "heads before tails"
    assert slow.facade.lookup_states(asked, "r") == [READY] * len(asked)
    counts = counts_of(slow.story)
    assert (counts.jobs_timed_out, counts.breaker_opened, counts.promotions_dropped) == (0, 0, 0)


def test_a_tier_is_given_no_more_than_it_works_off_soon_and_its_speed_is_told() -> None:
    slow = SlowTier()
    slow.ask("r", slow.keys[:40])
    link = link_of(slow.story)
    at_tier = sum(len(job.slots) for job in link.audit().jobs.values())
    assert at_tier == 2, "one that it works at, and one to go on with"
    assert len(link.audit().waiting_loads) == 38
    assert link.statistics().promotion_slots == 40
    slow.serve(40)
    loads = link.statistics().speeds["loads"]
    assert loads.bytes_per_s == pytest.approx(BLOCK_BYTES / BLOCK_S, rel=0.3)
    assert (loads.window, loads.answers_per_s) == (2, 0)
    assert link.statistics().speeds["loads"] is loads, "until more is known"


def test_a_tier_of_which_only_the_latency_shows_has_no_throughput() -> None:
    """Whatever little the fit leaves for each block."""
    pacing = Pacing(8, limit_s=10.0)
    pacing._estimate.observe(1, 0.25, now=0.0)
    pacing._estimate.latency_s, pacing._estimate.block_s = 0.25, 1e-18
    speed = pacing.speed(BLOCK_BYTES)
    assert speed is not None
    assert (speed.latency_s, speed.bytes_per_s) == (0.25, 0.0)


def test_a_tier_that_is_fast_is_given_all_at_once() -> None:
    story, keys = story_of_a_tier(24, slots=64, on_reset="keep")
    story.forget()
    promote(story, keys[0], "first")
    story.now += 0.0005
    story.answer_all()
    story.facade.step_end()
    story.facade.on_request_started("r")
    story.facade.lookup_states(keys[1:], "r")
    story.facade.step_end()
    assert link_of(story).audit().waiting_loads == ()


def test_long_steps_of_the_engine_are_not_taken_for_a_slow_tier() -> None:
    """What it has done is seen only at the end of a step, whatever it was."""
    story = Story(slots=128)
    for number in range(20):  # a block at a time, as while tokens are generated
        cascade(story, [b"g" + bytes([number]) + bytes(4)], f"g{number}")
        story.runtime.cell.settle()
        story.now += 0.3
        story.answer_all()
        story.facade.step_end()
    cascade(story, keys_of(40))
    story.runtime.cell.settle()
    assert link_of(story).audit().waiting_stores == ()
    for number in range(3):
        story.now += 0.3
        story.answer_all()
        story.facade.step_end()
        cascade(story, keys_of(40, bytes([number])), f"p{number}")
        story.runtime.cell.settle()
        assert link_of(story).audit().waiting_stores == ()


def test_one_call_that_hangs_beside_others_is_given_up_alone() -> None:
    two_calls = BackendTraits(2, 2, load_batch_blocks_max=1)
    settings = {"slots": 64, "job_blocks_max": 1, "on_reset": "keep"}
    story, keys = story_of_a_tier(24, backend_traits=two_calls, **settings)
    story.forget()
    limit_s = link_of(story)._config.tiers[0].promote_timeout_s
    story.facade.on_request_started("r")
    story.facade.lookup_states(keys, "r")
    story.facade.step_end()
    story.runtime.cell.settle()
    hung, *_ = tier_of(story).batches
    while len(tier_of(story).batches) > 1:
        story.let_pass(limit_s / 8)
        other = tier_of(story).batches[1]
        tier_of(story).answer(other, [Outcome.DONE] * len(other.keys))
        story.runtime.cell.settle()
    story.facade.step_end()
    states = story.facade.lookup_states([key for key in keys if key not in hung.keys], "r")
    assert set(states) == {READY}
    assert story.facade.lookup_state(hung.keys[0], "r") is ABSENT
    assert counts_of(story).jobs_timed_out == len(hung.keys)
    assert set(story.facade.statistics().tiers[0].breakers.values()) == {"CLOSED"}


# --- whose turn it is ---


def test_who_came_first_is_served_first_also_when_it_asks_for_more() -> None:
    slow = SlowTier()
    slow.ask("first", slow.keys[:3])
    slow.ask("second", slow.keys[10:16])
    slow.serve(3)
    assert slow.facade.lookup_states(slow.keys[3:8], "first") == [FILLING] * 5
    slow.facade.step_end()
    slow.serve(11 - 3)
    at_tier_before = 2
    own = [key for key in slow.loaded if key in slow.keys[:8]]
    assert own == slow.keys[:8]
    others_before = slow.loaded.index(slow.keys[7]) - 7
    assert others_before <= at_tier_before


@pytest.mark.parametrize("how", ["finished", "scheduled"])
def test_what_nobody_waits_for_any_more_is_not_read(how: str) -> None:
    slow = SlowTier()
    slow.ask("gone", slow.keys[:20])
    slow.ask("stays", slow.keys[30:33])
    if how == "finished":
        slow.facade.on_request_finished("gone")
    else:
        slow.facade.on_requests_scheduled(["gone"])
    slow.facade.step_end()
    slow.serve(2 + 3)
    assert slow.loaded == [*slow.keys[:2], *slow.keys[30:33]]
    assert counts_of(slow.story).loads_cancelled == 18
    seen = slow.story.primary
    assert (seen.filling_from_tiers_slots, seen.quarantined_slots) == (0, 0)
    assert slow.facade.lookup_states(slow.keys[30:33], "stays") == [READY] * 3


def test_what_was_withdrawn_is_asked_for_again_by_whoever_else_wants_it() -> None:
    slow = SlowTier()
    slow.ask("gone", slow.keys[:10])
    slow.facade.on_request_started("other")
    assert slow.facade.lookup_states(slow.keys[:10], "other") == [FILLING] * 10
    slow.facade.on_request_finished("gone")
    slow.facade.step_end()
    slow.serve(2)
    assert slow.facade.lookup_states(slow.keys[:10], "other") == [*[READY] * 2, *[FILLING] * 8]
    slow.facade.step_end()
    slow.serve(8)
    assert slow.facade.lookup_states(slow.keys[:10], "other") == [READY] * 10
    assert counts_of(slow.story).read_bytes == 16 * (3 + 10), "nothing is read twice"


def test_a_reset_withdraws_what_waits() -> None:
    slow = SlowTier()
    slow.ask("r", slow.keys[:20])
    slow.story.forget()
    assert link_of(slow.story).audit().waiting_loads == ()
    slow.serve(2)
    seen = slow.story.primary
    assert (seen.free_slots, seen.quarantined_slots) == (seen.slot_count, 0)


def test_a_request_waits_no_longer_than_it_may_and_that_is_no_failure() -> None:
    slow = SlowTier(wait_timeout_s=3.0)
    slow.ask("r", slow.keys[:20])
    slow.serve(4)
    slow.pass_time(1.1)
    assert slow.facade.lookup_states(slow.keys[:20], "r") == [*[READY] * 4, ABSENT]
    assert counts_of(slow.story).loads_abandoned == 16
    assert slow.breakers == {"CLOSED"}


def test_a_lease_does_not_run_out_while_more_is_on_its_way() -> None:
    slow = SlowTier(lease_timeout_s=2.0)
    slow.ask("r", slow.keys[:10])
    slow.serve(9)
    leases = slow.story.runtime.primary.audit().promotions.leases
    assert leases["r"] == frozenset(slow.keys[:10])
    slow.serve(1)
    slow.pass_time(2.0)
    assert "r" not in slow.story.runtime.primary.audit().promotions.leases


# --- what arrives late ---


def test_a_block_that_arrives_late_and_sound_is_kept() -> None:
    slow = SlowTier(wait_timeout_s=3.0)
    slow.ask("r", slow.keys[:2])
    slow.story.runtime.cell.settle()
    slow.pass_time(3.0)
    assert slow.facade.lookup_states(slow.keys[:2], "r") == [ABSENT]
    assert slow.story.primary.quarantined_slots == 2
    for outcome in (Outcome.DONE, Outcome.DAMAGED):
        slow.story.answer_batch(outcome)
    seen = slow.story.primary
    assert seen.quarantined_slots == 0
    assert seen.counts.late_blocks_kept == 1
    slow.facade.on_request_started("next")
    assert slow.facade.lookup_state(slow.keys[0], "next") is READY


def test_a_late_block_that_was_computed_meanwhile_is_let_go() -> None:
    slow = SlowTier(wait_timeout_s=3.0)
    slow.ask("r", slow.keys[:1])
    slow.story.runtime.cell.settle()
    late = slow.batch
    slow.pass_time(3.0)
    slow.facade.complete_store(slow.story.grant(slow.keys[:1], "r").keys, "r")
    tier_of(slow.story).answer(late, [Outcome.DONE])
    slow.story.runtime.cell.settle()
    assert slow.story.primary.counts.late_blocks_kept == 0
    assert slow.story.primary.quarantined_slots == 0


def test_an_answer_to_a_probe_that_comes_late_is_learnt() -> None:
    story = Story(wait_timeout_s=0.5)
    (key,) = keys_of(1)
    assert look_up(story, key) is BlockState.PROBING
    story.let_pass(0.5)
    assert story.facade.lookup_state(key, "r") is ABSENT
    assert set(story.facade.statistics().tiers[0].breakers.values()) == {"CLOSED"}
    story.answer_all()
    assert counts_of(story).late_completions == 1
    assert story.facade.lookup_state(key, "r") is ABSENT, "it has been told"
    assert look_up(story, key, "next") is FILLING, "without another probe"


# --- probes ---


class SlowAnswers:
    """A tier that is asked, and answers when told to."""

    def __init__(self) -> None:
        traits = BackendTraits(1, 1, probe_batch_blocks_max=512)
        self.story = Story(slots=600, backend_traits=traits)
        self.facade = self.story.facade

    def ask(self, request: str, keys: list[bytes]) -> None:
        self.facade.on_request_started(request)
        self.facade.lookup_prefix(keys, request)
        self.facade.step_end()
        self.story.runtime.cell.settle()

    def answer(self, outcome: Outcome) -> tuple[bytes, ...]:
        """Have one call end, after a millisecond for each key."""
        self.story.runtime.cell.settle()
        asked = tier_of(self.story).batches[0].keys
        self.story.now += 0.001 * len(asked)
        self.story.answer_batch(outcome)
        self.facade.step_end()
        self.story.runtime.cell.settle()
        return asked


def long_prompt(count: int, prefix: bytes = b"k") -> list[bytes]:
    return [prefix + number.to_bytes(2, "big") + bytes(4) for number in range(count)]


def test_nothing_is_asked_for_behind_the_first_block_that_is_not_there() -> None:
    slow = SlowAnswers()
    keys = long_prompt(500)
    slow.ask("r", keys)
    first = slow.answer(Outcome.ABSENT)
    assert first == tuple(keys[: len(first)])
    assert len(first) < len(keys) / 3
    assert tier_of(slow.story).batches == []
    assert slow.facade.lookup_states(keys, "r") == [ABSENT]
    assert not slow.facade.has_pending_work()


def test_a_prompt_that_is_there_is_asked_for_to_its_end() -> None:
    slow = SlowAnswers()
    keys = long_prompt(500)
    slow.ask("r", keys)
    asked: list[bytes] = []
    while tier_of(slow.story).batches:
        asked += slow.answer(Outcome.DONE)
    assert asked == keys
    assert slow.facade.lookup_states(keys, "r") == [FILLING] * len(keys)
    assert counts_of(slow.story).probes_timed_out == 0


def test_a_short_question_does_not_wait_for_all_of_a_long_one() -> None:
    slow = SlowAnswers()
    long, short = long_prompt(500), long_prompt(4, b"s")
    slow.ask("long", long)
    slow.answer(Outcome.DONE)
    slow.ask("short", short)
    asked = []
    while short[0] not in asked:
        asked += slow.answer(Outcome.ABSENT if short[0] in asked else Outcome.DONE)
    assert len(asked) < 250, "one part of the long one, at most"


def test_what_a_request_asks_that_is_over_is_not_asked() -> None:
    slow = SlowAnswers()
    slow.ask("gone", long_prompt(500))
    slow.facade.on_request_finished("gone")
    slow.facade.step_end()
    slow.answer(Outcome.DONE)
    assert tier_of(slow.story).batches == []
    assert not slow.facade.has_pending_work()


# --- kinds of work fail apart ---


@pytest.mark.promise(21)
@pytest.mark.parametrize("sick", ["stores", "loads"])
def test_a_tier_that_cannot_do_one_kind_of_work_does_the_other(sick: str) -> None:
    story, (key,) = story_of_a_tier(breaker_failures_max=1)
    new = keys_of(2, b"s")
    kinds = [lambda: cascade(story, new), lambda: promote(story, key)]
    fails, goes_on = kinds if sick == "stores" else reversed(kinds)
    fails()
    story.answer_all(Outcome.FAILED)
    assert story.facade.statistics().tiers[0].breakers[sick] == "OPEN"
    goes_on()
    done = [key for batch in story.answer_all() for key in batch.keys]
    assert done == ([key] if sick == "stores" else new)
    assert counts_of(story).cascades_dropped == 0


@pytest.mark.promise(21)
def test_a_tier_that_answers_no_probe_serves_what_is_known_of_it() -> None:
    story, (key,) = story_of_a_tier()
    look_up(story, b"u" + bytes(5), "asks")
    story.let_pass(1.0)
    assert story.facade.statistics().tiers[0].breakers["probes"] == "OPEN"
    story.facade.on_request_started("r")
    assert story.facade.lookup_state(b"u" + bytes(5), "r") is ABSENT, "without a step's wait"
    assert story.facade.lookup_state(key, "r") is FILLING


def test_a_slow_writer_is_given_its_stores_one_after_the_other() -> None:
    story = Story(slots=64)
    first, rest = keys_of(1, b"f"), keys_of(30)
    cascade(story, first, "f")
    story.pass_time(BLOCK_S)
    story.answer_all()
    story.facade.step_end()
    cascade(story, rest)
    story.runtime.cell.settle()
    at_tier = sum(len(job.slots) for job in link_of(story).audit().jobs.values())
    assert at_tier == 2
    stored: list[bytes] = []
    for _ in range(len(rest)):
        story.pass_time(BLOCK_S)
        stored += story.answer_batch().keys
        story.facade.step_end()
    assert stored == rest
    counts = counts_of(story)
    assert (counts.cascades_dropped, counts.stores_deferred) == (0, 0)
    assert story.primary.pinned_slots == 0
