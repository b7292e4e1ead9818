"""What the primary tier makes of calls: for its policies, its tiers, and who watches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.tier import driver_messages as d
from tests.unit.engine._story import Story, keys_of, story_of_a_tier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class Attentive(LRUPolicy):
    """A policy that keeps what it heard.

    What is here and what of it must stay, it is told as the model checker wants it
    (``the_policy_knows_the_keys_that_have_slots_and_holds_those_in_use``).
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.times: list[float] = []
        self.ended: list[tuple[RequestId, Sequence[Key] | None]] = []
        self.asked: list[int] = []

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        self.asked.append(count)
        return super().choose_victims(count, exclude)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        self.ended.append((request, order))
        super().end_request(request, order)

    def pass_time(self, now: float) -> None:
        self.times.append(now)


def story_that_tells(**settings: object) -> tuple[Story, Attentive]:
    """Return a runtime without tiers, and the policy that hears all."""
    story = Story(policy=Attentive, tiers=0, **settings)
    policy = story.runtime.engine.policy.policy
    assert isinstance(policy, Attentive)
    return story, policy


# --- what an eviction policy is told ---


def test_a_policy_is_asked_for_as_many_victims_as_slots_are_missing() -> None:
    """And for none, where there is just the room: it would look through all that it has."""
    story, policy = story_that_tells(slots=4)
    story.store(keys_of(1))
    story.store(keys_of(3, b"n"), "fits")
    assert policy.asked == []
    story.store(keys_of(2, b"m"), "two too many")
    assert policy.asked == [2]


def test_a_policy_is_told_when_a_request_ends_and_in_which_order_it_used_its_keys() -> None:
    story, policy = story_that_tells()
    story.facade.on_request_started("r")
    story.facade.on_request_started("s")
    story.facade.on_request_finished("r", keys_of(2))
    story.facade.on_request_finished("s")
    story.facade.on_request_finished("unknown")
    assert policy.ended == [("r", tuple(keys_of(2))), ("s", None)]


def test_a_policy_is_told_the_time_about_once_a_second() -> None:
    story, policy = story_that_tells()
    for _ in range(40):
        story.let_pass(0.25)
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
        assert story.grant([old], "again").keys == []
    elif use == "touched":
        facade.touch([old], "again")
    else:
        facade.prepare_load([old], "again")
        facade.complete_load([old], "again")
    facade.on_request_finished("again")
    facade.step_end()
    assert story.grant([new]).evicted == [young]


def test_what_a_running_request_only_touches_goes_from_its_tail() -> None:
    """It has them on the GPU already, and so neither loads nor stores them here."""
    head, tail, new = keys_of(3)
    story = Story(tiers=0, slots=2)
    story.store([head, tail])
    story.facade.on_request_started("runs")
    story.facade.touch([head, tail], "runs")
    story.facade.on_request_started("other")
    story.facade.touch([tail], "other")
    assert story.grant([new]).evicted == [tail]


def test_a_leased_block_stays_though_its_policy_names_it() -> None:
    """A lease is the runtime's promise; a policy that lost count can't break it."""

    class Deaf(LRUPolicy):
        def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
            super().admit(keys, request, held=False)

    story, (key,) = story_of_a_tier(slots=2, policy=Deaf)
    story.facade.on_request_started("r")
    assert story.facade.lookup(key, "r") is None
    story.step()
    assert len(story.grant(keys_of(2, b"w")).keys) == 1
    assert story.runtime.primary.slot_of(key) is not None


# --- what tiers are given ---


def test_what_a_tier_has_brought_is_given_to_none() -> None:
    """Neither back to it, nor to another that did not have it."""
    story, (key,) = story_of_a_tier(slots=2, tiers=2)
    story.facade.on_request_started("r")
    assert story.facade.lookup(key, "r") is None
    assert [type(batch) for batch in story.step()] == [d.LoadBatch]
    assert story.facade.lookup(key, "r") is True


@pytest.mark.parametrize("end", ["success", "failure", "reset"])
def test_what_is_parked_for_tiers_that_want_whole_requests_ends_with_its_fill(end: str) -> None:
    """Else a tier would be given the block of that name that it has just brought itself."""
    story = Story(slots=4, whole=True)
    facade, (key,) = story.facade, keys_of(1)
    story.grant([key])
    facade.on_request_started("r")
    facade.prepare_store([key], "r")
    assert story.runtime.primary.audit().parked == {key}
    if end == "reset":
        facade.reset()
    else:
        facade.complete_store([key], "w", success=end == "success")
    assert story.runtime.primary.audit().parked == frozenset()
    assert len(story.answer_all()) == (end == "success")


# --- what is told and observed ---


def test_what_was_to_be_filled_and_never_was_is_told() -> None:
    """vLLM has described it when it was granted, and must learn that it will never go."""
    story = Story(tiers=0, slots=4)
    first, second = story.grant(keys_of(2)).keys
    story.facade.complete_store([first, second], "w", success=False)
    assert story.primary.free_slots == 4
    story.grant([first])
    events = [(event.kind, event.keys) for event in story.facade.take_events()]
    assert events == [(EventKind.LAPSED, (second,))], "the first is under way again"
    assert story.facade.lookup_state(second, "w") is BlockState.ABSENT


def test_how_many_blocks_each_store_wants_is_observed() -> None:
    story = Story(tiers=0, slots=4)
    keys = keys_of(3)
    story.store(keys[:2])
    story.store(keys)
    story.store(keys)
    assert story.facade.drain_observations().allocation_sizes == [2, 1]
