"""Defines kvtier's counters, and the frozen snapshot that ``statistics()`` returns.

Actors count in the plain mutable classes, whose attributes are the counters;
no other code writes them. Counters only grow; observations are drained by
their exporter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping  # noqa: TC003 - msgspec resolves the annotations
from typing import TYPE_CHECKING, Annotated, Final, Generic, Literal, Self, TypeAlias, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from kvtier.plugin_api.backend import Outcome
from kvtier.plugin_api.metrics import Counter

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

OBSERVATIONS_MAX: Final = 10_000
"""Observations not drained are dropped beyond this many, the oldest first."""


class Counts(msgspec.Struct):
    """Counters: attributes, so that a renamed one is an error wherever it is read.

    Each is declared with the help text of its metric, from which ``kvtier/core/metrics.py`` makes
    the metric's definition, and that the row in the reference.
    """

    def snapshot(self) -> Self:
        """Return the counters as they are now."""
        return replace(self)


def _decision(outcome: str) -> Counter:
    return Counter(
        "Decisions to load a request's blocks from tiers or to recompute them, by outcome.",
        name="load_decisions",
        labels=(("outcome", outcome),),
    )


class PrimaryCounts(Counts):
    """Counted by the primary tier, in blocks unless the name says otherwise."""

    queries: Annotated[int, Counter("Blocks looked up, once a request.", in_vllm=True)] = 0
    hits: Annotated[int, Counter("Of these, blocks that were readable at once.", in_vllm=True)] = 0
    evictions: Annotated[int, Counter("Blocks evicted from the primary tier.")] = 0
    promotions_refused: Annotated[
        int, Counter("Lookups that missed as no slot was free.", in_vllm=True)
    ] = 0
    stores_skipped: Annotated[int, Counter("Blocks below store_threshold.", in_vllm=True)] = 0
    stores_dropped: Annotated[
        int, Counter("Blocks not stored because no slot of the primary tier was free.")
    ] = 0
    late_blocks_kept: Annotated[
        int,
        Counter(
            "Blocks that tiers delivered after their request had gone on; others may use them."
        ),
    ] = 0
    unknown_completions: Annotated[
        int, Counter("Completions, by the engine, of loads and stores that never began.")
    ] = 0
    policies_replaced: Annotated[
        int, Counter("Eviction policies that raised or named no block; lru took their place.")
    ] = 0
    # Decisions whether a request loads or recomputes, one per request and wait.
    loads_decided: Annotated[int, _decision("load")] = 0  # all that tiers have
    cuts_decided: Annotated[int, _decision("cut")] = 0  # the head from tiers, the tail recomputed
    recomputes_decided: Annotated[int, _decision("recompute")] = 0  # nothing from tiers
    # A few blocks, to measure how fast a tier is now.
    explorations_decided: Annotated[int, _decision("explore")] = 0
    blocks_recomputed: Annotated[
        int, Counter("Blocks recomputed, though tiers probably have them, because that is faster.")
    ] = 0
    requests_waited: Annotated[
        int,
        Counter("Requests that waited for slots held by others, because that is faster."),
    ] = 0
    prefill_expected_seconds: Annotated[
        float,
        Counter(
            "Expected duration of the steps that computed prompts.",
            name="prefill_expected_seconds",
        ),
    ] = 0.0
    prefill_seconds: Annotated[
        float, Counter("Actual duration of the same steps.", name="prefill_seconds")
    ] = 0.0
    prefill_saved_seconds: Annotated[
        float,
        Counter(
            "Time that computing the loaded tokens would have taken, at the measured speed.",
            name="prefill_saved_seconds",
        ),
    ] = 0.0


AbsenceReason: TypeAlias = Literal[
    "never_stored",
    "evicted",
    "gone",
    "not_admitted",
    "damaged",
    "load_failed",
    "tier_down",
    "no_room",
    "recomputed",
]
"""Why a request does not get a block."""


def _if_larger(times: int) -> Counter:
    return Counter(
        "Blocks recomputed or loaded again that a tier several times as large would have kept.",
        name="hits_if_larger",
        labels=(("times", str(times)),),
    )


class RequestReport(msgspec.Struct, frozen=True):
    """What tiers have done for one request. Source 0 is the primary tier, then come the others."""

    loaded_tokens: Mapping[int, int]  #: by source
    waited_s: float  #: for tiers
    missed: tuple[int, AbsenceReason] | None  #: source and reason of the end of its stored prefix


class SourceCounts(Counts):
    """Counted for the primary tier, and for each secondary tier, as a source of KV data."""

    loaded_tokens: Annotated[
        int,
        Counter(
            "Prompt tokens whose KV data the GPU loaded from the tier instead of computing it.",
            name="loaded_tokens",
        ),
    ] = 0
    wasted_blocks: Annotated[
        int,
        Counter(
            "Blocks loaded from the tier that were evicted before any request read them.",
            name="tier_loads_wasted",
        ),
    ] = 0
    hits_if_twice: Annotated[int, _if_larger(2)] = 0
    hits_if_four_times: Annotated[int, _if_larger(4)] = 0


class TierCounts(Counts):
    """Counted by one tier's link, in blocks unless the name says otherwise."""

    queries: Annotated[int, Counter("Blocks that a probe asked for.", in_vllm=True)] = 0
    hits: Annotated[int, Counter("Blocks that the tier was asked to load.", in_vllm=True)] = 0
    read_bytes: Annotated[int, Counter("Bytes loaded.", in_vllm=True)] = 0
    read_seconds: Annotated[float, Counter("Time spent on loads.", in_vllm=True)] = 0.0
    write_bytes: Annotated[int, Counter("Bytes stored.", in_vllm=True)] = 0
    write_seconds: Annotated[float, Counter("Time spent on stores.", in_vllm=True)] = 0.0
    promotion_jobs: Annotated[int, Counter("Promotions sent to the tier.")] = 0
    promotion_jobs_failed: Annotated[
        int, Counter("Promotions that lack a block.", in_vllm=True)
    ] = 0
    cascade_jobs: Annotated[int, Counter("Cascades sent to the tier.")] = 0
    cascade_jobs_failed: Annotated[int, Counter("Cascades that lost a block.", in_vllm=True)] = 0
    load_misses: Annotated[
        int, Counter("Blocks that a load did not find, though the tier had reported them.")
    ] = 0
    damaged: Annotated[
        int, Counter("Blocks whose bytes failed their check; each was treated as a miss.")
    ] = 0
    failed: Annotated[int, Counter("Blocks whose load or store failed at the medium.")] = 0
    stores_rejected: Annotated[int, Counter("Blocks that the tier had no room for.")] = 0
    stores_deferred: Annotated[
        int,
        Counter("Blocks whose write was deferred: the tier was failing, full or backlogged."),
    ] = 0
    cascades_dropped: Annotated[
        int, Counter("Deferred blocks that left host memory before the tier had room for them.")
    ] = 0
    cascades_refused: Annotated[
        int, Counter("Blocks that the tier's admission policy did not admit.")
    ] = 0
    promotions_dropped: Annotated[
        int, Counter("Blocks not loaded because the tier was failing or backlogged.")
    ] = 0
    loads_abandoned: Annotated[
        int, Counter("Blocks that requests went on without: loading took longer than computing.")
    ] = 0
    loads_cancelled: Annotated[
        int, Counter("Blocks whose load was not yet sent when their request ended or went on.")
    ] = 0
    load_expected_seconds: Annotated[
        float, Counter("Expected duration of the loads that have ended.")
    ] = 0.0
    load_taken_seconds: Annotated[
        float, Counter("Actual duration of the same loads, from when they were sent.")
    ] = 0.0
    jobs_timed_out: Annotated[
        int, Counter("Jobs that hung: the tier ended none for too long, or only later ones.")
    ] = 0
    probes_timed_out: Annotated[
        int, Counter("Probes that hung: the tier ended none for too long, or only later ones.")
    ] = 0
    late_completions: Annotated[
        int, Counter("Jobs and probes that ended after their request had gone on, or twice.")
    ] = 0
    unknown_completions: Annotated[int, Counter("Completions of jobs that never existed.")] = 0
    policies_replaced: Annotated[
        int, Counter("Eviction policies of the tier that raised; lru took their place.")
    ] = 0
    breaker_opened: Annotated[
        int, Counter("Times that a circuit breaker of the tier opened: loads, stores or probes.")
    ] = 0
    connections_lost: Annotated[int, Counter("Times that the tier lost its server.")] = 0
    sampled_stores: Annotated[int, Counter("A sample of the blocks stored: every 16th.")] = 0
    sampled_reads: Annotated[
        int, Counter("Of the sampled blocks, those that were loaded at least once.")
    ] = 0
    crashes: Annotated[
        int,
        Counter(
            "Times that the tier was disabled: it could not be opened, its code raised, or its "
            "process ended."
        ),
    ] = 0

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
    sources: tuple[SourceCounts, ...]  #: of the primary tier, then of each secondary tier
    #: Of the same: requests by the ``AbsenceReason`` for which their stored prefix ended.
    misses: tuple[Mapping[str, int], ...]


