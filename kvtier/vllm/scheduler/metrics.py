"""Exports metrics: vLLM's own names if vLLM has them, ``kvtier:`` for the rest.

vLLM takes increments of counters, values of gauges and lists of observations
with each step's statistics; Prometheus sees the sums. It polls every few seconds, and an engine
may step a hundred times a second, so while requests run only some steps have statistics.
"""

from __future__ import annotations

import math
import time
from hashlib import blake2b
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_args

import vllm
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier import __version__
from kvtier.core.metrics import (
    ABSENT_SECONDS,
    BREAKER,
    BYTES_PER_SECOND,
    CAPACITY,
    CONNECTION,
    DROPPED,
    ERROR_RATIO,
    FAULTS,
    INFLIGHT_LIMIT,
    INFO,
    LAST_FAULT,
    LATENCY,
    LOAD_BYTES,
    LOAD_SECONDS,
    LOOKUPS_PER_SECOND,
    MISSES,
    PRIMARY_TIER,
    RECORDS_DROPPED,
    SLOTS,
    STORE_BYTES,
    STORE_SECONDS,
    USED,
    WAIT_SECONDS,
    Series,
    TierFault,
    backend_series,
    counter_series,
)
from kvtier.core.statistics import AbsenceReason, PrimaryCounts, SourceCounts, TierCounts
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Connection
from kvtier.plugin_api.metrics import Gauge
from kvtier.settings.plugins import backend_class
from kvtier.vllm.releases import PROMOTION_LATENCY
from kvtier.vllm.scheduler.metric_definitions import VLLM_TIER_COUNTERS, tier_metric_definitions
from kvtier.vllm.workarounds.guarded_observer import DROPS, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvtier.core.statistics import (
        JobObservation,
        PrimaryStatistics,
        TierSpeed,
        TierStatistics,
    )
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
    from kvtier.vllm.hosted.backend import HostingEngine
    from kvtier.vllm.hosted.stats import HostedStats
    from kvtier.vllm.workarounds.guarded_observer import GuardedObserver

REPORT_S: Final = 0.1
"""Interval between two reports while requests run."""

_Label = tuple[str, ...]
C = TypeVar("C")

_PRIMARY_LABEL: Final[_Label] = (PRIMARY_TIER,)

_FAULTS: Final = get_args(TierFault)
_read_faults: Final[Callable[[TierCounts], tuple[int, ...]]] = attrgetter(*_FAULTS)

_PRIMARY_COUNTERS: Final = (
    *counter_series(PrimaryCounts, "primary_"),
    Series(TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES, (), "promotions_refused"),
    Series(TieringOffloadingMetrics.CHUNK_QUERIES, _PRIMARY_LABEL, "queries"),
    Series(TieringOffloadingMetrics.CHUNK_HITS, _PRIMARY_LABEL, "hits"),
)
_STORES_SKIPPED: Final = Series(CPUOffloadingMetrics.STORES_SKIPPED, (), "stores_skipped")
"""Reported only with a ``store_threshold``, as in vLLM."""


def _tier_counters(tier: str) -> list[Series]:
    of_vllm = VLLM_TIER_COUNTERS.items()
    return [
        *(Series(name, (tier,), attribute) for name, attribute in of_vllm),
        *counter_series(TierCounts, "tier_", (tier,)),
    ]


_SLOT_GAUGES: Final[tuple[tuple[str, _Label], ...]] = (
    (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, ()),
    (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, ()),
    (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, ()),
    (SLOTS.name, ("free",)),
    (SLOTS.name, ("filling_from_gpu",)),
    (SLOTS.name, ("filling_from_tiers",)),
    (SLOTS.name, ("ready",)),
    (SLOTS.name, ("quarantined",)),
)


