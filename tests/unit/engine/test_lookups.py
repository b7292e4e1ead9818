"""What lookups answer and count, and how what they reserve ends."""

from __future__ import annotations

import pytest

from kvtier.core.block_state import BlockState
from kvtier.plugin_api.backend import Outcome
from kvtier.tier.driver_messages import LoadBatch
from tests.unit.engine._story import Story, keys_of


def story_of_a_tier(keys: list[bytes], **settings: object) -> Story:
    """Return a runtime whose tier alone has some blocks."""
    story = Story(**settings)  # type: ignore[arg-type]
    story.store(keys)
    story.store(keys_of(story.runtime.primary.slots.count, b"n"), "other")
    return story


def test_keys_are_looked_up_in_one_go_up_to_the_first_that_is_nowhere() -> None:
    story = Story(tiers=0)
    keys = keys_of(3)
    story.store(keys[:1])
    story.store(keys[2:], "later")
    story.facade.on_request_started("r")
    assert story.facade.lookup_states(keys, "r") == [BlockState.READY, BlockState.ABSENT]
    assert story.facade.lookup_states(keys, "unknown") == []


def test_nothing_that_needs_room_is_looked_up_in_one_go() -> None:
    """The rest is asked for one by one: each may evict something."""
    keys = keys_of(2)
    story = story_of_a_tier(keys, slots=2)
    story.facade.on_request_started("r")
    assert story.facade.lookup_states(keys, "r") == []
    assert story.facade.lookup_state(keys[0], "r") is BlockState.FILLING


def test_a_promotion_that_the_reserve_has_no_room_for_is_refused_and_counted() -> None:
    keys = keys_of(3)
    story = story_of_a_tier(keys, slots=4, store_reserve_fraction=0.5)
    facade, counts = story.facade, story.runtime.primary.counts
    facade.on_request_started("r")
    assert [facade.lookup_state(key, "r") for key in keys] == [
        BlockState.FILLING,
        BlockState.FILLING,
        BlockState.ABSENT,
    ]
    assert counts.promotions_refused == 1
    assert facade.statistics().primary.promotion_slots == 2


def test_a_promotion_for_which_nothing_can_go_is_refused_and_counted() -> None:
    """All slots but the reserve may be promoted to, if only there were one."""
    (key,) = keys_of(1)
    story = story_of_a_tier([key], slots=2)
    facade, counts = story.facade, story.runtime.primary.counts
    facade.on_request_started("reads")
    held = keys_of(2, b"n")
    assert facade.lookup_prefix(held, "reads") == 2
    facade.prepare_load(held, "reads")
    facade.on_request_started("r")
    assert facade.lookup_state(key, "r") is BlockState.ABSENT
    assert counts.promotions_refused == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_not_sent_yet_ends_with_the_decision(is_known: bool) -> None:
    """Promise 16: neither a probe nor a load is sent for a request that runs without it."""
    (key,) = keys_of(1, b"k" if is_known else b"u")
    story = story_of_a_tier(keys_of(1), slots=2)
    facade = story.facade
    facade.on_request_started("r")
    state = BlockState.FILLING if is_known else BlockState.PROBING
    assert facade.lookup_state(key, "r") is state
    facade.on_requests_scheduled(["r", "unknown"])
    facade.step_end()
    assert story.answer_all() == []
    primary = facade.statistics().primary
    assert (primary.promotion_slots, primary.filling_from_tiers_slots) == (0, 0)
    assert primary.free_slots + primary.ready_slots == 2
    assert facade.lookup_state(key, "r") is state, "it may ask again"


@pytest.mark.parametrize("hangs", [True, False])
def test_a_load_that_fails_leaves_no_lease_and_is_not_asked_for_again(hangs: bool) -> None:
    (key,) = keys_of(1)
    story = story_of_a_tier([key], slots=4)
    facade = story.facade
    facade.on_request_started("r")
    facade.lookup_state(key, "r")
    facade.step_end()
    if hangs:
        story.runtime.cell.settle()
        story.now += 1000.0
        facade.step_end()
    else:
        story.answer_all(Outcome.ABSENT)
    assert facade.statistics().primary.promotion_slots == 0
    assert facade.lookup_state(key, "r") is BlockState.ABSENT
    facade.on_request_finished("r")
    assert story.runtime.primary.audit().promotions.leases == {}


def test_completions_of_what_was_begun_and_what_was_not_are_told_apart() -> None:
    story = Story(tiers=0, slots=4)
    keys = keys_of(3)
    story.store(keys)
    facade, counts = story.facade, story.runtime.primary.counts
    facade.on_request_started("r")
    facade.lookup_prefix(keys, "r")
    facade.prepare_load(keys[:2], "r")
    facade.complete_load(keys, "r")
    assert counts.unknown_completions == 1
    assert facade.statistics().primary.pinned_slots == 0
    grant = facade.prepare_store(keys_of(1, b"w"), "r")
    assert grant is not None
    facade.complete_store([*grant.keys, *keys[:2]], "r")
    assert counts.unknown_completions == 3
    assert facade.lookup(grant.keys[0], "r") is True


def test_what_was_not_sent_to_a_link_that_breaks_is_given_up_and_no_more() -> None:
    keys = keys_of(2)
    story = story_of_a_tier(keys, slots=8, tiers=2)
    facade = story.facade
    for name, key, tiers in (("first", keys[0], 0b01), ("second", keys[1], 0b10)):
        facade.on_request_started(name, tiers=tiers)
        assert facade.lookup_state(key, name) is BlockState.FILLING
    story.runtime.cell.raises_faults = False
    story.runtime.cell.break_down(story.runtime.engine.links[0])
    assert facade.lookup_state(keys[0], "first") is BlockState.ABSENT
    primary = facade.statistics().primary
    assert (primary.promotion_slots, primary.quarantined_slots) == (1, 0), "nothing writes there"
    facade.step_end()
    story.answer_all()
    assert facade.lookup(keys[1], "second") is True


