"""Steps in which nothing is left to do: they cost next to nothing, and lose no time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.core import wire
from kvtier.engine.facade import TICK_S
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import (
    Story,
    cascade,
    counts_of,
    keys_of,
    link_of,
    promote,
    story_of_a_tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def delivers_in_a_step(story: Story) -> bool:
    """End a step soon after the last one; tell whether that delivers anything to an actor."""
    before = story.runtime.cell.activity
    story.let_pass(TICK_S / 10)
    assert link_of(story).audit().now == story.now
    return story.runtime.cell.activity != before


def comes_to_rest(story: Story) -> bool:
    return not all(delivers_in_a_step(story) for _ in range(4))


def test_a_step_of_a_runtime_at_rest_delivers_nothing_for_a_while() -> None:
    story, _ = story_of_a_tier()
    assert comes_to_rest(story)
    assert not delivers_in_a_step(story)
    story.now += TICK_S
    assert delivers_in_a_step(story)
    assert not delivers_in_a_step(story)


def test_the_ticks_of_a_runtime_at_rest_are_no_news() -> None:
    """Otherwise all metrics are exported ten times a second while an engine only decodes."""
    story, _ = story_of_a_tier()
    assert comes_to_rest(story)
    before, statistics = story.facade.activity, story.facade.statistics()
    for _ in range(20):
        story.let_pass(TICK_S)
    assert story.facade.activity == before
    assert story.facade.statistics() == statistics
    story.facade.on_request_started("r")
    assert story.facade.activity > before


def test_what_is_asked_or_comes_ends_the_rest() -> None:
    story, (key,) = story_of_a_tier()
    assert comes_to_rest(story)
    story.facade.touch([key], "other")
    assert delivers_in_a_step(story)
    assert comes_to_rest(story)
    story.facade.on_request_started("r")
    story.facade.lookup(key, "r")
    assert delivers_in_a_step(story)
    assert not comes_to_rest(story), "it is being loaded"


def test_what_requests_do_sends_a_tier_at_rest_no_tick() -> None:
    """It has nothing to do in time, and each Tick costs as much as the rest of the step."""
    story, (key,) = story_of_a_tier()
    link = link_of(story)
    received: list[wire.Tick] = []
    handle = link.handlers[wire.Tick]

    def receive(tick: wire.Tick) -> None:
        received.append(tick)
        handle(tick)

    story.let_pass(TICK_S)
    assert comes_to_rest(story)
    link.handlers[wire.Tick] = receive
    for name in "abc":
        story.facade.on_request_started(name)
        story.facade.touch([key], name)
        assert delivers_in_a_step(story)
    assert not received
    story.let_pass(TICK_S)
    assert [tick.now for tick in received] == [story.now]


def test_what_is_stored_after_a_rest_is_sent_at_the_time_of_the_last_step() -> None:
    """What a tier takes is measured from there."""
    story, _ = story_of_a_tier(slots=12)
    assert comes_to_rest(story)
    assert not delivers_in_a_step(story)
    cascade(story, keys_of(2, b"s"))
    (job,) = link_of(story)._stores
    assert job.started == story.now


def puts_off(story: Story, _key: bytes) -> None:
    cascade(story, keys_of(2, b"s"))
    story.answer_all(Outcome.FULL)
    assert counts_of(story).stores_deferred == 2


def pauses(story: Story, key: bytes) -> None:
    promote(story, key)
    story.answer_all(Outcome.FAILED)
    story.facade.on_request_finished("r")
    assert BreakerState.OPEN in link_of(story).audit().breakers.values()


def leases(story: Story, key: bytes) -> None:
    promote(story, key)
    story.answer_all()


def asks(story: Story, _key: bytes) -> None:
    story.facade.on_request_started("r")
    assert story.facade.lookup(b"nowhere000", "r") is None
    story.facade.step_end()


def test_what_ends_in_time_is_news() -> None:
    story, (key,) = story_of_a_tier(slots=12, lease_timeout_s=5.0)
    leases(story, key)
    assert not comes_to_rest(story)
    before, statistics = story.facade.activity, story.facade.statistics()
    story.let_pass(5.0)
    assert story.facade.statistics() != statistics
    assert story.facade.activity > before


@pytest.mark.parametrize("begin", [puts_off, pauses, promote, leases, asks, cascade])
def test_there_is_no_rest_while_time_matters(begin: Callable[[Story, object], None]) -> None:
    """Not while a tier is asked, loads or stores; is to be tried again; or a lease may run out."""
    story, (key,) = story_of_a_tier(slots=12, breaker_failures_max=1)
    assert comes_to_rest(story)
    begin(story, keys_of(2, b"s") if begin is cascade else key)
    assert not comes_to_rest(story)
    before = story.facade.activity
    story.let_pass(TICK_S)
    assert story.facade.activity > before
