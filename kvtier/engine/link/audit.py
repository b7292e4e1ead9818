"""Defines the state of a tier's link as frozen, plain data: the result of its ``audit()``.

For tests and diagnosis: the model checker's invariants are about it. Taking one costs time in
proportion to the actor's state, so nothing in normal operation does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.engine.link.circuit_breaker import worst

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.engine.link.circuit_breaker import BreakerState, Work
    from kvtier.plugin_api.backend import Connection


@dataclass(frozen=True)
class JobAudit:
    """State of a job in flight."""

    is_load: bool
    abandoned: bool
    counts_for_its_tier: bool
    slots: tuple[int, ...]
    waits_until: float  #: its request waits no longer than this


@dataclass(frozen=True)
class LinkAudit:
    """State of a tier's link."""

    breakers: Mapping[Work, BreakerState]
    connection: Connection
    since: int
    jobs: Mapping[int, JobAudit]
    probes: frozenset[int]
    watched: Mapping[Work, frozenset[int]]  #: watched for lateness
    waiting_loads: tuple[int, ...]  #: slots of promotions that are not sent yet
    waiting_stores: tuple[int, ...]
    cascade_slots: int
    abandoned_slots: int
    load_blocks: int  #: outstanding at the tier, as load estimates count them
    untold: int  #: reports of its contents that wait for a step
    now: float

    @property
    def breaker(self) -> BreakerState:
        """The most restrictive state of the three."""
        return worst(self.breakers.values())
