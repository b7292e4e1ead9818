"""Chooses what a tier's cell runs in, and makes it: a thread, or a process of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.registry import backend_class, make_backend, policy_maker
from kvtier.tier_process import TierProcess
from kvtier.tier_thread import TierThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.actor import Mailbox
    from kvtier.backend import BackendContext
    from kvtier.config import TierConfig
    from kvtier.memory import SlotMemory
    from kvtier.policies.base import EvictionPolicy
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
        try:
            _check_policy(policy_maker(tier, host.traits))
        except BaseException:
            host.close(0.0)
            raise
        return host
    make = partial(make_backend, tier, context)
    backend = make()
    policy = policy_maker(tier, backend.traits)
    _check_policy(policy)
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


def _check_policy(make_policy: Callable[[], EvictionPolicy] | None) -> None:
    """Refuse an unknown policy here, at the door."""
    if make_policy is not None:
        make_policy()