class _Counters(Generic[C]):
    """Reports by how much the counters of one source have grown since the last report."""

    def __init__(
        self, series: Iterable[tuple[str, _Label]], read: Callable[[C], tuple[float, ...]]
    ) -> None:
        """``read``: returns the value of each of the ``series``."""
        self._series = tuple(series)
        self._read = read
        self._reported: list[float | None] = [None] * len(self._series)
        self._now: C | None = None

    @classmethod
    def of(cls, counters: Sequence[Series]) -> _Counters[C]:
        """Return an instance that reports counts by their names."""
        series = ((each.metric, each.label) for each in counters)
        return cls(series, attrgetter(*(each.attribute for each in counters)))

    @classmethod
    def of_mapping(cls, counters: Sequence[Series]) -> _Counters[Mapping[str, int]]:
        """Return an instance that reports counts in a mapping; a missing one is 0."""
        series = ((each.metric, each.label) for each in counters)
        names = [each.attribute for each in counters]
        return _Counters(series, lambda now: tuple(now.get(name, 0) for name in names))

    def has_news(self, now: C) -> bool:
        """Return whether ``now`` differs from the last report."""
        return now != self._now

    def report(self, sample: Sample, now: C) -> None:
        """Report the increase in ``now``. A counter that fell continues from its present value."""
        if not self.has_news(now):
            return
        reported = self._reported
        for number, value in enumerate(self._read(now)):
            before = reported[number]
            if value != before:
                metric, label = self._series[number]
                sample.count(metric, value - (before or 0), label)
                # Afterwards: if ``count`` raises, the value is reported the next time.
                reported[number] = value
        self._now = now


def _counter(metric: str) -> _Counters[int]:
    return _Counters([(metric, ())], lambda now: (now,))


def _misses(label: _Label) -> _Counters[Mapping[str, int]]:
    reasons = get_args(AbsenceReason)
    return _Counters.of_mapping([Series(MISSES.name, (*label, each), each) for each in reasons])


def _drops() -> _Counters[Mapping[str, int]]:
    return _Counters([(DROPPED.name, (what,)) for what in DROPS], itemgetter(*DROPS))


class _Tier:
    """Reports one tier's counters, gauges, and single jobs."""

    def __init__(self, name: str, kind: str, counters: Sequence[Series]) -> None:
        """``kind``: the type, which has metrics of its own."""
        self.name = name
        self._label = (name,)
        self._counters: _Counters[TierCounts] = _Counters.of(counters)
        metrics = backend_class(kind).metrics
        is_gauge = {each: isinstance(metric, Gauge) for each, metric in metrics.items()}
        series = backend_series(kind, metrics, name)
        self._backend = _Counters.of_mapping(
            [each for each in series if not is_gauge[each.attribute]]
        )
        self._gauges = {each.attribute: each for each in series if is_gauge[each.attribute]}
        self._fault_counts = (0,) * len(_FAULTS)
        self._breakers: Mapping[str, str] = {}
        self._connection = ""
        self._speeds: Mapping[str, TierSpeed] = {}
        self._backend_gauges: Mapping[str, int] = {}

    def report(self, sample: Sample, now: TierStatistics) -> None:
        """Report the changes since the last report."""
        self._counters.report(sample, now.counts)
        self._report_faults(sample, _read_faults(now.counts))
        self._backend.report(sample, now.backend_counters)
        if now.breakers != self._breakers:
            self._breakers = now.breakers
            for work, state in now.breakers.items():
                sample.set(BREAKER.name, int(BreakerState[state]), (*self._label, work))
        if now.connection != self._connection:
            self._connection = now.connection
            sample.set(CONNECTION.name, int(Connection[now.connection]), self._label)
        if now.speeds != self._speeds:
            for work, speed in now.speeds.items():
                if speed is not self._speeds.get(work):
                    self._report_speed(sample, work, speed)
            self._speeds = now.speeds
        if now.backend_gauges is not self._backend_gauges:
            self._backend_gauges = now.backend_gauges
            for name in self._gauges.keys() & now.backend_gauges:
                series = self._gauges[name]
                sample.set(series.metric, now.backend_gauges[name], series.label)

    def _report_faults(self, sample: Sample, counts: tuple[int, ...]) -> None:
        if counts == self._fault_counts:
            return
        now_s = time.time()
        for fault, before, count in zip(_FAULTS, self._fault_counts, counts, strict=True):
            if count > before:
                sample.set(LAST_FAULT.name, now_s, (*self._label, fault))
        self._fault_counts = counts

    def _report_speed(self, sample: Sample, work: str, speed: TierSpeed) -> None:
        label = (*self._label, work)
        sample.set(LATENCY.name, speed.latency_s, label)
        sample.set(ERROR_RATIO.name, speed.spread, label)
        sample.set(INFLIGHT_LIMIT.name, speed.window, label)
        if speed.bytes_per_s:
            sample.set(BYTES_PER_SECOND.name, speed.bytes_per_s, label)
        elif speed.answers_per_s:
            sample.set(LOOKUPS_PER_SECOND.name, speed.answers_per_s, self._label)

    def report_jobs(self, sample: Sample, jobs: Iterable[JobObservation]) -> None:
        """Report jobs that have ended."""
        for job in jobs:
            seconds, size = (
                (LOAD_SECONDS, LOAD_BYTES) if job.is_load else (STORE_SECONDS, STORE_BYTES)
            )
            sample.observe(seconds.name, job.tier_seconds, self._label)
            sample.observe(size.name, job.size_bytes, self._label)


