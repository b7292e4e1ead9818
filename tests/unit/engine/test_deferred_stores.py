"""What a tier can't take now is deferred, and comes back; nothing is sent behind a hole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core import messages as m
from kvtier.core.messages import RequestOrder
from kvtier.engine.primary.cascades import DeferredBlock, MissingPrefixes
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import Story, cascade, counts_of, keys_of, link_of, tier_of

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key

HALF: dict[str, Any] = {"slots": 8, "cascade_slots_fraction_max": 0.5, "job_blocks_max": 8}


def stored(story: Story, outcome: Outcome = Outcome.DONE) -> list[Key]:
    """Have the tier answer all that it is asked; return the keys, in the order of the calls."""
    return [key for batch in story.answer_all(outcome) for key in batch.keys]


def store_more(story: Story, keys: list[Key], *, success: bool = True, **told: Any) -> None:
    """Have the GPU store blocks of a request that runs."""
    story.facade.complete_store(story.grant(keys, "r", **told).keys, "r", success=success)


def holes(story: Story) -> frozenset[Key]:
    return story.runtime.primary.audit().holes[0]


# --- what is deferred ---


@pytest.mark.parametrize("order", [1, -1])
def test_what_comes_behind_something_that_waits_is_deferred_whatever_completes_first(
    order: int,
) -> None:
    """The GPU's stores end in any order: the last block follows on one that follows on a hole."""
    story, keys = Story(**HALF), keys_of(8)
    story.facade.on_request_started("r")
    store_more(story, keys[:6], order=RequestOrder(0, tuple(keys)))
    story.facade.complete_store(story.grant(keys[6:], "r").keys[::order], "r")
    assert holes(story) == set(keys[4:])
    assert stored(story) == keys
    assert holes(story) == frozenset()
    counts = counts_of(story)
    assert (counts.stores_deferred, counts.cascades_dropped) == (2, 0)
    assert story.primary.pinned_slots == 0


def test_a_lost_block_that_comes_again_is_no_hole_for_those_that_come_with_it() -> None:
    story, keys = Story(**HALF), keys_of(4)
    story.facade.on_request_started("r")
    store_more(story, keys[:1], success=False, order=RequestOrder(0, tuple(keys)))
    assert holes(story) == set(keys[:1])
    story.facade.complete_store(story.grant(keys, "r").keys[::-1], "r")
    assert holes(story) == set()
    assert stored(story) == keys


def test_another_request_is_not_held_up_by_a_hole() -> None:
    story = Story(**{**HALF, "slots": 16})
    keys, other = keys_of(10), keys_of(3, b"o")
    cascade(story, keys)
    story.runtime.cell.settle()
    tier = tier_of(story)
    tier.answer(tier.batches[0], [Outcome.FAILED] * 8)  # waits for a second now
    story.runtime.cell.settle()
    cascade(story, other, "o")
    assert stored(story) == other
    assert holes(story) == set(keys)


def test_what_left_host_memory_while_it_was_deferred_is_dropped_with_what_follows_on_it() -> None:
    story, keys = Story(slots=4, breaker_failures_max=100), keys_of(3)
    cascade(story, keys)
    story.facade.on_request_finished("w", keys)
    assert stored(story, Outcome.FAILED) == keys
    primary = story.runtime.primary
    cascade(story, keys_of(2, b"n"), "n")  # which evicts
    gone = [key for key in keys if primary.slot_of(key) is None]
    assert gone == keys[2:], "tails go first"
    assert stored(story) == keys_of(2, b"n")
    story.pass_time(1.1)
    assert stored(story) == keys[:2]
    assert counts_of(story).cascades_dropped == 1
    # It is computed anew, and stored: its tail is not lost for good.
    cascade(story, keys[2:], "again")
    assert stored(story) == keys[2:]
    assert holes(story) == frozenset()


def fill_host_memory(story: Story, keys: list[Key]) -> None:
    """Have a request store 16 blocks of its prompt, of which its tier takes 8 for now."""
    story.facade.on_request_started("r")
    for first in range(0, 16, 4):
        store_more(story, keys[first : first + 4], order=RequestOrder(0, tuple(keys)))
    assert holes(story) == set(keys[8:16])


def test_a_prompt_longer_than_host_memory_evicts_nothing_that_its_tier_has_yet_to_get() -> None:
    story, keys = Story(**{**HALF, "slots": 16}), keys_of(32)
    fill_host_memory(story, keys)
    assert story.facade.prepare_store(keys[16:20], "r") is None, "it is offered again later"
    written = stored(story)
    for first in range(16, 32, 4):
        store_more(story, keys[first : first + 4])
        written += stored(story)
    assert written == keys


def test_that_holds_up_no_other_request() -> None:
    story, keys = Story(**{**HALF, "slots": 16}), keys_of(32)
    fill_host_memory(story, keys)
    other = keys_of(2, b"o")
    cascade(story, other, "o")
    assert stored(story) == [*keys[:14], *other]
    story.pass_time(0.1)
    assert counts_of(story).cascades_dropped == 2


