"""What lookups answer and count, and what of it a reset forgets."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

import pytest

from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.tier.driver_messages import LoadBatch
from tests.unit.engine._story import (
    Story,
    keys_of,
    link_of,
    look_up,
    story_of_a_tier,
    tier_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ABSENT, PROBING = BlockState.ABSENT, BlockState.PROBING
FILLING, READY = BlockState.FILLING, BlockState.READY


# --- in one go ---


def test_keys_are_looked_up_in_one_go_up_to_the_first_that_is_nowhere() -> None:
    story = Story(tiers=0)
    keys = keys_of(3)
    story.store(keys[:1])
    story.store(keys[2:], "later")
    story.facade.on_request_started("r")
    assert story.facade.lookup_states(keys, "r") == [READY, ABSENT]
    assert story.facade.lookup_states(keys, "unknown") == []


def test_keys_looked_up_in_one_go_have_the_states_that_each_has_by_itself() -> None:
    story = Story(slots=8)
    stored, written, unknown = keys_of(2), keys_of(1, b"w"), keys_of(1, b"u")
    story.store(stored)
    story.grant(written)
    story.facade.on_request_started("r")
    states = story.facade.lookup_states([*stored, *written, *unknown], "r")
    assert states == [READY, READY, FILLING, PROBING]


def test_nothing_that_needs_room_is_looked_up_in_one_go() -> None:
    """The rest is asked for one by one: each may evict something."""
    story, keys = story_of_a_tier(2, slots=2)
    story.facade.on_request_started("r")
    assert story.facade.lookup_states(keys, "r") == []
    assert story.facade.lookup_state(keys[0], "r") is FILLING


# --- one by one ---


def test_a_promotion_that_the_reserve_has_no_room_for_is_refused_and_counted() -> None:
    story, keys = story_of_a_tier(3, slots=4, store_reserve_fraction=0.5)
    story.facade.on_request_started("r")
    states = [story.facade.lookup_state(key, "r") for key in keys]
    assert states == [FILLING, FILLING, ABSENT]
    assert story.primary.counts.promotions_refused == 1
    assert story.primary.promotion_slots == 2


def test_a_promotion_for_which_nothing_can_go_is_refused_and_counted() -> None:
    """All slots but the reserve may be promoted to, if only there were one."""
    story, (key,) = story_of_a_tier(slots=2)
    story.facade.on_request_started("r")
    story.facade.prepare_load(keys_of(2, b"n"), "r")
    assert story.facade.lookup_state(key, "r") is ABSENT
    assert story.primary.counts.promotions_refused == 1


@pytest.mark.parametrize("outcome", [None, Outcome.ABSENT, Outcome.FAILED])
def test_a_load_that_fails_leaves_no_lease_and_is_not_asked_for_again(
    outcome: Outcome | None,
) -> None:
    """None: it hangs. Else its slot is anybody's, while its request goes on."""
    story, (key,) = story_of_a_tier(slots=2)
    facade = story.facade
    facade.on_request_started("r")
    facade.lookup_state(key, "r")
    facade.step_end()
    if outcome is None:
        story.runtime.cell.settle()
        story.now += 1000.0
        facade.step_end()
    else:
        story.answer_all(outcome)
    assert story.primary.promotion_slots == 0
    assert facade.lookup_state(key, "r") is ABSENT
    assert story.runtime.primary.audit().promotions.leases == {}
    if outcome is not None:
        assert len(story.grant(keys_of(2, b"w")).keys) == 2


def test_completions_of_what_was_begun_and_what_was_not_are_told_apart() -> None:
    """No assertion of ours takes the engine down."""
    story = Story(tiers=0, slots=4)
    keys = keys_of(3)
    story.store(keys)
    facade = story.facade
    facade.on_request_started("r")
    facade.prepare_load(keys[:2], "r")
    facade.complete_load(keys, "r")
    assert story.primary.counts.unknown_completions == 1
    facade.complete_load(keys[:2], "r")
    assert story.primary.counts.unknown_completions == 3
    assert story.primary.pinned_slots == 0
    (new,) = story.grant(keys_of(1, b"w"), "r").keys
    facade.complete_store([new, *keys[:2], b"never"], "r")
    assert story.primary.counts.unknown_completions == 6
    assert facade.lookup(new, "r") is True
    facade.complete_store([new], "r", epoch=facade.epoch - 1)
    assert story.primary.counts.unknown_completions == 7


def test_a_request_that_never_began_is_told_what_is_here_and_asks_no_tier() -> None:
    story, (away,) = story_of_a_tier(slots=4)
    facade = story.facade
    (key,) = story.grant(keys_of(1, b"w")).keys
    assert facade.lookup_state(key, "unknown") is FILLING
    facade.complete_store([key], "w")
    story.answer_all()
    assert facade.lookup_state(key, "unknown") is READY
    assert facade.lookup_state(away, "unknown") is ABSENT
    assert story.step() == []