class TierSpeed(msgspec.Struct, frozen=True):
    """Speed of a tier at one kind of work, from recently completed work."""

    latency_s: float  #: also 0 while it can't be separated from the time per block
    bytes_per_s: float  #: 0 for probes, and if only the latency shows
    answers_per_s: float  #: of probes, in blocks; 0 for others
    spread: float  #: error of the estimate, as a share of it
    window: int  #: the most blocks, or keys, sent to it at once


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
    #: The backend's own, as last reported.
    backend_counters: Mapping[str, int] = msgspec.field(default_factory=dict)
    backend_gauges: Mapping[str, int] = msgspec.field(default_factory=dict)


class JobObservation(msgspec.Struct, frozen=True):
    """One job that has ended."""

    is_load: bool
    is_whole: bool  #: whether each of its blocks is done
    size_bytes: int  #: of the blocks that are done
    seconds: float  #: from sending it until its end was noticed
    tier_seconds: float  #: of these, until the tier had ended it


class TierObservations(msgspec.Struct, frozen=True):
    """Single measurements of one tier since they were last drained."""

    probe_seconds: list[float]  #: one per probe: from sending it until the answer was taken in
    jobs: list[JobObservation]


class Observations(msgspec.Struct, frozen=True):
    """Single measurements since they were last drained, for histograms."""

    allocation_sizes: list[int]  #: one per store: blocks that wanted a slot
    wait_seconds: list[float]  #: one per request that waited for tiers
    absent_seconds: list[tuple[int, float]]  #: source, and time from an eviction to a miss
    lookup_seconds: list[float]  #: a sample: time inside ``lookup``
    tiers: tuple[TierObservations, ...]


class Statistics(msgspec.Struct, frozen=True):
    """Result of ``SchedulerFacade.statistics()``."""

    primary: PrimaryStatistics
    tiers: tuple[TierStatistics, ...]
    faults: int  #: handlers that raised

    def counters(self) -> dict[str, int | float]:
        """Return all counters that only grow, by name: no later snapshot has a lower one."""
        counters: dict[str, int | float] = {"faults": self.faults}
        counters.update((f"primary {name}", n) for name, n in asdict(self.primary.counts).items())
        for number, source in enumerate(self.primary.sources):
            both = (*asdict(source).items(), *self.primary.misses[number].items())
            counters.update((f"source {number} {name}", n) for name, n in both)
        for tier in self.tiers:
            counters.update((f"{tier.name} {name}", n) for name, n in asdict(tier.counts).items())
            backend = tier.backend_counters
            counters.update((f"{tier.name} backend {name}", n) for name, n in backend.items())
        return counters