def test_nothing_is_written_behind_a_block_that_is_lost() -> None:
    story, keys = Story(slots=4, breaker_failures_max=100), keys_of(6)
    story.facade.on_request_started("r")
    store_more(story, keys[:1], order=RequestOrder(0, tuple(keys)))
    assert stored(story) == keys[:1]
    store_more(story, keys[1:2], success=False)
    store_more(story, keys[2:4])
    assert stored(story) == []
    story.pass_time(3.0)
    assert stored(story) == []
    assert holes(story) == set(keys[1:4])
    assert story.primary.pinned_slots == 0


def test_a_hole_is_none_once_the_tier_is_known_to_have_the_block() -> None:
    """Somebody else may have stored it there."""
    story, keys = Story(slots=8), keys_of(4)
    story.facade.on_request_started("r")
    store_more(story, keys[:1], success=False, order=RequestOrder(0, tuple(keys)))
    primary, since = story.runtime.primary, link_of(story).audit().since
    primary.receive(m.PresenceLearned(0, (keys[0],), (), since))
    store_more(story, keys[1:])
    assert stored(story) == keys[1:]


def test_a_model_with_windows_has_no_holes_to_stop_at() -> None:
    """There a block may be of use without those before it."""
    story, keys = Story(slots=8, breaker_failures_max=100), keys_of(3)
    story.facade.on_request_started("r")
    order = RequestOrder(0, tuple(keys))
    store_more(story, keys[:1], success=False, order=order, cuts=[1])
    store_more(story, keys[1:])
    assert stored(story) == keys[1:]


# --- when it comes back ---


def test_what_a_tier_did_not_take_is_stored_again_after_a_second() -> None:
    story, keys = Story(slots=8, breaker_failures_max=100), keys_of(3)
    cascade(story, keys)
    story.runtime.cell.settle()
    tier = tier_of(story)
    tier.answer(tier.batches[0], [Outcome.DONE, Outcome.FAILED, Outcome.DONE])
    story.runtime.cell.settle()
    assert counts_of(story).stores_deferred == 1
    story.pass_time(0.9)
    assert stored(story) == []
    story.pass_time(0.2)
    assert stored(story) == keys[1:2]


def test_a_breaker_that_closes_again_gets_what_it_missed() -> None:
    story, keys = Story(slots=8, breaker_failures_max=1, breaker_pause_s=1.0), keys_of(3)
    cascade(story, keys[:1])
    assert stored(story, Outcome.FAILED) == keys[:1]
    cascade(story, keys[1:], "later")
    assert stored(story) == []
    story.pass_time(1.1)
    written = stored(story)
    story.pass_time(1.1)
    assert [*written, *stored(story)] == keys
    assert link_of(story).statistics().breakers["stores"] == "CLOSED"


def test_a_full_mailbox_is_tried_again_after_a_second() -> None:
    story, keys = Story(slots=8, breaker_failures_max=100), keys_of(2)
    tier_of(story).is_full = True
    cascade(story, keys)
    story.pass_time(0.5)
    assert counts_of(story).stores_deferred == 2, "it is not tried all the time"
    tier_of(story).is_full = False
    story.pass_time(1.0)
    assert stored(story) == keys


# --- the books of one tier ---


def test_a_tail_that_came_first_waits_for_its_head() -> None:
    holes = MissingPrefixes(8, lambda _: False)
    head, tail = keys_of(2)
    for key, before in ((tail, head), (head, None)):
        holes.defer(key, DeferredBlock("r", before, is_admitted=True))
    assert [*holes.pop(9)[0]] == [head]
    assert [*holes.pop(9)[0]] == [tail]
    assert holes.pop(9) == ({}, 0)


def test_the_oldest_of_what_is_lost_are_forgotten() -> None:
    holes = MissingPrefixes(4, lambda _: False)
    keys = keys_of(9)
    for key in keys:
        holes.lose([key])
    assert holes.audit() == set(keys[-4:])


# --- what is for no tier ---


def test_a_block_that_is_kept_is_given_to_no_tier_and_what_has_its_name_later_is() -> None:
    """It is kept for as long as it is in host memory, whoever offers it again."""
    story, keys = Story(tiers=2, whole=True), keys_of(4)
    story.facade.on_request_started("r")
    story.facade.complete_store(story.grant(keys, "r").keys, "r", kept=keys[2:])
    story.facade.prepare_store(keys, "r")
    assert set(stored(story)) == set(keys[:2])
    assert set(keys) <= set(story.runtime.primary.resident())
    story.facade.on_request_finished("r")
    story.store(keys_of(8, b"other"))
    assert not set(keys) & set(story.runtime.primary.resident())
    cascade(story, keys[2:], "s")
    assert set(stored(story)) == set(keys[2:])
