"""What a tier that evicts is told of the use of its blocks, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import wire
from kvtier.engine.link.relays import SEND_S
from tests.unit.engine._story import Story, cascade, keys_of, link_of, tier_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.wire import Message


def hear(story: Story, note: Callable[[Message], None]) -> None:
    """Have what is posted to the tier noted."""
    story.runtime.cell.on_post = lambda mailbox, message: (
        note(message) if mailbox is tier_of(story).mailbox else None
    )


def test_uses_are_told_to_a_tier_that_evicts_and_to_no_other() -> None:
    story = Story()
    link = link_of(story)
    told: list[type] = []
    hear(story, lambda message: told.append(type(message)))
    for evicts in (False, True):
        link.tells_uses = evicts
        story.facade.on_request_started("r")
        story.facade.touch(keys_of(1), "r")
        story.facade.on_request_finished("r")
        story.let_pass(100.0)
        story.facade.step_end()
        assert told == ([wire.Tick, wire.TouchKeys, wire.RequestEnded] if evicts else [])


def test_uses_are_sent_before_what_may_evict_and_else_not_with_each_step() -> None:
    story = Story(slots=12)
    link_of(story).tells_uses = True
    told: list[type] = []
    hear(story, lambda message: told.append(type(message)))
    story.now += 100.0
    for _ in range(3):
        story.facade.touch(keys_of(1), "r")
        story.facade.step_end()
    assert told == [wire.Tick, wire.TouchKeys]
    story.facade.on_request_started("r")
    cascade(story, keys_of(2))
    assert told[2:] == [wire.TouchKeys, wire.TouchKeys, wire.StoreJob]
    story.facade.touch(keys_of(1), "r")
    story.facade.step_end()
    assert told[5:] == []
    story.let_pass(SEND_S)
    assert told[5:] == [wire.TouchKeys]


def test_a_tier_that_evicts_is_told_the_time_about_once_a_second() -> None:
    story = Story()
    link_of(story).tells_uses = True
    times: list[float] = []
    hear(
        story, lambda message: times.append(message.now) if isinstance(message, wire.Tick) else None
    )
    for _ in range(12):
        story.facade.touch(keys_of(1), "r")
        story.let_pass(0.25)
    assert times == [1.0, 2.0, 3.0]