class TierExporter:
    """Like ``MetricsExporter``, for one tier behind vLLM's own primary tier.

    vLLM's own manager counts the metrics that vLLM has a name for.
    """

    def __init__(
        self,
        tier: TierConfig,
        watch: GuardedObserver,
        hosted: HostedStats,
        definitions: Mapping[str, OffloadingMetricMetadata],
    ) -> None:
        """``hosted``: reports of a vLLM tier hosted inside, with its own ``definitions``."""
        self._hosted = hosted
        self._definitions = {**definitions, **tier_metric_definitions([{"type": tier.type}])}
        self._watch = watch
        own = counter_series(TierCounts, "tier_", (tier.name,))
        self._tier = _Tier(tier.name, tier.type, own)
        self._faults = _counter(FAULTS.name)
        self._drops = _drops()

    def collect(
        self, now: TierStatistics, jobs: Iterable[JobObservation], faults: int
    ) -> OffloadingConnectorStats:
        """Return the changes since the last call, with the jobs that have ended since then."""
        sample = Sample(self._definitions, self._watch)
        self._faults.report(sample, faults)
        self._tier.report(sample, now)
        self._tier.report_jobs(sample, jobs)
        self._watch.safely("metrics", self._hosted.report, sample)
        self._drops.report(sample, self._watch.dropped.copy())
        return sample.stats


