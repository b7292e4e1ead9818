"""Chooses the host of a tier's cell, and makes it: a thread, or a process of its own.

Code that may touch storage runs elsewhere, with a deadline: an engine starts, or reports
why it can't, whatever its storage does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, StorageUnusable
from kvtier.hosts.process_host import TierProcess
from kvtier.hosts.starting import with_the_way_out
from kvtier.hosts.thread_host import TierThread
from kvtier.settings.plugins import backend_class, make_backend, policy_maker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Mailbox
    from kvtier.core.tier_host import TierHost
    from kvtier.plugin_api.backend import Backend, BackendContext
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import TierConfig


def make_host(
    tier: TierConfig,
    context: BackendContext,
    memory: SlotMemory,
    link: Mailbox,
    *,
    messages_max: int,
) -> TierHost:
    """Make a tier's backend and its host. Raises ``ConfigError``; nothing runs then.

    Waits for the backend for ``start_timeout_s`` at most. If its storage can't be
    used, and ``on_unusable`` is ``skip``, the host has no backend: once
    started, it disables the tier, and enables it as soon as its storage can be used.

    A cell runs where the configuration says, else where its backend prefers;
    always in a thread if no other process can map the memory.
    """
    host: TierProcess | TierThread
    if runs_in_process(tier, memory):
        context = replace(context, engine=None)  # it can't cross to a process
        host = TierProcess(tier, context, memory, link, messages_max=messages_max)
    else:
        host = TierThread(
            tier,
            memory,
            link,
            messages_max=messages_max,
            make_backend=_maker(tier, context),
            policy_of=partial(policy_maker, tier),
        )
    try:
        host.make()
    except StorageUnusable as trouble:
        if tier.on_unusable == "refuse":
            raise with_the_way_out(trouble) from trouble
        host.start_without(str(trouble))
    try:
        if (make_policy := policy_maker(tier, host.traits)) is not None:
            make_policy()  # an unknown one is refused before anything runs
    except BaseException:
        host.close(0.0)
        raise
    return host


def _maker(tier: TierConfig, context: BackendContext) -> Callable[[], Backend]:
    """Return a factory of successive backends: later ones make no folder elsewhere."""

    def make() -> Backend:
        nonlocal context
        backend = make_backend(tier, context)
        context = replace(context, filesystem=backend.filesystem)
        return backend

    return make


def runs_in_process(tier: TierConfig, memory: SlotMemory) -> bool:
    """Return whether the tier gets a process of its own. Raises ``ConfigError`` if it can't."""
    if memory.descriptor is None and tier.isolation == "process":
        raise ConfigError(
            f"secondary tier {tier.name}: isolation={tier.isolation!r} needs memory that another "
            "process can map, and this is not. Remove the key, or give SlotMemory its file's "
            "descriptor."
        )
    backend = backend_class(tier.type)
    wanted = tier.isolation or backend.isolation
    if backend.needs_engine and wanted == "process":
        raise ConfigError(
            f"secondary tier {tier.name}: isolation={tier.isolation!r} is not for "
            f"type={tier.type!r}, which uses what only the engine's own process has. Remove the "
            "key."
        )
    return wanted == "process" and memory.descriptor is not None
