"""What a reset of the primary tier forgets, of requests that go on as well."""

from __future__ import annotations

from kvtier.core.block_state import BlockState
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import Story, keys_of


def story_with_a_block_in_its_tier() -> tuple[Story, bytes]:
    """Return a runtime whose tier alone has a block, and that block's key."""
    story = Story(slots=2)
    (key,) = keys_of(1)
    story.store([key])
    story.store(keys_of(2, b"n"), "other")
    return story, key


def test_a_request_may_ask_a_tier_that_failed_it_before_a_reset() -> None:
    """What failed then was of the old epoch: a request that goes on is not cut off for good."""
    story, key = story_with_a_block_in_its_tier()
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    facade.step_end()
    story.answer_all(Outcome.FAILED)
    assert facade.lookup_state(key, "r") is BlockState.ABSENT, "the only tier has failed it"
    facade.reset()
    assert facade.lookup_state(key, "r") is BlockState.PROBING
    facade.step_end()
    story.answer_all()
    assert facade.lookup_state(key, "r") is BlockState.FILLING
    facade.step_end()
    story.answer_all()
    assert facade.lookup(key, "r") is True


def test_a_reset_forgets_where_a_requests_blocks_came_from() -> None:
    """What is loaded after it came from somewhere else, which may be the GPU itself."""
    story, key = story_with_a_block_in_its_tier()
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    facade.step_end()
    story.answer_all()
    assert facade.load_sources("r") == {key: 0}
    facade.reset()
    assert facade.load_sources("r") == {}
    grant = facade.prepare_store([key], "r")
    assert grant is not None
    facade.complete_store(grant.keys, "r", epoch=grant.epoch)
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
        grant = facade.prepare_store([key], "r")
        assert grant is not None, "a block that nobody looked up has to go"
        facade.complete_store(grant.keys, "r")
    assert facade.lookup(third, "r") is True


def test_a_reset_forgets_what_was_to_be_given_on_once_it_is_filled() -> None:
    """Else a tier would be given the block of that name that it has just brought itself."""
    story = Story(slots=2, whole=True)
    (key,) = keys_of(1)
    facade = story.facade
    facade.on_request_started("w")
    assert facade.prepare_store([key], "w") is not None
    facade.on_request_started("r")
    facade.prepare_store([key], "r")
    facade.reset()
    assert story.runtime.primary.audit().parked == frozenset()