class MetricsExporter:
    """Turns the changes since the last call into vLLM's statistics.

    Called in each step of the engine, so unchanged values must cost next to nothing.
    The first sample has every counter, at 0: a rate or an alert that only sees a
    series from its first event on misses that event.
    """

    def __init__(
        self,
        facade: SchedulerFacade,
        config: RuntimeConfig,
        definitions: Mapping[str, OffloadingMetricMetadata],
        watch: GuardedObserver,
        hosting: HostingEngine | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hosting``: has the metrics and labels of hosted tiers. ``clock``: for tests."""
        self._clock = clock
        self._facade = facade
        self._hosting = hosting
        self._definitions = definitions
        self._watch = watch
        self._config = config
        skipped = [_STORES_SKIPPED] if config.store_threshold >= 2 else []
        self._primary: _Counters[PrimaryCounts] = _Counters.of([*_PRIMARY_COUNTERS, *skipped])
        self._tiers = [
            _Tier(tier.name, tier.type, _tier_counters(tier.name)) for tier in config.tiers
        ]
        self._source_labels = [_PRIMARY_LABEL, *((tier.name,) for tier in config.tiers)]
        self._sources: list[_Counters[SourceCounts]] = [
            _Counters.of(counter_series(SourceCounts, "", label)) for label in self._source_labels
        ]
        self._misses = [_misses(label) for label in self._source_labels]
        self._faults = _counter(FAULTS.name)
        self._drops = _drops()
        self._records_dropped: Callable[[], int] = lambda: 0
        self._records = _counter(RECORDS_DROPPED.name)
        self._slots: tuple[float | None, ...] = (None,) * len(_SLOT_GAUGES)
        self._gauges: dict[tuple[str, _Label], float] = {}
        self._seen = -1  # the amount of activity at the last call
        self._next_at = -math.inf  # while requests run, there is no report before this time

    def count_records(self, dropped: Callable[[], int]) -> None:
        """Report how many records were dropped, too, for an engine that records its requests."""
        self._records_dropped = dropped

    def report_at_once(self) -> None:
        """Report all changes with this step."""
        self._next_at = -math.inf

    def collect(self, *, is_busy: bool) -> OffloadingConnectorStats | None:
        """Return the increments, gauges and observations since the last report. Never raises.

        A part that fails is left out, and counted. None: nothing has changed, as at most steps, or
        requests run (``is_busy``) and the last report is recent.
        """
        now = self._clock()
        if is_busy and now < self._next_at:
            return None
        self._next_at = now + REPORT_S
        before, self._seen = self._seen, self._facade.activity
        is_told = self._hosting is not None and self._hosting.stats.has_news
        if before == self._seen and not (is_told or self._drops.has_news(self._watch.dropped)):
            return None
        sample = Sample(self._definitions, self._watch)
        safely = self._watch.safely
        safely("metrics", self._report_state, sample)
        safely("metrics", self._report_observations, sample)
        if self._hosting is not None:
            safely("metrics", self._hosting.stats.report, sample)
        # Last, since the others add to it.
        safely("metrics", self._report_drops, sample)
        return sample.stats

    def labels(self, tier: str) -> Mapping[str, Any]:
        """Return the labels that a hosted tier reports; none for another tier."""
        return {} if self._hosting is None else self._hosting.labels_of.get(tier, {})

    def _report_state(self, sample: Sample) -> None:
        now = self._facade.statistics()
        if self._slots[0] is None:
            self._report_once(sample, now.primary.slot_count)
        self._primary.report(sample, now.primary.counts)
        for counters, source in zip(self._sources, now.primary.sources, strict=True):
            counters.report(sample, source)
        for misses, reasons in zip(self._misses, now.primary.misses, strict=True):
            misses.report(sample, reasons)
        self._faults.report(sample, now.faults)
        self._records.report(sample, self._records_dropped())
        self._report_slots(sample, now.primary)
        for reported, tier in zip(self._tiers, now.tiers, strict=True):
            reported.report(sample, tier)
            self._report_slots_of(sample, tier, now.primary.slot_count)

    def _report_drops(self, sample: Sample) -> None:
        self._drops.report(sample, self._watch.dropped.copy())

    def _report_slots(self, sample: Sample, now: PrimaryStatistics) -> None:
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
        used_bytes = (now.slot_count - now.free_slots) * self._config.block_bytes
        self._set(sample, USED.name, used_bytes, _PRIMARY_LABEL)
        for number, (metric, label) in enumerate(_SLOT_GAUGES):
            if values[number] != self._slots[number]:
                sample.set(metric, values[number], label)
        self._slots = values

    def _report_once(self, sample: Sample, slot_count: int) -> None:
        """Report gauges that stay as they are."""
        config = self._config
        named = blake2b(repr(config).encode(), digest_size=4).hexdigest()
        tiers = ",".join(tier.name for tier in config.tiers)
        self._set(sample, INFO.name, 1, (__version__, vllm.__version__, tiers, named))
        primary_bytes = slot_count * config.block_bytes
        self._set(sample, CAPACITY.name, primary_bytes, _PRIMARY_LABEL)

    def _report_slots_of(self, sample: Sample, now: TierStatistics, slot_count: int) -> None:
        names = TieringOffloadingMetrics
        label = (now.name,)
        self._set(sample, names.PRIMARY_WRITE_USAGE_PERC, now.promotion_slots / slot_count, label)
        self._set(sample, names.PRIMARY_READ_USAGE_PERC, now.cascade_slots / slot_count, label)
        self._set(sample, names.ACTIVE_PROMOTION_JOBS, now.promotion_jobs_in_flight, label)
        self._set(sample, names.ACTIVE_CASCADE_JOBS, now.cascade_jobs_in_flight, label)

    def _report_observations(self, sample: Sample) -> None:
        observations = self._facade.drain_observations()
        for size in observations.allocation_sizes:
            sample.observe(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        for seconds in observations.lookup_seconds:
            sample.observe(TieringOffloadingMetrics.LOOKUP_SYNC_DELAY, seconds, _PRIMARY_LABEL)
        for seconds in observations.wait_seconds:
            sample.observe(WAIT_SECONDS.name, seconds)
        for number, seconds in observations.absent_seconds:
            sample.observe(ABSENT_SECONDS.name, seconds, self._source_labels[number])
        for reported, tier in zip(self._tiers, observations.tiers, strict=True):
            name = reported.name
            for seconds in tier.probe_seconds:
                sample.observe(TieringOffloadingMetrics.LOOKUP_ASYNC_DELAY, seconds, (name,))
            reported.report_jobs(sample, tier.jobs)
            if PROMOTION_LATENCY is not None:
                for job in tier.jobs:
                    if job.is_load:
                        result = "success" if job.is_whole else "failure"
                        sample.observe(PROMOTION_LATENCY, job.seconds, (name, result))

    def _set(self, sample: Sample, metric: str, value: float, label: _Label = ()) -> None:
        """Report a gauge if it has changed."""
        if self._gauges.get((metric, label)) != value:
            self._gauges[metric, label] = value
            sample.set(metric, value, label)
