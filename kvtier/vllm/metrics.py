"""Metrics: vLLM's own names where vLLM has them, ``kvtier:`` for the rest.

vLLM takes increments of counters, values of gauges and lists of observations
with each step's statistics; Prometheus sees the sums.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from prometheus_client import REGISTRY
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.engine.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Connection
from kvtier.plugin_api.log import log
from kvtier.vllm.watch import DROPS, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvtier.core.statistics import (
        PrimaryCounts,
        PrimaryStatistics,
        TierCounts,
        TierStatistics,
    )
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.vllm.hosted.backend import HostingEngine
    from kvtier.vllm.hosted.stats import HostedStats
    from kvtier.vllm.watch import Watch

_Label = tuple[str, ...]
C = TypeVar("C")

_PRIMARY_LABEL: Final[_Label] = ("0:primary",)
_PROMOTION_LATENCY: Final = getattr(TieringOffloadingMetrics, "PROMOTION_LATENCY", None)

_VLLM_TIER_COUNTERS: Final[Mapping[str, str]] = {
    TieringOffloadingMetrics.CHUNK_QUERIES: "queries",
    TieringOffloadingMetrics.CHUNK_HITS: "hits",
    TieringOffloadingMetrics.READ_BYTES: "read_bytes",
    TieringOffloadingMetrics.READ_TIME: "read_seconds",
    TieringOffloadingMetrics.WRITE_BYTES: "write_bytes",
    TieringOffloadingMetrics.WRITE_TIME: "write_seconds",
    TieringOffloadingMetrics.PROMOTION_JOB_FAILURES: "promotion_jobs_failed",
    TieringOffloadingMetrics.CASCADE_JOB_FAILURES: "cascade_jobs_failed",
}
"""Counts of one tier that vLLM has a name for, and that name."""

_OWN_TIER_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "kvtier:tier_promotion_jobs": ("promotion_jobs", "Promotions sent to the tier."),
    "kvtier:tier_cascade_jobs": ("cascade_jobs", "Cascades sent to the tier."),
    "kvtier:tier_absent": (
        "absent",
        "Blocks that a load did not find, though the tier had reported them.",
    ),
    "kvtier:tier_damaged": (
        "damaged",
        "Blocks whose bytes failed their check; each was treated as a miss.",
    ),
    "kvtier:tier_failed": (
        "failed",
        "Blocks whose load or store failed at the medium.",
    ),
    "kvtier:tier_full": ("full", "Blocks that a tier had no room for."),
    "kvtier:tier_cascades_put_off": (
        "cascades_put_off",
        "Blocks that a tier could not take when they came: it is sick, full or has much to do.",
    ),
    "kvtier:tier_cascades_dropped": (
        "cascades_dropped",
        "Of these, blocks that left host memory before the tier had room for them.",
    ),
    "kvtier:tier_cascades_refused": (
        "cascades_refused",
        "Blocks that the tier's admission policy found not worth writing.",
    ),
    "kvtier:tier_promotions_dropped": (
        "promotions_dropped",
        "Blocks not loaded from a tier that is sick or has too much to do.",
    ),
    "kvtier:tier_promotions_cut": (
        "promotions_cut",
        "Blocks whose load took longer than computing them; their requests went on without.",
    ),
    "kvtier:tier_promotions_withdrawn": (
        "promotions_withdrawn",
        "Blocks that were to be loaded, and were not when their request ended or went on.",
    ),
    "kvtier:tier_load_expected_seconds": (
        "load_expected_seconds",
        "Time that promotions were expected to take, of those that ended.",
    ),
    "kvtier:tier_load_seconds": (
        "load_seconds",
        "Time that the same promotions took.",
    ),
    "kvtier:tier_jobs_timed_out": (
        "jobs_timed_out",
        "Jobs that the tier was late with: it did nothing for too long, or did others first.",
    ),
    "kvtier:tier_probes_timed_out": (
        "probes_timed_out",
        "Probes that the tier was late with, likewise.",
    ),
    "kvtier:tier_late_completions": (
        "late_completions",
        "Jobs and probes that ended when nobody waited for them any more, or twice.",
    ),
    "kvtier:tier_unknown_completions": (
        "unknown_completions",
        "Completions of jobs that never were.",
    ),
    "kvtier:tier_policies_replaced": (
        "policies_replaced",
        "Eviction policies of the tier that raised; lru took their place.",
    ),
    "kvtier:tier_breaker_opened": (
        "breaker_opened",
        "How often a circuit breaker of the tier opened: for loads, stores or probes.",
    ),
    "kvtier:tier_connections_lost": (
        "connections_lost",
        "How often a tier lost the server that it needs.",
    ),
    "kvtier:tier_broke": (
        "broke",
        "How often a tier was disabled because its own code raised, or its process ended.",
    ),
}
"""Counts of one tier that only kvtier has, and what they are."""

_OWN_PRIMARY_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "kvtier:primary_evictions": (
        "evictions",
        "Blocks evicted from the primary tier.",
    ),
    "kvtier:primary_stores_dropped": (
        "stores_dropped",
        "Blocks not stored for want of room in the primary tier.",
    ),
    "kvtier:primary_late_blocks_kept": (
        "late_blocks_kept",
        "Blocks that tiers delivered when nobody waited for them any more; they serve others.",
    ),
    "kvtier:primary_policies_replaced": (
        "policies_replaced",
        "Eviction policies that raised or named no block; lru took their place.",
    ),
    "kvtier:primary_blocks_declined": (
        "blocks_declined",
        "Blocks that tiers have, as far as known, and that were recomputed as that is faster.",
    ),
    "kvtier:prefill_expected_seconds": (
        "prefill_expected_seconds",
        "Time that steps which computed prompts were expected to take.",
    ),
    "kvtier:prefill_seconds": (
        "prefill_seconds",
        "Time that the same steps took.",
    ),
    "kvtier:primary_unknown_completions": (
        "unknown_completions",
        "Loads and stores completed by the engine that never began.",
    ),
}
"""Counts of the primary tier that only kvtier has, and what they are."""


class _Counter(NamedTuple):
    """One series of a counter, and the attribute of the counts that is its value."""

    metric: str
    label: _Label
    attribute: str


_PRIMARY_COUNTERS: Final = (
    *(_Counter(name, (), attribute) for name, (attribute, _) in _OWN_PRIMARY_COUNTERS.items()),
    _Counter(TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES, (), "promotions_refused"),
    _Counter(TieringOffloadingMetrics.CHUNK_QUERIES, _PRIMARY_LABEL, "queries"),
    _Counter(TieringOffloadingMetrics.CHUNK_HITS, _PRIMARY_LABEL, "hits"),
)
_DECISIONS: Final = "kvtier:load_decisions"
_DECISION_COUNTERS: Final = (
    _Counter(_DECISIONS, ("load",), "loads_decided"),
    _Counter(_DECISIONS, ("cut",), "cuts_decided"),
    _Counter(_DECISIONS, ("recompute",), "recomputes_decided"),
    _Counter(_DECISIONS, ("explore",), "explorations_decided"),
)
_STORES_SKIPPED: Final = _Counter(CPUOffloadingMetrics.STORES_SKIPPED, (), "stores_skipped")
"""Only with a ``store_threshold``, as in vLLM."""


def _tier_counters(tier: str) -> list[_Counter]:
    return [
        *(_Counter(name, (tier,), attribute) for name, attribute in _VLLM_TIER_COUNTERS.items()),
        *_own_tier_counters(tier),
    ]


def _own_tier_counters(tier: str) -> list[_Counter]:
    return [
        _Counter(name, (tier,), attribute) for name, (attribute, _) in _OWN_TIER_COUNTERS.items()
    ]


_OWN_PREFIX: Final = "kvtier:"
_FAULTS: Final = "kvtier:faults"
_DROPPED: Final = "kvtier:samples_dropped"
_SLOTS: Final = "kvtier:primary_slots"
_SLOT_GAUGES: Final[tuple[tuple[str, _Label], ...]] = (
    (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, ()),
    (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, ()),
    (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, ()),
    (_SLOTS, ("free",)),
    (_SLOTS, ("filling_from_gpu",)),
    (_SLOTS, ("filling_from_tiers",)),
    (_SLOTS, ("ready",)),
    (_SLOTS, ("quarantined",)),
)
_BREAKER: Final = "kvtier:tier_breaker_state"
_CONNECTION: Final = "kvtier:tier_connection_state"
_BACKEND: Final = "kvtier:tier_backend"


def metric_definitions(_extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that only kvtier has, by name."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        **tier_metric_definitions(),
        _SLOTS: OffloadingGaugeMetadata(
            documentation="Slots of the primary tier, by state.", labelnames=("state",)
        ),
        _DECISIONS: OffloadingCounterMetadata(
            documentation="Decisions whether a request loads what tiers have, by outcome.",
            labelnames=("outcome",),
        ),
    }
    for name, (_, text) in _OWN_PRIMARY_COUNTERS.items():
        definitions[name] = OffloadingCounterMetadata(documentation=text)
    return definitions


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return those of the metrics that are about tiers and not about a primary tier, by name."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        _FAULTS: OffloadingCounterMetadata(documentation="Message handlers that raised."),
        _DROPPED: OffloadingCounterMetadata(
            documentation="Parts of metrics and events that were dropped, by what was wrong.",
            labelnames=("what",),
        ),
        _BREAKER: OffloadingGaugeMetadata(
            documentation="Circuit breaker for probes, loads or stores: 0 closed (in use), 1 open, "
            "2 half-open, 3 disabled.",
            labelnames=("tier", "work"),
        ),
        _CONNECTION: OffloadingGaugeMetadata(
            documentation="Connection to a tier's server, if it has one: 0 up, 1 not yet, 2 gone.",
            labelnames=("tier",),
        ),
        _BACKEND: OffloadingGaugeMetadata(
            documentation="What the tier's backend counts itself, by its own names.",
            labelnames=("tier", "count"),
        ),
    }
    for name, (_, text) in _OWN_TIER_COUNTERS.items():
        definitions[name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
    return definitions


def unregister_own_metrics() -> None:
    """Let go of an earlier engine's metrics, so that a second one in this process may start.

    vLLM does the same at each start, for names that begin with ``vllm:`` only.
    """
    try:
        for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
            if getattr(collector, "_name", "").startswith(_OWN_PREFIX):
                REGISTRY.unregister(collector)
    except Exception:  # noqa: BLE001 - another version's registry may be another
        log.error("metrics of an earlier engine in this process stay registered", exc_info=True)


class _Counters(Generic[C]):
    """Reports by how much the counters of one source have grown since the last time."""

    def __init__(
        self, series: Iterable[tuple[str, _Label]], read: Callable[[C], tuple[float, ...]]
    ) -> None:
        """``read``: returns the value of each of the ``series``."""
        self._series = tuple(series)
        self._read = read
        self._reported: list[float | None] = [None] * len(self._series)
        self._now: C | None = None

    @classmethod
    def of(cls, counters: Sequence[_Counter]) -> _Counters[C]:
        """Return what reports counts by their names."""
        series = ((each.metric, each.label) for each in counters)
        return cls(series, attrgetter(*(each.attribute for each in counters)))

    def report(self, sample: Sample, now: C) -> None:
        """Report what ``now`` has more. One that fell counts on from where it is now."""
        if now == self._now:
            return
        reported = self._reported
        for number, value in enumerate(self._read(now)):
            before = reported[number]
            if value != before:
                metric, label = self._series[number]
                sample.count(metric, value - (before or 0), label)
                # Afterwards: if that raises, it is reported the next time.
                reported[number] = value
        self._now = now


def _faults() -> _Counters[int]:
    return _Counters([(_FAULTS, ())], lambda now: (now,))


def _drops() -> _Counters[Mapping[str, int]]:
    return _Counters([(_DROPPED, (what,)) for what in DROPS], itemgetter(*DROPS))


class TierExporter:
    """As ``MetricsExporter``, of one tier behind vLLM's own primary tier.

    What vLLM has a name for its own manager counts.
    """

    def __init__(
        self,
        tier: str,
        watch: Watch,
        hosted: HostedStats,
        definitions: Mapping[str, OffloadingMetricMetadata],
    ) -> None:
        """``hosted``: what one of vLLM's tiers inside reports, with its own ``definitions``."""
        self._tier = tier
        self._hosted = hosted
        self._definitions = {**definitions, **tier_metric_definitions()}
        self._watch = watch
        self._counters: _Counters[TierCounts] = _Counters.of(_own_tier_counters(tier))
        self._faults = _faults()
        self._drops = _drops()
        self._breakers: Mapping[str, str] = {}
        self._connection = ""
        self._backend: Mapping[str, int] | None = None

    def take(self, now: TierStatistics, faults: int) -> OffloadingConnectorStats:
        """Return what has changed since the last call."""
        sample = Sample(self._definitions, self._watch)
        self._counters.report(sample, now.counts)
        self._faults.report(sample, faults)
        if now.breakers != self._breakers:
            self._breakers = now.breakers
            for work, state in now.breakers.items():
                sample.set(_BREAKER, int(BreakerState[state]), (self._tier, work))
        if now.connection != self._connection:
            self._connection = now.connection
            sample.set(_CONNECTION, int(Connection[now.connection]), (self._tier,))
        if now.backend is not self._backend:
            self._backend = now.backend
            for what, value in now.backend.items():
                sample.set(_BACKEND, value, (self._tier, what))
        self._watch.safely("metrics", self._hosted.report, sample)
        self._drops.report(sample, self._watch.dropped.copy())
        return sample.stats


