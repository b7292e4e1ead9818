"""What kvtier counts, and the frozen snapshot that ``statistics()`` returns.

Actors count in the plain mutable classes, whose attributes are the counters;
nobody else writes them. Counters only grow; observations are taken by whoever
exports them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, Generic, Self, TypeVar

import msgspec

T = TypeVar("T")

OBSERVATIONS_MAX: Final = 10_000
"""Observations that nobody takes are dropped beyond this many, the oldest first."""


class Counts(Mapping[str, int | float]):
    """Counters: attributes, and a mapping by name for whoever reads them all."""

    def snapshot(self) -> Self:
        """Return the counters as they are now."""
        taken = object.__new__(type(self))
        vars(taken).update(vars(self))
        return taken

    def __getitem__(self, name: str) -> int | float:
        """Return one counter."""
        value: int | float = vars(self)[name]
        return value

    def __iter__(self) -> Iterator[str]:
        """Return the names of all counters."""
        return iter(vars(self))

    def __len__(self) -> int:
        """How many counters there are."""
        return len(vars(self))

    def __eq__(self, other: object) -> bool:
        """Compare the counters. Done in each step of an engine, so without a copy."""
        if isinstance(other, Counts):
            return vars(self) == vars(other)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment] # as of all that changes


class PrimaryCounts(Counts):
    """Counted by the primary tier, in blocks unless the name says otherwise."""

    def __init__(self) -> None:
        # Keys looked up, once a request and key; counted when the request loads, stores or ends.
        self.queries = 0
        self.hits = 0  # of these, READY at once
        self.evictions = 0
        self.promotions_refused = 0  # lookups answered ABSENT for want of a slot
        self.stores_skipped = 0  # below store_threshold
        self.stores_dropped = 0  # no room
        self.unknown_completions = 0
        self.policies_replaced = 0  # eviction policies that raised, or were of no use


class TierCounts(Counts):
    """Counted by one tier's link, in blocks unless the name says otherwise."""

    def __init__(self) -> None:
        self.queries = 0
        self.hits = 0
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.write_bytes = 0
        self.write_seconds = 0.0
        self.promotion_jobs = 0
        self.promotion_jobs_failed = 0  # at least one block did not arrive
        self.cascade_jobs = 0
        self.cascade_jobs_failed = 0
        self.absent = 0  # a load found nothing
        self.damaged = 0  # a load found bytes that fail their check
        self.failed = 0  # the medium failed, load or store
        self.full = 0  # a store found no room
        self.cascades_dropped = 0  # not even tried: breaker, bounds, no room lately
        self.cascades_refused = 0  # by the tier's admission policy
        self.promotions_dropped = 0
        self.jobs_timed_out = 0  # jobs
        self.probes_timed_out = 0  # probes
        self.late_completions = 0  # jobs and probes that ended after their deadline
        self.unknown_completions = 0  # doubled, or never asked for
        self.policies_replaced = 0  # eviction policies that raised, in cells one after the other
        self.breaker_opened = 0
        self.broke = 0


class Observed(Generic[T]):
    """Single measurements that wait to be taken."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque(maxlen=OBSERVATIONS_MAX)
        self.add = self._waiting.append

    def take(self) -> list[T]:
        """Return what was added since the last time."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class PrimaryStatistics(msgspec.Struct, frozen=True):
    """One moment of the primary tier. Slots sum up to ``slot_count``."""

    slot_count: int
    free_slots: int
    filling_from_gpu_slots: int
    filling_from_tiers_slots: int
    ready_slots: int
    quarantined_slots: int
    pinned_slots: int  #: read by the GPU or by cascades now
    promotion_slots: int  #: filling from a tier, or leased to a request
    requests: int
    counts: PrimaryCounts  #: as they were then


class TierStatistics(msgspec.Struct, frozen=True):
    """One moment of one secondary tier."""

    name: str
    breaker: str  #: CLOSED, OPEN, HALF_OPEN or DISABLED
    probes_in_flight: int
    promotion_jobs_in_flight: int
    cascade_jobs_in_flight: int
    promotion_slots: int
    cascade_slots: int
    counts: TierCounts  #: as they were then
    #: The backend's own counters, as they were told last; and which of them go up and down.
    backend: Mapping[str, int] = msgspec.field(default_factory=dict)
    backend_levels: frozenset[str] = frozenset()


class TierObservations(msgspec.Struct, frozen=True):
    """Single measurements of one tier since they were last taken."""

    probe_seconds: list[float]  #: one a probe: from asking until the answer was taken in
    promotion_seconds: list[tuple[float, bool]]  #: one a job: its length, and its success


class Observations(msgspec.Struct, frozen=True):
    """Single measurements since they were last taken, for histograms."""

    allocation_sizes: list[int]  #: one a store: blocks that wanted a slot
    lookup_seconds: list[float]  #: a sample: time inside ``lookup``
    tiers: tuple[TierObservations, ...]


class Statistics(msgspec.Struct, frozen=True):
    """What ``SchedulerFacade.statistics()`` returns."""

    primary: PrimaryStatistics
    tiers: tuple[TierStatistics, ...]
    faults: int  #: handlers that raised

    def counters(self) -> dict[str, int | float]:
        """Return all that only grows, by name: what one snapshot has, no later one has less of."""
        counters: dict[str, int | float] = {"faults": self.faults}
        counters.update((f"primary {name}", n) for name, n in self.primary.counts.items())
        for tier in self.tiers:
            counters.update((f"{tier.name} {name}", n) for name, n in tier.counts.items())
            grows = tier.backend.keys() - tier.backend_levels
            counters.update((f"{tier.name} backend {name}", tier.backend[name]) for name in grows)
        return counters
