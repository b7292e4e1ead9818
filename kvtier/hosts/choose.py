"""Chooses what a tier's cell runs in, and makes it: a thread, or a process of its own.

What may touch storage runs elsewhere, with a deadline: an engine starts, or says
why not, whatever its storage does.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, StorageUnusable
from kvtier.hosts.process_host import TierProcess
from kvtier.hosts.starting import First, hangs, with_the_way_out
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.threads import BoundedCall
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
    """Make a tier's backend, and what runs it. Raises ``ConfigError``; nothing runs then.

    Waits for the backend for ``start_timeout_s`` at most. If its storage can't be
    used, and ``on_unusable`` is ``start_without``, the host has no backend: once
    started, it cuts the tier off, and takes it up as soon as it can be used.

    A cell runs where the configuration says, else where its backend prefers;
    in a thread in any case if no other process can map the memory.
    """
    in_process = runs_in_process(tier, memory)
    host = (_process if in_process else _thread)(tier, context, memory, link, messages_max)
    if host.traits is not None:
        try:
            _check_policy(tier, host)
        except BaseException:
            host.close(0.0)
            raise
    return host


def runs_in_process(tier: TierConfig, memory: SlotMemory) -> bool:
    """Tell whether the tier gets a process of its own. Raises ``ConfigError`` if it can't."""
    if memory.descriptor is None and tier.cell == "process":
        raise ConfigError(
            f"secondary tier {tier.name}: cell={tier.cell!r} needs memory that another process "
            "can map, and this is not. Remove the key, or give SlotMemory its file's descriptor."
        )
    wanted = tier.cell or backend_class(tier.type).cell
    return wanted == "process" and memory.descriptor is not None


def _process(
    tier: TierConfig,
    context: BackendContext,
    memory: SlotMemory,
    link: Mailbox,
    messages_max: int,
) -> TierHost:
    host = TierProcess(tier, context, memory, link, messages_max=messages_max)
    try:
        host.make()
    except StorageUnusable as trouble:
        host.start_without(_reason_to_go_on(tier, trouble))
    return host


def _thread(
    tier: TierConfig,
    context: BackendContext,
    memory: SlotMemory,
    link: Mailbox,
    messages_max: int,
) -> TierHost:
    began_s = time.monotonic()
    make = partial(make_backend, tier, context)
    first = BoundedCall(partial(_with_place, make), f"kvtier-{tier.name}-start")
    found: tuple[Backend | None, str | None] = (None, None)
    trouble: str | None = None
    try:
        if not first.wait(tier.start_timeout_s):
            raise hangs(tier)
        found = first.result()
    except StorageUnusable as error:
        trouble = _reason_to_go_on(tier, error)
    return TierThread(
        tier.name,
        First(found[0], began_s, found[1], trouble),
        memory,
        link,
        messages_max=messages_max,
        make_backend=_after(first, make) if trouble else make,
        policy_of=partial(policy_maker, tier),
    )


def _with_place(make: Callable[[], Backend]) -> tuple[Backend, str | None]:
    backend = make()
    return backend, backend.place  # which may look at the storage too


def _after(
    first: BoundedCall[tuple[Backend, str | None]], make: Callable[[], Backend]
) -> Callable[[], Backend]:
    """Return a ``make`` that waits for the call that hangs, so that no second one hangs too."""
    calls = [first] if not first.wait(0.0) else []

    def make_next() -> Backend:
        return calls.pop().result()[0] if calls else make()

    return make_next


def _reason_to_go_on(tier: TierConfig, trouble: StorageUnusable) -> str:
    """Return why the tier is cut off from the start; raise that, if that is no reason to."""
    if tier.on_unusable == "refuse":
        raise with_the_way_out(trouble) from trouble
    return str(trouble)


def _check_policy(tier: TierConfig, host: TierHost) -> None:
    """Refuse an unknown policy here, at the door."""
    assert host.traits is not None
    make_policy = policy_maker(tier, host.traits)
    if make_policy is not None:
        make_policy()