class MetricsExporter:
    """Turns what has changed since the last call into vLLM's statistics.

    Called in each step of the engine, so what stands still costs next to nothing.
    The first sample has every counter, at 0: a rate or an alert that only sees a
    series from its first event on misses that event.
    """

    def __init__(
        self,
        facade: SchedulerFacade,
        config: RuntimeConfig,
        definitions: Mapping[str, OffloadingMetricMetadata],
        watch: Watch,
        hosting: HostingEngine | None = None,
    ) -> None:
        """``hosting``: what hosted tiers tell of themselves is there."""
        self._facade = facade
        self._hosting = hosting
        self._definitions = definitions
        self._watch = watch
        skipped = [_STORES_SKIPPED] if config.store_threshold >= 2 else []
        self._primary: _Counters[PrimaryCounts] = _Counters.of(
            [*_PRIMARY_COUNTERS, *_DECISION_COUNTERS, *skipped]
        )
        self._tiers: list[_Counters[TierCounts]] = [
            _Counters.of(_tier_counters(tier.name)) for tier in config.tiers
        ]
        self._faults = _faults()
        self._drops = _drops()
        self._tier_names = [tier.name for tier in config.tiers]
        self._backends: list[Mapping[str, int] | None] = [None for _ in config.tiers]
        self._slots: tuple[float | None, ...] = (None,) * len(_SLOT_GAUGES)
        self._gauges: dict[tuple[str, _Label], float] = {}

    def take(self) -> OffloadingConnectorStats:
        """Return the increments, gauges and observations since the last call. Never raises.

        A part that fails is left out, and counted.
        """
        sample = Sample(self._definitions, self._watch)
        safely = self._watch.safely
        safely("metrics", self._take_state, sample)
        safely("metrics", self._take_observations, sample)
        if self._hosting is not None:
            safely("metrics", self._hosting.stats.report, sample)
        # The last, since the others add to it.
        safely("metrics", self._take_drops, sample)
        return sample.stats

    def labels(self, tier: str) -> Mapping[str, Any]:
        """Return the labels that a hosted tier gives of itself; of another, none."""
        return {} if self._hosting is None else self._hosting.labels_of.get(tier, {})

    def _take_state(self, sample: Sample) -> None:
        now = self._facade.statistics()
        self._primary.report(sample, now.primary.counts)
        self._faults.report(sample, now.faults)
        self._take_slots(sample, now.primary)
        for number, tier in enumerate(now.tiers):
            self._tiers[number].report(sample, tier.counts)
            self._take_jobs(sample, tier, now.primary.slot_count)
            if tier.backend is not self._backends[number]:
                self._backends[number] = tier.backend
                for what, value in tier.backend.items():
                    self._set(sample, _BACKEND, value, (tier.name, what))

    def _take_drops(self, sample: Sample) -> None:
        self._drops.report(sample, self._watch.dropped.copy())

    def _take_slots(self, sample: Sample, now: PrimaryStatistics) -> None:
        writing = (now.filling_from_gpu_slots + now.filling_from_tiers_slots) / now.slot_count
        reading = now.pinned_slots / now.slot_count
        values = (
            writing + reading,
            writing,
            reading,
            now.free_slots,
            now.filling_from_gpu_slots,
            now.filling_from_tiers_slots,
            now.ready_slots,
            now.quarantined_slots,
        )
        if values == self._slots:
            return
        for number, (metric, label) in enumerate(_SLOT_GAUGES):
            if values[number] != self._slots[number]:
                sample.set(metric, values[number], label)
        self._slots = values

    def _take_jobs(self, sample: Sample, now: TierStatistics, slot_count: int) -> None:
        names = TieringOffloadingMetrics
        label = (now.name,)
        self._set(sample, names.PRIMARY_WRITE_USAGE_PERC, now.promotion_slots / slot_count, label)
        self._set(sample, names.PRIMARY_READ_USAGE_PERC, now.cascade_slots / slot_count, label)
        self._set(sample, names.ACTIVE_PROMOTION_JOBS, now.promotion_jobs_in_flight, label)
        self._set(sample, names.ACTIVE_CASCADE_JOBS, now.cascade_jobs_in_flight, label)
        for work, state in now.breakers.items():
            self._set(sample, _BREAKER, int(BreakerState[state]), (now.name, work))
        self._set(sample, _CONNECTION, int(Connection[now.connection]), label)

    def _take_observations(self, sample: Sample) -> None:
        observations = self._facade.take_observations()
        for size in observations.allocation_sizes:
            sample.observe(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        for seconds in observations.lookup_seconds:
            sample.observe(TieringOffloadingMetrics.LOOKUP_SYNC_DELAY, seconds, _PRIMARY_LABEL)
        for name, tier in zip(self._tier_names, observations.tiers, strict=True):
            for seconds in tier.probe_seconds:
                sample.observe(TieringOffloadingMetrics.LOOKUP_ASYNC_DELAY, seconds, (name,))
            if _PROMOTION_LATENCY is not None:
                for seconds, success in tier.promotion_seconds:
                    result = "success" if success else "failure"
                    sample.observe(_PROMOTION_LATENCY, seconds, (name, result))

    def _set(self, sample: Sample, metric: str, value: float, label: _Label = ()) -> None:
        """Report a gauge that has moved."""
        if self._gauges.get((metric, label)) != value:
            self._gauges[metric, label] = value
            sample.set(metric, value, label)
