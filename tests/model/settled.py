"""Which tiers have nothing more to say of what they have: then events must tell it exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import wire
from kvtier.core.generations import mark_of, unmarked

if TYPE_CHECKING:
    from world import World

    from kvtier.plugin_api.keys import Key


def knows_contents(world: World, number: int) -> bool:
    """Tell whether the tier's contents are known, and all it had to say has arrived."""
    tier = world.runtime.tiers[number]
    return (
        world.shape.tiers[number].capacity is not None
        and _has_said_all(world, number)
        and tier.bounded.audit().knows_generation
        and tier.bounded.audit().since == world.links[number].audit().since
        and not any(isinstance(job, wire.StoreJob) for job in world.at_tier[number].values())
    )


def knows_losses(world: World, number: int) -> bool:
    """Tell whether the tier, which others change too, has said all that it found to be gone."""
    return (
        world.shape.tiers[number].capacity is None
        and _has_said_all(world, number)
        and world.exact[number]
        and not world.at_tier[number]
    )


def there_or_taken(world: World, number: int) -> set[Key]:
    """Return what a shared tier has for the engine's weights, or lost without its knowing."""
    device = world.devices[number]
    keys = [key for key in device.blocks.keys() | device.taken if mark_of(key) == world.mark]
    return set(unmarked(keys, world.mark))


def _has_said_all(world: World, number: int) -> bool:
    tier = world.runtime.tiers[number]
    return (
        world.honest[number]
        and not world.dead[number]
        and not world.fenced[number]
        and number not in world.broken_links
        and not world.links[number].audit().untold
        and not tier.inbox.waiting
        and not any(each.waiting for each in tier.mailboxes)
    )
