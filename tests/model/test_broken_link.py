"""A link whose handler raised is our own fault: its tier is lost, and nothing else.

The state machine does not break links, since what a broken link knew (its
slots) is lost for good. These are the promises that hold all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from world import BLOCK_BYTES, PATHS, Shape, TierShape, World

from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.policies.eviction.lru import LRUPolicy

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key

KEY: Key = PATHS[0][0]


@pytest.fixture
def world() -> World:
    found = World(Shape(tiers=(TierShape(), TierShape())), LRUPolicy)
    found.facade.on_request_started("r")
    return found


def test_what_a_broken_link_was_asked_counts_as_a_miss(world: World) -> None:
    """Else the key stays PROBING for ever where another tier may be asked too."""
    assert world.facade.lookup(KEY, "r") is None
    world.facade.step_end()
    world.cell.break_down(world.links[0])
    world.cell.run()
    world.now += 10
    world.facade.step_end()
    assert world.facade.lookup(KEY, "r") is False


@pytest.mark.parametrize("ends_by_reset", [False, True])
def test_a_promotion_not_yet_sent_to_a_broken_link_is_called_off(
    world: World, ends_by_reset: bool
) -> None:
    """Its slot is free again, and the end of its request does not look for it."""
    world.runtime.tiers[0].inbox.post(wire.PresenceChanged(added=(KEY,), removed=()))
    world.cell.settle()
    assert world.facade.lookup_state(KEY, "r") is BlockState.FILLING
    world.cell.break_down(world.links[0])
    world.cell.run()
    assert world.state_of(KEY) is BlockState.ABSENT
    if ends_by_reset:
        world.facade.reset()
    world.facade.on_request_finished("r")
    world.facade.step_end()
    assert world.slots.free_count() == world.slots.count
    assert world.cell.faults == 1


def test_nothing_waits_for_a_broken_link(world: World) -> None:
    """An idle engine keeps stepping while work is pending: it would never idle again."""
    facade, link = world.facade, world.links[0]
    stored = PATHS[0][1]
    world.committed[world.name(stored)].add(bytes(BLOCK_BYTES))
    assert facade.prepare_store([stored], "r") is not None
    facade.complete_store([stored], "r")
    assert facade.lookup(KEY, "r") is None
    facade.step_end()
    assert link.in_flight() == (1, 0, 1)
    link.serves_others = link.write_backlog.has_deferred = True
    world.cell.break_down(link)
    world.runtime.tiers[1].inbox.post(wire.TierFenced())  # so that only the first has work left
    world.cell.settle()
    facade.step_end()
    assert (facade.get_finished(), facade.has_pending_work()) == (0, False)
    assert (link.is_at_rest, link.write_backlog.has_deferred) == (True, False)
    told = facade.statistics().tiers[0]
    assert (told.breaker, told.cascade_slots, told.counts.cascades_dropped) == ("DISABLED", 0, 1)
