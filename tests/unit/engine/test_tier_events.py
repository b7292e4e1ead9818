"""What events tell of a tier that others change too."""

from __future__ import annotations

import pytest

from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.engine.link.presence_feed import GONE_A_STEP
from kvtier.plugin_api.backend import Outcome
from kvtier.tier import driver_messages as d
from tests.unit.engine._story import Story, cascade, keys_of, look_up, story_of_a_tier

STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED


class Events:
    """The events of a story's only tier, as they come."""

    def __init__(self, story: Story) -> None:
        self._story = story

    def new(self) -> list[tuple[EventKind, tuple[bytes, ...]]]:
        self._story.runtime.cell.settle()
        events = self._story.facade.take_events()
        return [(each.kind, each.keys) for each in events if each.tier == 0]


def story_with_a_block() -> tuple[Story, bytes, Events]:
    """Return a runtime whose tier alone has a block, which it has told of."""
    story, (key,) = story_of_a_tier(slots=4)
    events = Events(story)
    assert events.new() == [(STORED, (key,)), (STORED, tuple(keys_of(4, b"n")))]
    return story, key, events


@pytest.mark.parametrize("outcome", [Outcome.ABSENT, Outcome.DAMAGED])
def test_a_block_that_a_load_finds_gone_is_told_as_removed(outcome: Outcome) -> None:
    """A router would send requests to where it was until the engine ends."""
    story, key, events = story_with_a_block()
    assert look_up(story, key, "r") is BlockState.FILLING
    story.answer_all(outcome)
    assert events.new() == [(REMOVED, (key,))]
    assert look_up(story, key, "s") is BlockState.PROBING, "and it is asked for again"


def test_a_load_given_up_that_finds_its_block_gone_tells_so_all_the_same() -> None:
    """The engine stores it meanwhile, and the tier still sees the damaged file of before."""
    story, key, events = story_with_a_block()
    assert look_up(story, key, "r") is BlockState.FILLING
    story.runtime.cell.settle()
    (load,) = story.runtime.tiers[0].batches
    story.let_pass(1000)
    cascade(story, [key])
    story.runtime.cell.settle()
    store = next(e for e in story.runtime.tiers[0].batches if isinstance(e, d.StoreBatch))
    story.runtime.tiers[0].answer(load, [Outcome.DAMAGED])
    story.runtime.cell.settle()
    story.runtime.tiers[0].answer(store, [Outcome.DONE])
    told = set()
    for kind, keys in events.new():
        told = told | set(keys) if kind is STORED else told - set(keys)
    assert key not in told


def test_a_block_that_is_asked_for_in_vain_is_told_as_removed_if_it_was_told_before() -> None:
    here, never = keys_of(2)
    story = Story(slots=4)
    events = Events(story)
    look_up(story, here, "r")
    story.answer_all()
    assert events.new() == [(STORED, (here,))]
    for key in (here, never):
        look_up(story, key, f"of {key!r}")
        story.answer_all(Outcome.ABSENT)
    assert events.new() == [(REMOVED, (here,))]


def test_what_is_found_again_and_again_is_told_once_in_each_generation() -> None:
    (key,) = keys_of(1)
    story = Story(slots=4, on_reset="new_generation")
    events = Events(story)
    for request in ("r", "s"):
        assert look_up(story, key, request) is BlockState.PROBING
        story.answer_all()
        story.facade.on_request_finished(request)
    assert events.new() == [(STORED, (key,))]
    story.facade.reset()
    look_up(story, key, "t")
    story.answer_all()
    assert events.new() == [(CLEARED, ()), (STORED, (key,))]


A_MESSAGE = 512


def burst(story: Story, keys: list[bytes], *, gone: bool) -> None:
    """Have the tier tell of many blocks at once, some of them a message."""
    link = story.runtime.engine.links[0]
    for start in range(0, len(keys), A_MESSAGE):
        some = tuple(keys[start : start + A_MESSAGE])
        link.receive(
            wire.PresenceChanged((), some, 0) if gone else wire.PresenceChanged(some, (), 0)
        )


def steps_of(story: Story) -> list[list[tuple[EventKind, tuple[bytes, ...]]]]:
    """Step for as long as there is something to step for; return what each step told."""
    events, told = Events(story), []
    while story.facade.has_pending_work():
        story.facade.step_end()
        told.append(events.new())
    return told


def found_after(told: list[tuple[EventKind, tuple[bytes, ...]]]) -> set[bytes]:
    found: set[bytes] = set()
    for kind, keys in told:
        found = found | set(keys) if kind is STORED else found - set(keys)
    return found


def story_of_a_burst(count: int) -> tuple[Story, list[bytes], Events]:
    """Return a runtime whose tier tells of all that it has: many blocks."""
    story = Story(slots=4)
    keys = [number.to_bytes(4, "big") + bytes(4) for number in range(count)]
    burst(story, keys, gone=False)
    story.facade.step_end()
    events = Events(story)
    assert found_after(events.new()) == set(keys)
    return story, keys, events


def test_many_blocks_that_go_at_once_leave_over_some_steps() -> None:
    """The engine learnt of 200,000 in one step, and its requests waited for that."""
    story, keys, events = story_of_a_burst(3 * GONE_A_STEP)
    burst(story, keys, gone=True)
    told = [events.new(), *steps_of(story)]
    counts = [sum(len(gone) for _, gone in each) for each in told]
    assert max(counts) <= GONE_A_STEP + A_MESSAGE
    assert sum(counts) == len(keys)
    assert len(counts) > 2
    assert not story.runtime.primary.audit().directory.known


def test_an_answer_that_comes_while_losses_wait_is_told_behind_them() -> None:
    """Somebody else has stored the block again meanwhile: a router would never find it there."""
    story = Story(slots=4)
    events = Events(story)
    keys = [number.to_bytes(4, "big") + bytes(4) for number in range(4 * GONE_A_STEP)]
    burst(story, keys, gone=False)
    story.facade.step_end()
    told = events.new()
    last = keys[-1]
    burst(story, keys, gone=True)
    story.runtime.primary._directory.forget_all()  # as it may: it keeps so many keys
    assert look_up(story, last, "r") is BlockState.PROBING
    story.answer_all()
    told += events.new() + [each for step in steps_of(story) for each in step]
    assert last in found_after(told)


def test_a_lost_tier_leaves_no_losses_to_tell() -> None:
    story, keys, events = story_of_a_burst(3 * GONE_A_STEP)
    burst(story, keys, gone=True)
    story.runtime.engine.links[0].receive(wire.TierFenced())
    assert events.new()[-1] == (CLEARED, ())
    assert steps_of(story) == []
