"""Chooses what a tier's cell runs in, and makes it: a thread, or a process of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.registry import backend_class, make_backend, make_policy
from kvtier.tier_process import TierProcess
from kvtier.tier_thread import TierThread

if TYPE_CHECKING:
    from kvtier.actor import Mailbox
    from kvtier.backend import BackendContext
    from kvtier.config import TierConfig
    from kvtier.memory import SlotMemory
    from kvtier.tier_cell import TierHost


def make_host(
    tier: TierConfig,
    context: BackendContext,
    memory: SlotMemory,
    link: Mailbox,
    *,
    messages_max: int,
) -> TierHost:
    """Make a tier's backend, and what runs it. Raises ``ConfigError``; nothing runs then.

    A cell runs where the configuration says, else where its backend prefers;
    in a thread in any case if no other process can map the memory.
    """
    if runs_in_process(tier, memory):
        host = TierProcess(tier, context, memory, link, messages_max=messages_max)
        capacity = host.traits.capacity_blocks
        try:
            if capacity is not None:
                make_policy(tier.eviction_policy, capacity)  # refused here, at the door
        except BaseException:
            host.close(0.0)
            raise
        return host
    make = partial(make_backend, tier, context)
    backend = make()
    policy = None
    if backend.traits.capacity_blocks is not None:
        policy = partial(make_policy, tier.eviction_policy, backend.traits.capacity_blocks)
        policy()  # as above
    return TierThread(
        tier.name,
        backend,
        memory,
        link,
        messages_max=messages_max,
        make_backend=make,
        make_policy=policy,
    )


def runs_in_process(tier: TierConfig, memory: SlotMemory) -> bool:
    """Tell whether the tier gets a process of its own. Raises ``ConfigError`` if it can't."""
    if memory.descriptor is None and tier.cell == "process":
        raise ConfigError(
            f"secondary tier {tier.name}: cell={tier.cell!r} needs memory that another process "
            "can map, and this is not. Remove the key, or give SlotMemory its file's descriptor."
        )
    wanted = tier.cell or backend_class(tier.type).cell
    return wanted == "process" and memory.descriptor is not None
