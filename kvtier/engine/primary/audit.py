"""Defines the state of the primary tier as frozen, plain data: the result of its ``audit()``.

For tests and diagnosis: the model checker's invariants are about it. Taking one costs time in
proportion to the actor's state, so nothing in normal operation does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.engine.primary.cascades import DeferredBlock
    from kvtier.engine.primary.lookups import LookedUp
    from kvtier.engine.primary.promotions import PromotionAudit
    from kvtier.engine.primary.slot_table import SlotAudit
    from kvtier.engine.primary.tier_directory import DirectoryAudit
    from kvtier.plugin_api.keys import Key, RequestId


@dataclass(frozen=True)
class PrimaryAudit:
    """State of the primary tier."""

    slots: SlotAudit
    promotions: PromotionAudit
    directory: DirectoryAudit
    looked_up: Mapping[RequestId, LookedUp]
    parked: frozenset[Key]  #: to be cascaded once they are READY
    holes: Mapping[int, frozenset[Key]]  #: by tier: deferred or lost blocks
    deferred: Mapping[int, Mapping[Key, DeferredBlock]]  #: by tier
    makes_room: bool  #: whether a message waits for slots that are being freed
    excluded: frozenset[Key]  #: must stay during the last call that needed victims
