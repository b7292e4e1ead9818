"""Puts a runtime together: actors, cells, backends, and the facade in front."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.core.generations import Generations
from kvtier.core.policy_actor import PolicyActor
from kvtier.engine.admission_gate import AdmissionGate
from kvtier.engine.cell import EngineCell
from kvtier.engine.facade import SchedulerFacade
from kvtier.engine.primary_tier import PrimaryTier
from kvtier.engine.tier_link import TierLink
from kvtier.errors import ConfigError
from kvtier.hosts.choose import make_host
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendContext
from kvtier.settings.plugins import fallback_policy, make_admission, make_policy
from kvtier.settings.runtime_config import ADMIT_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Actor
    from kvtier.core.tier_host import TierHost
    from kvtier.plugin_api.backend import Namespace
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import RuntimeConfig


def open_runtime(
    config: RuntimeConfig,
    memory: SlotMemory,
    namespace: Namespace,
    *,
    collect_events: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> SchedulerFacade:
    """Start a runtime and return its facade.

    ``memory`` stays the caller's: release it after ``close()`` has returned
    True. ``namespace`` names everything that changes the bytes of a block.
    ``collect_events``: fill ``take_events()``, which must then be drained.
    Raises ``ConfigError`` before any tier is served, and waits for each tier's
    storage for ``start_timeout_s`` at most; a tier whose backend fails later is
    cut off, and the runtime goes on without it.
    """
    if memory.slot_count != config.slot_count or memory.block_bytes != config.block_bytes:
        raise ConfigError(
            f"memory of {memory.slot_count} slots of {memory.block_bytes} bytes does not fit "
            f"slot_count={config.slot_count}, block_bytes={config.block_bytes}. Make them equal."
        )
    engine_policy = make_policy(config.eviction_policy, config.slot_count)
    engine = build_engine(config, engine_policy, collect_events=collect_events)
    tiers = _make_tiers(config, memory, namespace, engine)
    for tier in tiers:
        tier.start()
    return SchedulerFacade(
        engine.cell,
        engine.primary,
        engine.links,
        tiers,
        close_timeout_s=config.close_timeout_s,
        generations=Generations(config.weights_version, keep=config.keeps_on_reset),
        clock=clock,
    )


class Engine:
    """The actors of an engine cell, wired to one another. Links have no tiers yet."""

    def __init__(
        self,
        cell: EngineCell,
        primary: PrimaryTier,
        policy: PolicyActor,
        links: list[TierLink],
        gates: list[AdmissionGate],
    ) -> None:
        self.cell = cell
        self.primary = primary
        self.policy = policy
        self.links = links
        self.gates = gates  #: of the tiers that don't take every block


def build_engine(
    config: RuntimeConfig,
    policy: EvictionPolicy,
    *,
    collect_events: bool,
    cell: EngineCell | None = None,
) -> Engine:
    """Wire up an engine cell. Tests give a ``cell`` of their own."""
    cell = EngineCell() if cell is None else cell
    primary = PrimaryTier(config, collect_events=collect_events)
    host = PolicyActor("policy", policy, fallback_policy())
    primary.reply = cell.reply
    primary.log = cell.log
    host.host = cell.mailbox(primary)
    links = []
    for tier in range(len(config.tiers)):
        link = TierLink(tier, config, collect_events=collect_events)
        link.primary = cell.mailbox(primary)
        link.log = cell.log
        link.reply = cell.reply
        links.append(link)
    gates = _make_gates(config)
    for gate in gates:
        gate.primary = cell.mailbox(primary)
        gate.link = cell.mailbox(links[gate.tier])
        gate.log = cell.log
    primary.connect(
        cell.mailbox(host),
        [cell.mailbox(link) for link in links],
        {gate.tier: cell.mailbox(gate) for gate in gates},
    )

    def on_fault(actor: Actor) -> None:
        """Cut off the tier of a link that broke; nothing else can be done without it."""
        for number, link in enumerate(links):
            if actor is link:
                cell.mailbox(primary).post(m.LinkFailed(tier=number))

    cell.on_fault = on_fault
    return Engine(cell, primary, host, links, gates)


def _make_gates(config: RuntimeConfig) -> list[AdmissionGate]:
    """Make a gate for each tier that isn't to have every block."""
    context = AdmissionContext(block_bytes=config.block_bytes, slot_count=config.slot_count)
    return [
        AdmissionGate(number, tier.name, make_admission(tier, context))
        for number, tier in enumerate(config.tiers)
        if tier.admission != ADMIT_ALL
    ]


def _make_tiers(
    config: RuntimeConfig, memory: SlotMemory, namespace: Namespace, engine: Engine
) -> list[TierHost]:
    """Make all tiers, and wire them to their links; or none, and raise ``ConfigError``."""
    tiers: list[TierHost] = []
    owner_of: dict[str, str] = {}
    try:
        for tier, link in zip(config.tiers, engine.links, strict=True):
            host = make_host(
                tier,
                BackendContext(config.block_bytes, namespace, tier.name),
                memory,
                engine.cell.inbox(link),
                messages_max=config.mailbox_messages_max,
            )
            tiers.append(host)
            link.tier = host
            if host.traits is not None:  # else told when the tier can be used
                link.meet(host.traits)
            _check_place(host, owner_of)
    except BaseException:
        for made in tiers:
            made.close(0.0)
        raise
    return tiers


def _check_place(tier: TierHost, owner_of: dict[str, str]) -> None:
    """Refuse a place that another tier uses; else note whose it is."""
    if tier.place is not None and owner_of.setdefault(tier.place, tier.name) != tier.name:
        raise ConfigError(
            f"secondary tiers {owner_of[tier.place]} and {tier.name} both use {tier.place!r}. "
            "Give each tier a place of its own."
        )