def test_a_lease_that_ends_frees_nothing_that_somebody_reads() -> None:
    """The eviction policy is told of what may go, and of nothing else."""
    keys = keys_of(2)
    story = story_of_a_tier(keys, slots=8)
    facade = story.facade
    facade.on_request_started("r")
    for key in keys:
        facade.lookup_state(key, "r")
    facade.step_end()
    story.answer_all()
    facade.on_request_started("reads")
    assert facade.lookup(keys[0], "reads") is True
    facade.prepare_load(keys[:1], "reads")
    facade.step_end()
    policy = story.runtime.engine.policy.policy
    assert set(policy._held) == set(keys)
    facade.on_request_finished("r")
    story.runtime.cell.settle()
    assert set(policy._held) == {keys[0]}
    facade.complete_load(keys[:1], "reads")
    story.runtime.cell.settle()
    assert set(policy._held) == set()


def test_a_hit_that_was_looked_up_by_itself_holds_until_the_step_ends() -> None:
    """Promise 5 again: the store of another request in the same step takes another block."""
    story = Story(tiers=0, slots=2)
    old, young = keys_of(2)
    story.store([old], "first")
    story.store([young], "second")
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(old, "r") is True
    facade.on_request_started("w")
    grant = facade.prepare_store(keys_of(2, b"w"), "w")
    assert grant is not None
    assert grant.evicted == [young]
    assert len(facade.prepare_load([old], "r")) == 1


def test_a_request_that_never_began_is_told_what_is_here_and_asks_no_tier() -> None:
    story = story_of_a_tier(keys_of(1), slots=4)
    facade = story.facade
    facade.on_request_started("w")
    grant = facade.prepare_store(keys_of(1, b"w"), "w")
    assert grant is not None
    assert facade.lookup_state(grant.keys[0], "unknown") is BlockState.FILLING
    facade.complete_store(grant.keys, "w")
    story.answer_all()
    assert facade.lookup_state(grant.keys[0], "unknown") is BlockState.READY
    assert facade.lookup_state(keys_of(1)[0], "unknown") is BlockState.ABSENT
    facade.step_end()
    assert story.answer_all() == []


def test_keys_looked_up_in_one_go_have_the_states_that_each_has_by_itself() -> None:
    story = Story(slots=8)
    facade = story.facade
    stored, written, unknown = keys_of(2), keys_of(1, b"w"), keys_of(1, b"u")
    story.store(stored)
    facade.on_request_started("w")
    grant = facade.prepare_store(written, "w")
    assert grant is not None
    facade.on_request_started("r")
    assert facade.lookup_states([*stored, *written, *unknown], "r") == [
        BlockState.READY,
        BlockState.READY,
        BlockState.FILLING,
        BlockState.PROBING,
    ]


def test_where_no_step_ends_what_is_behind_a_gap_is_promoted_all_the_same() -> None:
    """Promise 6: a caller that only looks up gets an answer in time, too."""
    (known,) = keys_of(1)
    (unknown,) = keys_of(1, b"u")
    story = story_of_a_tier([known], slots=4)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup_state(unknown, "r") is BlockState.PROBING
    assert facade.lookup_state(known, "r") is BlockState.PROBING, "not before the one before it"
    for _ in range(2):
        story.now += 1.0
        assert facade.lookup_state(unknown, "r") is BlockState.PROBING
    story.answer_all(Outcome.ABSENT)
    assert facade.lookup_state(unknown, "r") is BlockState.ABSENT
    for _ in range(3):
        story.now += 1.0
        assert facade.lookup_state(known, "r") is BlockState.FILLING
    story.answer_all()
    assert facade.lookup_state(known, "r") is BlockState.READY


def test_what_a_slow_step_asks_for_goes_together() -> None:
    """A tier may bring a request no more than what it is asked for first."""
    story = Story()
    keys = keys_of(3)
    story.facade.step_end()
    story.facade.on_request_started("r")
    for _ in range(2):  # it asks what is there, and then for that
        story.now += 1.0  # since the step before
        assert story.facade.lookup(keys[0], "r") is None
        story.facade.lookup_states(keys[1:], "r")
        story.facade.step_end()
        (batch,) = story.answer_all()
        assert len(batch.keys) == 3
    assert story.facade.lookup_prefix(keys, "r") == 3


def test_a_block_that_is_promoted_meanwhile_is_asked_of_no_tier() -> None:
    """One request may only use a tier of which nothing is known; another had no need to ask."""
    story = Story(slots=2, tiers=2)
    facade, runtime = story.facade, story.runtime
    (key,) = keys_of(1)
    facade.on_request_started("w")
    grant = facade.prepare_store([key], "w")
    assert grant is not None
    facade.complete_store(grant.keys, "w")
    facade.on_request_finished("w")
    runtime.cell.settle()
    for tier, outcome in zip(runtime.tiers, (Outcome.DONE, Outcome.FAILED), strict=True):
        tier.answer(tier.batches[0], [outcome])
    runtime.cell.settle()
    story.store(keys_of(2, b"n"), "other")
    facade.on_request_started("second", tiers=0b10)
    assert facade.lookup_state(key, "second") is BlockState.PROBING
    facade.on_request_started("any")
    assert facade.lookup_state(key, "any") is BlockState.FILLING
    facade.step_end()
    assert [type(batch) for batch in story.answer_all()] == [LoadBatch]
    assert facade.lookup(key, "any") is True
