"""What events tell of a tier that others change too."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import Story, keys_of

STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED


class Events:
    """The events of a story's only tier, as they come."""

    def __init__(self, story: Story) -> None:
        self._story = story

    def new(self) -> list[tuple[EventKind, tuple[bytes, ...]]]:
        self._story.runtime.cell.settle()
        events = self._story.facade.take_events()
        return [(each.kind, each.keys) for each in events if each.tier == 0]


def story_of(keys: list[bytes]) -> tuple[Story, Events]:
    """Return a runtime whose tier alone has these blocks, which it has told of."""
    story = Story(slots=4)
    story.store(keys)
    story.store(keys_of(4, b"n"), "other")
    events = Events(story)
    assert events.new() == [(STORED, tuple(keys)), (STORED, tuple(keys_of(4, b"n")))]
    return story, events


def look_up(story: Story, key: bytes, request: str) -> BlockState:
    story.facade.on_request_started(request)
    state = story.facade.lookup_state(key, request)
    story.facade.step_end()
    return state


@pytest.mark.parametrize("outcome", [Outcome.ABSENT, Outcome.DAMAGED])
def test_a_block_that_a_load_finds_gone_is_told_as_removed(outcome: Outcome) -> None:
    """A router would send requests to where it was until the engine ends."""
    (key,) = keys_of(1)
    story, events = story_of([key])
    assert look_up(story, key, "r") is BlockState.FILLING
    story.answer_all(outcome)
    assert events.new() == [(REMOVED, (key,))]
    assert look_up(story, key, "s") is BlockState.PROBING, "and it is asked for again"


def test_a_load_given_up_that_finds_its_block_gone_tells_so_all_the_same() -> None:
    """The engine stores it meanwhile, and the tier still sees the damaged file of before."""
    (key,) = keys_of(1)
    story, events = story_of([key])
    assert look_up(story, key, "r") is BlockState.FILLING
    story.runtime.cell.settle()
    (load,) = story.runtime.tiers[0].batches
    story.now += 1000
    story.facade.step_end()
    story.facade.on_request_started("w")
    grant = story.facade.prepare_store([key], "w")
    assert grant is not None
    story.facade.complete_store(grant.keys, "w")
    story.runtime.cell.settle()
    store = next(e for e in story.runtime.tiers[0].batches if isinstance(e, m.StoreBatch))
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
