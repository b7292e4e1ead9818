"""Defines kvtier's counters, and the frozen snapshot that ``statistics()`` returns.

Actors count in the plain mutable classes, whose attributes are the counters;
no other code writes them. Counters only grow; observations are drained by
their exporter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping  # noqa: TC003 - msgspec resolves the annotations
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

OBSERVATIONS_MAX: Final = 10_000
"""Observations not drained are dropped beyond this many, the oldest first."""


class Counts(msgspec.Struct):
    """Counters: attributes, so that a renamed one is an error wherever it is read."""

    def snapshot(self) -> Self:
        """Return the counters as they are now."""
        return replace(self)


class PrimaryCounts(Counts):
    """Counted by the primary tier, in blocks unless the name says otherwise."""

    # Keys looked up, once a request and key; counted when the request loads, stores or ends.
    queries: int = 0
    hits: int = 0  # of these, READY at once
    evictions: int = 0
    promotions_refused: int = 0  # lookups that returned ABSENT for want of a slot
    stores_skipped: int = 0  # below store_threshold
    stores_dropped: int = 0  # no room
    late_blocks_kept: int = 0  # that tiers delivered when no request waited for them any more
    unknown_completions: int = 0
    policies_replaced: int = 0  # eviction policies that raised, or whose victims were unusable
    # Decisions whether a request loads or recomputes, one per request and wait.
    loads_decided: int = 0  # all that tiers have
    cuts_decided: int = 0  # the head from tiers, the tail recomputed
    recomputes_decided: int = 0  # nothing from tiers
    explorations_decided: int = 0  # a few blocks, to measure how fast a tier is now
    blocks_recomputed: int = 0  # that tiers have, as far as known, but that were recomputed
    requests_waited: int = 0  # until others release the slots that their loads need
    prefill_expected_seconds: float = 0.0  # of steps that computed prompts, one by one
    prefill_seconds: float = 0.0  # of the same steps


class TierCounts(Counts):
    """Counted by one tier's link, in blocks unless the name says otherwise."""

    queries: int = 0
    hits: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0
    promotion_jobs: int = 0
    promotion_jobs_failed: int = 0  # at least one block did not arrive
    cascade_jobs: int = 0
    cascade_jobs_failed: int = 0
    load_misses: int = 0  # a load found nothing
    damaged: int = 0  # a load found bytes that fail their check
    failed: int = 0  # the medium failed, load or store
    stores_rejected: int = 0  # a store found no room
    stores_deferred: int = 0  # not stored now, and offered again while they are here
    cascades_dropped: int = 0  # deferred, and gone before the tier had room for them
    cascades_refused: int = 0  # by the tier's admission policy
    promotions_dropped: int = 0
    loads_abandoned: int = 0  # of requests that lost patience
    loads_cancelled: int = 0  # not sent yet when their request ended or was scheduled
    load_expected_seconds: float = 0.0  # of promotion jobs that ended
    load_seconds: float = 0.0  # of the same jobs, from when they were sent
    jobs_timed_out: int = 0  # jobs
    probes_timed_out: int = 0  # probes
    late_completions: int = 0  # jobs and probes that ended when no request waited any more
    unknown_completions: int = 0  # duplicate, or never requested
    policies_replaced: int = 0  # eviction policies that raised, over all cells so far
    breaker_opened: int = 0
    connections_lost: int = 0
    crashes: int = 0

    def count_job(
        self, outcomes: Sequence[Outcome], block_bytes: int, seconds: float, *, is_load: bool
    ) -> bool:
        """Count a job that spent ``seconds`` at the backend; return whether all of it is DONE."""
        done = outcomes.count(Outcome.DONE)
        complete = done == len(outcomes)
        if is_load:
            self.read_bytes += done * block_bytes
            self.read_seconds += seconds
            self.promotion_jobs_failed += not complete
        else:
            self.write_bytes += done * block_bytes
            self.write_seconds += seconds
            self.cascade_jobs_failed += not complete
        self.load_misses += outcomes.count(Outcome.ABSENT)
        self.damaged += outcomes.count(Outcome.DAMAGED)
        self.failed += outcomes.count(Outcome.FAILED)
        self.stores_rejected += outcomes.count(Outcome.FULL)
        return complete


class Observed(Generic[T]):
    """Single measurements that wait to be drained."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque(maxlen=OBSERVATIONS_MAX)
        self.add = self._waiting.append

    def drain(self) -> list[T]:
        """Return the measurements added since the last call."""
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


class TierSpeed(msgspec.Struct, frozen=True):
    """Speed of a tier at one kind of work, from recently completed work."""

    latency_s: float  #: also 0 while it can't be separated from the time per block
    bytes_per_s: float  #: 0 for probes, and if only the latency shows
    answers_per_s: float  #: of probes, in blocks; 0 for others
    spread: float  #: how far off the estimate was, as a share of it
    window: int  #: how many blocks, or keys, it is given at once


class TierStatistics(msgspec.Struct, frozen=True):
    """One moment of one secondary tier."""

    name: str
    breaker: str  #: CLOSED, OPEN, HALF_OPEN or DISABLED: the worst of the three
    breakers: Mapping[str, str]  #: of ``"probes"``, ``"loads"`` and ``"stores"``
    connection: str  #: CONNECTING, UP or GONE; UP if the backend needs no server
    is_open: bool  #: whether its backend has been open
    probes_in_flight: int
    promotion_jobs_in_flight: int
    cascade_jobs_in_flight: int
    promotion_slots: int
    cascade_slots: int
    counts: TierCounts  #: as they were then
    #: Of ``"probes"``, ``"loads"`` and ``"stores"`` those with a known speed.
    speeds: Mapping[str, TierSpeed] = msgspec.field(default_factory=dict)
    #: The backend's own counters, as last reported; and which of them go up and down.
    backend: Mapping[str, int] = msgspec.field(default_factory=dict)
    backend_levels: frozenset[str] = frozenset()


class TierObservations(msgspec.Struct, frozen=True):
    """Single measurements of one tier since they were last drained."""

    probe_seconds: list[float]  #: one per probe: from sending it until the answer was taken in
    promotion_seconds: list[tuple[float, bool]]  #: one per job: its length, and its success


class Observations(msgspec.Struct, frozen=True):
    """Single measurements since they were last drained, for histograms."""

    allocation_sizes: list[int]  #: one per store: blocks that wanted a slot
    lookup_seconds: list[float]  #: a sample: time inside ``lookup``
    tiers: tuple[TierObservations, ...]


class Statistics(msgspec.Struct, frozen=True):
    """Result of ``SchedulerFacade.statistics()``."""

    primary: PrimaryStatistics
    tiers: tuple[TierStatistics, ...]
    faults: int  #: handlers that raised

    def counters(self) -> dict[str, int | float]:
        """Return all counters that only grow, by name: later snapshots never have less of any."""
        counters: dict[str, int | float] = {"faults": self.faults}
        counters.update((f"primary {name}", n) for name, n in asdict(self.primary.counts).items())
        for tier in self.tiers:
            counters.update((f"{tier.name} {name}", n) for name, n in asdict(tier.counts).items())
            grows = tier.backend.keys() - tier.backend_levels
            counters.update((f"{tier.name} backend {name}", tier.backend[name]) for name in grows)
        return counters
