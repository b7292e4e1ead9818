"""What each of the engine's actors keeps, as frozen, plain data: what their ``audit()`` returns.

For tests and for diagnosis: the model checker's invariants are about these. Taking one costs
time in proportion to what the actor keeps, so nothing at work does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.engine.circuit_breaker import worst

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.engine.circuit_breaker import BreakerState, Work
    from kvtier.engine.lookups import LookedUp
    from kvtier.engine.missing_prefixes import DeferredBlock
    from kvtier.engine.promotions import PromotionAudit
    from kvtier.engine.slot_table import SlotAudit
    from kvtier.engine.tier_directory import DirectoryAudit
    from kvtier.plugin_api.backend import Connection
    from kvtier.plugin_api.keys import Key, RequestId


@dataclass(frozen=True)
class PrimaryAudit:
    """The primary tier."""

    slots: SlotAudit
    promotions: PromotionAudit
    directory: DirectoryAudit
    looked_up: Mapping[RequestId, LookedUp]
    parked: frozenset[Key]  #: to be cascaded once they are READY
    holes: Mapping[int, frozenset[Key]]  #: of each tier: deferred, or lost
    deferred: Mapping[int, Mapping[Key, DeferredBlock]]  #: of each tier
    makes_room: bool  #: whether something waits for slots that are being made free
    excluded: frozenset[Key]  #: not to be evicted for the last call that needed victims


@dataclass(frozen=True)
class JobAudit:
    """A job in flight."""

    is_load: bool
    abandoned: bool
    counts_for_its_tier: bool
    slots: tuple[int, ...]
    waits_until: float  #: at the latest; later nobody waits for it


@dataclass(frozen=True)
class LinkAudit:
    """A tier's link."""

    breakers: Mapping[Work, BreakerState]
    connection: Connection
    since: int
    jobs: Mapping[int, JobAudit]
    probes: frozenset[int]
    watched: Mapping[Work, frozenset[int]]  #: that would be noticed to be late
    waiting_loads: tuple[int, ...]  #: slots of promotions that are not sent yet
    waiting_stores: tuple[int, ...]
    cascade_slots: int
    abandoned_slots: int
    load_blocks: int  #: outstanding at the tier, as estimates of loads have it
    untold: int  #: messages of its contents that wait for a step
    now: float

    @property
    def breaker(self) -> BreakerState:
        """The worst of the three."""
        return worst(self.breakers.values())
