"""Counters only grow, whatever becomes of what they counted."""

from __future__ import annotations

import pytest

from tests.unit.engine.test_facade import Story, keys_of


def counted(story: Story) -> tuple[float, float]:
    """Return the primary tier's queries and hits."""
    counts = story.facade.statistics().primary.counts
    return counts.queries, counts.hits


@pytest.mark.parametrize("with_prefix", [True, False])
def test_a_hit_stays_one_though_its_request_is_preempted_and_misses_it_later(
    with_prefix: bool,
) -> None:
    """vLLM ends the engine for a counter that falls."""
    story = Story(tiers=0, slots=2)
    look = story.facade.lookup_prefix if with_prefix else lookup_each(story)
    keys = keys_of(2)
    story.store(keys)
    story.facade.on_request_started("r")
    assert look(keys, "r") == 2
    story.facade.prepare_load(keys, "r")
    assert counted(story) == (2, 2)
    story.facade.complete_load(keys, "r")
    story.facade.step_end()
    # It is preempted, and others take the room meanwhile.
    story.store(keys_of(2, b"n"), "other")
    assert look(keys, "r") == 0
    story.facade.on_request_finished("r")
    assert counted(story) == (2, 2)


@pytest.mark.parametrize("with_prefix", [True, False])
def test_a_miss_stays_one_though_the_block_is_there_later(with_prefix: bool) -> None:
    story = Story(tiers=0, slots=4)
    look = story.facade.lookup_prefix if with_prefix else lookup_each(story)
    keys = keys_of(2)
    story.facade.on_request_started("r")
    assert look(keys, "r") == 0
    story.store(keys, "other")
    assert look(keys, "r") == 2
    story.facade.prepare_load(keys, "r")
    assert counted(story) == (2, 1), "only the first of them was looked up before"
    story.facade.complete_load(keys, "r")
    story.facade.on_request_finished("r")
    assert counted(story) == (2, 1)


def lookup_each(story: Story):
    """Return what looks keys up one by one, up to the first miss."""

    def look(keys: list[bytes], request: str) -> int:
        for number, key in enumerate(keys):
            if not story.facade.lookup(key, request):
                return number
        return len(keys)

    return look
