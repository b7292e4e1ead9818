"""A link whose handler raised is our own fault: its tier is lost, and nothing else.

The state machine does not break links, since what a broken link knew (its
slots) is lost for good. These are the promises that hold all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from world import PATHS, Shape, TierShape, World

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
