"""Assembles a runtime: actors, cells, backends, and the facade in front."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core.generations import Generations
from kvtier.core.policy_actor import PolicyActor
from kvtier.core.tier_host import close_tiers
from kvtier.engine.cell import EngineCell
from kvtier.engine.facade import SchedulerFacade
from kvtier.engine.link.admission_gate import AdmissionGate
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.engine.link.tier_link import TierLink
from kvtier.engine.primary.primary_tier import PrimaryTier
from kvtier.engine.staged.staged_facade import StagedFacade
from kvtier.errors import ConfigError
from kvtier.hosts.choose import make_host
from kvtier.hosts.machine_time import from_machine_time, to_machine_time
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendContext, Connection
from kvtier.settings.plugins import fallback_policy, make_admission, make_policy
from kvtier.settings.runtime_config import ADMIT_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.core.statistics import TierStatistics
    from kvtier.core.tier_host import TierHost
    from kvtier.engine.cell import OwnedMailbox
    from kvtier.plugin_api.admission_policy import AdmissionPolicy
    from kvtier.plugin_api.backend import Namespace
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import RuntimeConfig

_CONNECT_POLL_S: Final = 0.005


def open_runtime(
    config: RuntimeConfig,
    memory: SlotMemory,
    namespace: Namespace,
    *,
    collect_events: bool = False,
    engine: object = None,
    clock: Callable[[], float] = time.monotonic,
) -> SchedulerFacade:
    """Start a runtime and return its facade.

    ``memory`` stays the caller's: release it after ``close()`` has returned
    True. ``namespace`` names everything that changes the bytes of a block.
    ``collect_events``: fill ``take_events()``, which must then be drained.
    ``engine``: for backends that are part of it (``BackendContext.engine``).
    ``clock``: the engine's clock; tiers use ``time.monotonic``.
    Raises ``ConfigError`` before any tier serves, and waits for each tier's
    storage for ``start_timeout_s`` at most; a tier whose backend fails later is
    disabled, and the runtime goes on without it.
    """
    if memory.slot_count != config.slot_count or memory.block_bytes != config.block_bytes:
        raise ConfigError(
            f"memory of {memory.slot_count} slots of {memory.block_bytes} bytes does not fit "
            f"slot_count={config.slot_count}, block_bytes={config.block_bytes}. Make them equal."
        )
    cell = EngineCell()
    policy = make_policy(config.eviction_policy, config.slot_count)
    admissions = make_admissions(config)
    inboxes = [cell.inbox() for _ in config.tiers]
    tiers: list[TierHost] = []
    with ExitStack() as undo:
        undo.callback(close_tiers, tiers, config.close_timeout_s)
        _make_tiers(tiers, config, memory, namespace, inboxes, engine, clock)
        built = build_engine(
            cell,
            config,
            policy,
            admissions,
            zip(inboxes, [to_machine_time(tier, clock) for tier in tiers], strict=True),
            collect_events=collect_events,
        )
        for link, tier in zip(built.links, tiers, strict=True):
            tier.report_losses_by(link.lost_blocks)
            if tier.traits is not None:  # else reported once the tier can be used
                link.set_traits(tier.traits)
        for tier in tiers:
            tier.start()
        facade = SchedulerFacade(
            built.cell,
            built.primary,
            built.links,
            tiers,
            close_timeout_s=config.close_timeout_s,
            generations=Generations(config.weights_version, keep=config.keeps_on_reset),
            clock=clock,
        )
        undo.pop_all()
    return facade


def open_staged_tier(
    config: RuntimeConfig,
    slots: SlotMemory,
    staging: SlotMemory,
    namespace: Namespace,
    *,
    collect_events: bool = False,
    engine: object = None,
    clock: Callable[[], float] = time.monotonic,
) -> StagedFacade:
    """Start one tier behind another program's primary tier, and return its facade.

    ``slots``: the program's, which no storage ever accesses; released when the facade is
    closed. ``staging``: as many slots as ``config`` has, between those and the tier.
    ``engine``: for backends that are part of it (``BackendContext.engine``). Raises
    ``ConfigError`` as ``open_runtime`` does.
    """
    from kvtier.hosts.copier import BlockCopier  # noqa: PLC0415 - NumPy: most need none

    runtime = open_runtime(
        config, staging, namespace, collect_events=collect_events, engine=engine, clock=clock
    )
    with ExitStack() as undo:
        undo.callback(runtime.close)
        facade = StagedFacade(
            runtime,
            config,
            BlockCopier(config.tiers[0].name, slots, staging),
            waiting_stores_max=max(1, int(slots.slot_count * config.cascade_slots_fraction_max)),
            clock=clock,
        )
        undo.pop_all()
    return facade


def wait_for_servers(
    config: RuntimeConfig,
    statistics: Callable[[], Sequence[TierStatistics]],
    should_stop: Callable[[], bool] = lambda: False,
    *,
    also_open: bool = False,
) -> list[str]:
    """Wait for tiers that connect to a server, for ``startup_connect_timeout_s`` at most.

    Otherwise the first requests would find nothing there, and the blocks they compute would not be
    stored: connecting takes longer than a ready engine waits for its first request. Returns
    the names of the tiers that are still connecting. ``statistics``: also receives tiers' reports.
    ``also_open``: also wait for backends that have yet to open, such as those in processes.
    """
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        both = list(zip(config.tiers, statistics(), strict=True))
        connecting = [(tier, now.name) for tier, now in both if _is_connecting(now, also_open)]
        is_over = not any(waited_s < tier.startup_connect_timeout_s for tier, _ in connecting)
        if is_over or should_stop():
            return [name for _, name in connecting]
        time.sleep(_CONNECT_POLL_S)


def _is_connecting(tier: TierStatistics, also_open: bool) -> bool:  # noqa: FBT001 - as its caller's
    disabled = tier.breaker == BreakerState.DISABLED.name
    opens = also_open and not tier.is_open
    return (opens or tier.connection == Connection.CONNECTING.name) and not disabled


class Engine:
    """The actors of an engine cell, wired to one another."""

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
    cell: EngineCell,
    config: RuntimeConfig,
    policy: EvictionPolicy,
    admissions: Mapping[int, AdmissionPolicy],
    tiers: Iterable[tuple[OwnedMailbox, Mailbox]],
    *,
    collect_events: bool,
) -> Engine:
    """Wire up an engine cell.

    ``tiers``: for each, the inbox for its messages, and the mailbox for messages to it.
    ``admissions``: the policies of those that don't take every block, by number.
    """
    ends = list(tiers)
    to_primary, to_policy = cell.mailbox(), cell.mailbox()
    to_links = [cell.mailbox() for _ in ends]
    to_gates = {number: cell.mailbox() for number in admissions}
    primary = PrimaryTier(
        config,
        policy=to_policy,
        links=to_links,
        gates=to_gates,
        log=cell.log,
        reply=cell.reply,
        collect_events=collect_events,
    )
    cell.add(primary, to_primary)
    host = PolicyActor("policy", policy, fallback_policy(), to_primary)
    cell.add(host, to_policy)
    links = []
    for number, (inbox, tier) in enumerate(ends):
        mailboxes = (to_links[number], inbox)
        links.append(
            _add_link(cell, config, number, tier, to_primary, mailboxes, collects=collect_events)
        )
    gates = []
    for number, admission in admissions.items():
        gate = AdmissionGate(
            number,
            config.tiers[number].name,
            admission,
            primary=to_primary,
            link=to_links[number],
            log=cell.log,
        )
        cell.add(gate, to_gates[number])
        gates.append(gate)
    return Engine(cell, primary, host, links, gates)


def _add_link(
    cell: EngineCell,
    config: RuntimeConfig,
    number: int,
    tier: Mailbox,
    primary: OwnedMailbox,
    mailboxes: tuple[OwnedMailbox, OwnedMailbox],
    *,
    collects: bool,
) -> TierLink:
    """Add a tier's link. ``mailboxes``: for messages from the cell, and from the tier."""
    link = TierLink(
        number,
        config,
        tier=tier,
        primary=primary,
        log=cell.log,
        collect_events=collects,
    )
    # A tier is unusable without its link.
    cell.add(link, *mailboxes, last_words=(primary, m.LinkFailed(tier=number)))
    return link