def test_where_no_step_ends_what_is_behind_a_gap_is_promoted_all_the_same() -> None:
    """A caller that only looks up gets an answer in time, too."""
    story, (known,) = story_of_a_tier(slots=4)
    unknown = b"u" + bytes(5)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup_state(unknown, "r") is PROBING
    assert facade.lookup_state(known, "r") is PROBING, "not before the one before it"
    for _ in range(2):
        story.now += 1.0
        assert facade.lookup_state(unknown, "r") is PROBING
    story.answer_all(Outcome.ABSENT)
    assert facade.lookup_state(unknown, "r") is ABSENT
    for _ in range(3):
        story.now += 1.0
        assert facade.lookup_state(known, "r") is FILLING
    story.answer_all()
    assert facade.lookup_state(known, "r") is READY


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
        (batch,) = story.step()
        assert len(batch.keys) == 3
    assert story.facade.lookup_prefix(keys, "r") == 3


def test_a_block_that_is_promoted_meanwhile_is_asked_of_no_tier() -> None:
    """One request may only use a tier of which nothing is known; another had no need to ask."""
    story = Story(slots=2, tiers=2)
    facade, (key,) = story.facade, keys_of(1)
    story.tell(wire.PresenceChanged((key,), (), 0))
    facade.on_request_started("second", tiers=0b10)
    assert facade.lookup_state(key, "second") is PROBING
    facade.on_request_started("any")
    assert facade.lookup_state(key, "any") is FILLING
    assert [type(batch) for batch in story.step()] == [LoadBatch]
    assert facade.lookup(key, "any") is True


def test_a_block_that_is_stored_meanwhile_is_asked_of_no_tier() -> None:
    story = Story(slots=4)
    stored, wanted = keys_of(2)
    story.facade.on_request_started("r")
    assert story.facade.lookup_states([stored, wanted], "r") == [PROBING] * 2
    story.grant([stored])
    assert story.facade.lookup_state(stored, "r") is FILLING
    assert [batch.keys for batch in story.step(Outcome.ABSENT)] == [(wanted,)]


# --- resets ---


def test_a_request_may_ask_a_tier_that_failed_it_before_a_reset() -> None:
    """What failed then was of the old epoch: a request that goes on is not cut off for good."""
    story, (key,) = story_of_a_tier(slots=2)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    story.step(Outcome.FAILED)
    assert facade.lookup_state(key, "r") is ABSENT, "the only tier has failed it"
    facade.reset()
    for state in (PROBING, FILLING, READY):
        assert facade.lookup_state(key, "r") is state
        story.step()


def test_a_reset_forgets_where_a_requests_blocks_came_from() -> None:
    """What is loaded after it came from somewhere else, which may be the GPU itself."""
    story, (key,) = story_of_a_tier(slots=2)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    story.step()
    assert facade.load_sources("r") == {key: 0}
    facade.reset()
    assert facade.load_sources("r") == {}
    facade.complete_store(story.grant([key], "r").keys, "r")
    assert facade.lookup(key, "r") is True
    assert facade.load_sources("r") == {}, "the GPU brought it"


def test_a_hit_from_before_a_reset_protects_nothing_after_it() -> None:
    """Its slot belongs to another block now, which may go in the same step."""
    story = Story(tiers=0, slots=1)
    first, second, third = keys_of(3)
    story.store([first])
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(first, "r") is True
    facade.reset()
    for key in (second, third):
        facade.complete_store(story.grant([key], "r").keys, "r")
    assert facade.lookup(third, "r") is True


def _looks_up(place: int) -> Callable[[Story], object]:
    def look_up(story: Story) -> None:
        story.facade.lookup_state(keys_of(2)[place], "r")
        story.facade.step_end()
        story.runtime.cell.settle()

    return look_up


MOVES: Final = (
    _looks_up(0),
    _looks_up(1),
    lambda story: story.facade.on_requests_scheduled(["r"]),
    lambda story: story.answer_all(Outcome.ABSENT),
    lambda story: look_up(story, keys_of(2)[1], "other"),
)


@pytest.mark.parametrize("request_scoped", [False, True])
def test_every_lookup_ends_whatever_its_request_did_before(request_scoped: bool) -> None:
    """A preempted request looks up again what it no longer waited for when it ran."""
    params = b"\x80" if request_scoped else b""
    for moves in product(MOVES, repeat=4):
        story = Story(backend_traits=BackendTraits(1, 1, request_scoped=request_scoped))
        story.facade.on_request_started("r", params=params)
        for move in moves:
            move(story)
        for key in keys_of(2):
            story.facade.lookup_state(key, "r")
        story.step(Outcome.ABSENT)
        story.step(Outcome.ABSENT)
        states = [story.facade.lookup_state(key, "r") for key in keys_of(2)]
        assert states == [BlockState.ABSENT] * 2, [MOVES.index(move) for move in moves]


def test_a_tier_that_takes_no_notices_keeps_none_of_requests_that_are_over() -> None:
    """It may do so for hours. Of those that run, it is notified once it takes them again."""
    story = Story(backend_traits=BackendTraits(1, 1, request_scoped=True))
    tier_of(story).is_full = True
    for number in range(20):
        story.facade.on_request_started(f"r{number}", params=b"\x80")
        story.facade.step_end()
    for number in range(19):
        story.facade.on_request_finished(f"r{number}")
    assert [each.request for each in link_of(story)._relay._unsent] == ["r19"]
    tier_of(story).is_full = False
    story.step()
    assert not link_of(story)._relay.has_unsent
