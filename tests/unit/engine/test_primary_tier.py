"""What the primary tier makes of calls: for its policies, its tiers, and who watches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.core.block_state import BlockState
from kvtier.core.events import PRIMARY, EventKind
from kvtier.core.messages import GroupKeys
from kvtier.plugin_api.backend import Outcome
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.tier import driver_messages as d
from tests.unit.engine._story import Story, keys_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class Attentive(LRUPolicy):
    """A policy that checks what it is told against its contract, and keeps what it heard."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.there: set[Key] = set()
        self.held: set[Key] = set()
        self.times: list[float] = []
        self.ended: list[tuple[RequestId, Sequence[Key] | None]] = []
        self.asked: list[int] = []

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        assert keys, "told of no use"
        super().touch(keys, request)

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        assert self.there.isdisjoint(keys), "admitted twice"
        self.there.update(keys)
        if held:
            self.held.update(keys)
        super().admit(keys, request, held=held)

    def hold(self, keys: Sequence[Key]) -> None:
        self.held.update(keys)
        super().hold(keys)

    def unhold(self, keys: Sequence[Key]) -> None:
        self.held.difference_update(keys)
        super().unhold(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        assert self.there.issuperset(keys), "never admitted"
        self.there.difference_update(keys)
        self.held.difference_update(keys)
        super().forget(keys)

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        self.asked.append(count)
        chosen = super().choose_victims(count, exclude)
        self.there.difference_update(chosen)
        return chosen

    def restore(self, keys: Sequence[Key]) -> None:
        self.there.update(keys)
        super().restore(keys)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        self.ended.append((request, order))
        super().end_request(request, order)

    def pass_time(self, now: float) -> None:
        self.times.append(now)

    def clear(self) -> None:
        self.there.clear()
        self.held.clear()
        super().clear()


def story_that_tells(**settings: object) -> tuple[Story, Attentive]:
    """Return a runtime, and the policy that hears all."""
    made: list[Attentive] = []

    def policy(capacity: int) -> Attentive:
        made.append(Attentive(capacity))
        return made[0]

    return Story(policy=policy, **settings), made[0]


# --- what an eviction policy is told ---


def test_a_policy_is_told_what_is_here_and_what_of_it_must_stay() -> None:
    """What a policy believes to be held it can't choose; what it believes to be gone neither."""
    story, policy = story_that_tells(slots=4)
    facade, primary = story.facade, story.runtime.primary
    keys, failing = keys_of(2), keys_of(1, b"f")

    def agree(held: list[bytes]) -> None:
        story.runtime.cell.run()
        assert policy.there == set(primary.audit().slots.slot_of)
        assert policy.held == set(held)

    facade.on_request_started("w")
    for each in (keys, failing):
        grant = facade.prepare_store(each, "w")
        assert grant is not None
    agree([*keys, *failing])
    facade.complete_store(failing, "w", success=False)
    agree(keys)
    facade.complete_store(keys, "w")
    agree(keys)  # the tier reads them
    story.answer_all()
    agree([])
    facade.on_request_started("r")
    assert facade.lookup_prefix(keys, "r") == 2
    facade.prepare_load(keys, "r")
    agree(keys)
    facade.complete_load(keys[:1], "r")
    agree(keys[1:])
    facade.complete_load(keys[1:], "r")
    agree([])
    facade.step_end()
    story.store(keys_of(4, b"n"), "other")
    agree([])
    facade.on_request_started("s")
    assert facade.lookup_prefix(keys, "s") is None
    agree(keys)
    facade.step_end()
    story.answer_all()
    agree(keys)
    facade.on_request_finished("s")
    agree([])
    facade.reset()
    agree([])


def test_a_policy_is_asked_for_as_many_victims_as_slots_are_missing() -> None:
    """And for none, where there is just the room: it would look through all that it has."""
    story, policy = story_that_tells(tiers=0, slots=4)
    story.store(keys_of(1))
    story.store(keys_of(3, b"n"), "fits")
    assert policy.asked == []
    story.store(keys_of(2, b"m"), "two too many")
    assert policy.asked == [2]


def test_a_policy_is_told_of_a_load_that_failed() -> None:
    story, policy = story_that_tells(slots=4)
    (key,) = keys_of(1)
    story.store([key])
    story.store(keys_of(4, b"n"), "other")
    story.facade.on_request_started("r")
    assert story.facade.lookup(key, "r") is None
    story.facade.step_end()
    assert key in policy.there
    story.answer_all(Outcome.FAILED)
    assert key not in policy.there
    assert key not in policy.held


def test_a_policy_is_told_of_what_was_called_off_before_it_was_sent() -> None:
    story, policy = story_that_tells(slots=4)
    (key,) = keys_of(1)
    story.store([key])
    story.store(keys_of(4, b"n"), "other")
    story.facade.on_request_started("r")
    assert story.facade.lookup(key, "r") is None
    assert key in policy.there
    story.facade.on_requests_scheduled(["r"])
    assert key not in policy.there


def test_a_policy_is_told_when_a_request_ends_and_in_which_order_it_used_its_keys() -> None:
    story, policy = story_that_tells(tiers=0)
    story.facade.on_request_started("r")
    story.facade.on_request_started("s")
    story.facade.on_request_finished("r", keys_of(2))
    story.facade.on_request_finished("s")
    story.facade.on_request_finished("unknown")
    assert policy.ended == [("r", tuple(keys_of(2))), ("s", None)]


def test_a_policy_is_told_the_time_about_once_a_second() -> None:
    story, policy = story_that_tells(tiers=0)
    for _ in range(40):
        story.now += 0.25
        story.facade.step_end()
    assert policy.times == [float(second) for second in range(1, 11)]


@pytest.mark.parametrize("use", ["offered", "touched", "loaded"])
def test_a_block_that_was_used_again_goes_after_one_that_was_not(use: str) -> None:
    old, young, new = keys_of(3)
    story = Story(tiers=0, slots=2)
    story.store([old], "first")
    story.store([young], "second")
    facade = story.facade
    facade.on_request_started("again")
    if use == "offered":
        grant = facade.prepare_store([old], "again")
        assert grant is not None
        assert grant.keys == []
    elif use == "touched":
        facade.touch([old], "again")
    else:
        assert facade.lookup(old, "again") is True
        facade.prepare_load([old], "again")
        facade.complete_load([old], "again")
    facade.on_request_finished("again")
    facade.step_end()
    facade.on_request_started("w")
    grant = facade.prepare_store([new], "w")
    assert grant is not None
    assert grant.evicted == [young]


def test_what_a_running_request_only_touches_goes_from_its_tail() -> None:
    """It has them on the GPU already, and so neither loads nor stores them here."""
    head, tail, new = keys_of(3)
    story = Story(tiers=0, slots=2)
    story.store([head, tail])
    facade = story.facade
    facade.on_request_started("runs")
    facade.touch([head, tail], "runs")
    facade.on_request_started("other")
    facade.touch([tail], "other")
    facade.on_request_started("w")
    grant = facade.prepare_store([new], "w")
    assert grant is not None
    assert grant.evicted == [tail]


def test_what_is_given_again_to_a_tier_that_wants_whole_requests_must_stay_meanwhile() -> None:
    story, policy = story_that_tells(slots=4, whole=True)
    (key,) = keys_of(1)
    story.store([key])
    assert policy.held == set()
    story.facade.on_request_started("again")
    story.facade.prepare_store([key], "again")
    assert policy.held == {key}
    story.answer_all()
    assert policy.held == set()


def test_a_leased_block_stays_though_its_policy_names_it() -> None:
    """A lease is the runtime's promise; a policy that lost count can't break it."""

    class Deaf(LRUPolicy):
        def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
            super().admit(keys, request, held=False)

    story = Story(slots=2, policy=Deaf)
    (key,) = keys_of(1)
    story.store([key])
    story.store(keys_of(2, b"n"), "other")
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    facade.step_end()
    story.answer_all()
    facade.on_request_started("w")
    grant = facade.prepare_store(keys_of(2, b"w"), "w")
    assert grant is not None
    assert len(grant.keys) == 1
    assert story.runtime.primary.slot_of(key) is not None


# --- what tiers are asked and given ---


def test_a_block_that_is_stored_meanwhile_is_asked_of_no_tier() -> None:
    story = Story(slots=4)
    stored, wanted = keys_of(2)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup_state(stored, "r") is BlockState.PROBING
    assert facade.lookup_state(wanted, "r") is BlockState.PROBING
    facade.on_request_started("w")
    assert facade.prepare_store([stored], "w") is not None
    assert facade.lookup_state(stored, "r") is BlockState.FILLING
    facade.step_end()
    (probe,) = story.answer_all(Outcome.ABSENT)
    assert probe.keys == (wanted,)


def test_what_a_tier_has_brought_is_given_to_none() -> None:
    """Neither back to it, nor to another that did not have it."""
    story = Story(slots=2, tiers=2)
    (key,) = keys_of(1)
    story.store([key])
    story.store(keys_of(2, b"n"), "other")
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    facade.step_end()
    assert [type(batch) for batch in story.answer_all()] == [d.LoadBatch]
    assert facade.lookup(key, "r") is True


def test_of_a_fill_that_failed_nothing_is_parked_for_tiers_that_want_whole_requests() -> None:
    story = Story(slots=4, whole=True)
    (key,) = keys_of(1)
    facade = story.facade
    facade.on_request_started("w")
    assert facade.prepare_store([key], "w") is not None
    facade.on_request_started("r")
    facade.prepare_store([key], "r")
    assert story.runtime.primary.audit().parked == {key}
    facade.complete_store([key], "w", success=False)
    assert story.runtime.primary.audit().parked == frozenset()


def test_a_link_that_breaks_is_asked_and_given_nothing_more() -> None:
    story = Story(slots=4, tiers=2)
    facade, cell = story.facade, story.runtime.cell
    cell.raises_faults = False
    (unknown,) = keys_of(1, b"u")
    facade.on_request_started("first", tiers=0b01)
    facade.on_request_started("both")
    assert facade.lookup_state(unknown, "first") is BlockState.PROBING
    assert facade.lookup_state(unknown, "both") is BlockState.PROBING
    facade.step_end()
    cell.break_down(story.runtime.engine.links[0])
    assert facade.lookup_state(unknown, "first") is BlockState.ABSENT, "nobody will answer"
    assert facade.lookup_state(unknown, "both") is BlockState.PROBING, "the other tier owes it"
    story.answer_all(Outcome.ABSENT)
    facade.on_request_started("w")
    grant = facade.prepare_store(keys_of(1), "w")
    assert grant is not None
    facade.complete_store(grant.keys, "w")
    cell.settle()
    assert story.runtime.tiers[0].batches == []
    assert [batch.keys for batch in story.runtime.tiers[1].batches] == [tuple(keys_of(1))]
    assert facade.statistics().primary.pinned_slots == 1
    story.answer_all()
    assert facade.statistics().primary.pinned_slots == 0, "the broken link keeps none"


# --- what ends when ---


def test_a_hit_protects_its_block_for_one_step() -> None:
    story = Story(tiers=0, slots=1)
    (key,) = keys_of(1)
    story.store([key])
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is True
    facade.on_request_started("w")
    assert facade.prepare_store(keys_of(1, b"w"), "w") is None
    facade.step_end()
    grant = facade.prepare_store(keys_of(1, b"w"), "w")
    assert grant is not None
    assert grant.evicted == [key]


@pytest.mark.parametrize("end", ["decided", "out of time", "reset"])
def test_a_request_may_reserve_a_prefix_again_once_its_reservation_has_ended(end: str) -> None:
    story = Story(slots=4, lease_timeout_s=5.0)
    keys = keys_of(2)
    story.store(keys)
    story.store(keys_of(4, b"n"), "other")
    facade = story.facade
    group = [GroupKeys(tuple(keys), (1, 2))]
    facade.on_request_started("r")
    assert facade.reserve_prefix(group, "r") == 2
    assert facade.reserve_prefix(group, "r") == 0, "it has one"
    facade.step_end()
    story.answer_all()
    if end == "decided":
        facade.on_requests_scheduled(["r"])
    elif end == "out of time":
        story.now += 5.0
        facade.step_end()
    else:
        facade.reset()
        facade.on_reset_flushed()
        for key in keys:
            facade.survey(key, "r")
        facade.step_end()
        story.answer_all()
    assert facade.reserve_prefix(group, "r") == 2


def test_a_request_that_has_ended_leaves_nothing_behind() -> None:
    """An engine serves millions."""
    story = Story(slots=4)
    known, unknown = keys_of(2)
    story.store([known])
    story.store(keys_of(4, b"n"), "other")
    facade = story.facade
    for name in ("r", "s"):
        facade.on_request_started(name)
        facade.lookup(known, name)
        facade.lookup(unknown, name)
        facade.step_end()
        facade.on_request_finished(name)
    story.answer_all()
    seen = story.runtime.primary.audit()
    assert seen.directory.requests == frozenset()
    assert seen.directory.waiters == {}
    assert seen.looked_up == {}
    assert seen.promotions.leases == {}
    assert facade.statistics().primary.requests == 0


# --- what is told and counted ---


def test_what_is_evicted_is_told_and_counted() -> None:
    story = Story(tiers=0, slots=4)
    story.store(keys_of(4))
    story.store(keys_of(3, b"n"), "other")
    removed = [
        key
        for event in story.facade.take_events()
        if event.kind is EventKind.REMOVED and event.tier == PRIMARY
        for key in event.keys
    ]
    assert sorted(removed) == keys_of(4)[1:]
    assert story.facade.statistics().primary.counts.evictions == 3


def test_each_slot_counts_as_what_it_is() -> None:
    story = Story(slots=8)
    facade = story.facade
    story.store(keys_of(3))
    facade.on_request_started("w")
    facade.prepare_store(keys_of(2, b"w"), "w")
    primary = facade.statistics().primary
    assert (primary.free_slots, primary.filling_from_gpu_slots, primary.ready_slots) == (3, 2, 3)
    facade.reset()
    primary = facade.statistics().primary
    assert (primary.free_slots, primary.quarantined_slots, primary.ready_slots) == (6, 2, 0)


def test_what_was_to_be_filled_and_never_was_is_told() -> None:
    """vLLM has described it when it was granted, and must learn that it will never go."""
    story = Story(tiers=0, slots=4)
    story.facade.on_request_started("w")
    story.facade.prepare_store(keys_of(2), "w")
    story.facade.complete_store(keys_of(2), "w", success=False)
    story.facade.prepare_store(keys_of(1), "w")
    events = [(event.kind, event.keys) for event in story.facade.take_events()]
    assert events == [(EventKind.LAPSED, tuple(keys_of(2)[1:]))], "the first is under way again"


def test_how_many_blocks_each_store_wants_is_observed() -> None:
    story = Story(tiers=0, slots=4)
    keys = keys_of(3)
    story.store(keys[:2])
    story.store(keys)
    story.store(keys)
    assert story.facade.drain_observations().allocation_sizes == [2, 1]


def test_each_reset_is_told_as_one_event_and_begins_an_epoch() -> None:
    story = Story(tiers=0)
    for number in (1, 2):
        story.facade.reset()
        assert story.facade.epoch == number
        events = story.facade.take_events()
        assert [(event.kind, event.tier) for event in events] == [(EventKind.CLEARED, PRIMARY)]