def make_admissions(config: RuntimeConfig) -> dict[int, AdmissionPolicy]:
    """Make a policy for each tier that should not get every block."""
    context = AdmissionContext(block_bytes=config.block_bytes, slot_count=config.slot_count)
    return {
        number: make_admission(tier, context)
        for number, tier in enumerate(config.tiers)
        if tier.admission != ADMIT_ALL
    }


def _make_tiers(
    tiers: list[TierHost],
    config: RuntimeConfig,
    memory: SlotMemory,
    namespace: Namespace,
    inboxes: Sequence[Mailbox],
    engine: object,
    clock: Callable[[], float],
) -> None:
    """Make all tiers, each added to ``tiers`` at once: the caller closes them if this raises."""
    owner_of: dict[str, str] = {}
    for tier, inbox in zip(config.tiers, inboxes, strict=True):
        host = make_host(
            tier,
            BackendContext(
                config.block_bytes, namespace, tier.name, engine=engine, read_only=tier.read_only
            ),
            memory,
            from_machine_time(inbox, clock),
            messages_max=config.mailbox_messages_max,
        )
        tiers.append(host)
        _check_place(host, owner_of)


def _check_place(tier: TierHost, owner_of: dict[str, str]) -> None:
    """Refuse a place that another tier uses; else record its owner."""
    if tier.place is not None and owner_of.setdefault(tier.place, tier.name) != tier.name:
        raise ConfigError(
            f"secondary tiers {owner_of[tier.place]} and {tier.name} both use {tier.place!r}. "
            "Give each tier a place of its own."
        )
