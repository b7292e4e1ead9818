"""Exports metrics: vLLM's own names if vLLM has them, ``kvtier:`` for the rest.

vLLM takes increments of counters, values of gauges and lists of observations
with each step's statistics; Prometheus sees the sums. It polls every few seconds, and an engine
may step a hundred times a second, so while requests run only some steps have statistics.
"""

from __future__ import annotations

import math
import time
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Connection
from kvtier.vllm.releases import PROMOTION_LATENCY
from kvtier.vllm.scheduler.metric_definitions import (
    ANSWERS_PER_SECOND,
    BACKEND,
    BREAKER,
    BYTES_PER_SECOND,
    CONNECTION,
    DECISIONS,
    DROPPED,
    FAULTS,
    LATENCY,
    OWN_PRIMARY_COUNTERS,
    OWN_TIER_COUNTERS,
    SLOTS,
    SPREAD,
    VLLM_TIER_COUNTERS,
    WINDOW,
    tier_metric_definitions,
)
from kvtier.vllm.workarounds.guarded_observer import DROPS, Sample

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
        TierSpeed,
        TierStatistics,
    )
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.vllm.hosted.backend import HostingEngine
    from kvtier.vllm.hosted.stats import HostedStats
    from kvtier.vllm.workarounds.guarded_observer import GuardedObserver

REPORT_S: Final = 0.1
"""Interval between two reports while requests run and none of them ends."""

_Label = tuple[str, ...]
C = TypeVar("C")

_PRIMARY_LABEL: Final[_Label] = ("0:primary",)


class _Counter(NamedTuple):
    """One series of a counter, and the attribute of the counts that is its value."""

    metric: str
    label: _Label
    attribute: str


_PRIMARY_COUNTERS: Final = (
    *(_Counter(name, (), attribute) for name, (attribute, _) in OWN_PRIMARY_COUNTERS.items()),
    _Counter(TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES, (), "promotions_refused"),
    _Counter(TieringOffloadingMetrics.CHUNK_QUERIES, _PRIMARY_LABEL, "queries"),
    _Counter(TieringOffloadingMetrics.CHUNK_HITS, _PRIMARY_LABEL, "hits"),
)
_DECISION_COUNTERS: Final = (
    _Counter(DECISIONS, ("load",), "loads_decided"),
    _Counter(DECISIONS, ("cut",), "cuts_decided"),
    _Counter(DECISIONS, ("recompute",), "recomputes_decided"),
    _Counter(DECISIONS, ("explore",), "explorations_decided"),
)
_STORES_SKIPPED: Final = _Counter(CPUOffloadingMetrics.STORES_SKIPPED, (), "stores_skipped")
"""Only with a ``store_threshold``, as in vLLM."""


def _tier_counters(tier: str) -> list[_Counter]:
    return [
        *(_Counter(name, (tier,), attribute) for name, attribute in VLLM_TIER_COUNTERS.items()),
        *_own_tier_counters(tier),
    ]


def _own_tier_counters(tier: str) -> list[_Counter]:
    return [
        _Counter(name, (tier,), attribute) for name, (attribute, _) in OWN_TIER_COUNTERS.items()
    ]


_SLOT_GAUGES: Final[tuple[tuple[str, _Label], ...]] = (
    (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, ()),
    (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, ()),
    (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, ()),
    (SLOTS, ("free",)),
    (SLOTS, ("filling_from_gpu",)),
    (SLOTS, ("filling_from_tiers",)),
    (SLOTS, ("ready",)),
    (SLOTS, ("quarantined",)),
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
    def of(cls, counters: Sequence[_Counter]) -> _Counters[C]:
        """Return an instance that reports counts by their names."""
        series = ((each.metric, each.label) for each in counters)
        return cls(series, attrgetter(*(each.attribute for each in counters)))

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


def _faults() -> _Counters[int]:
    return _Counters([(FAULTS, ())], lambda now: (now,))


def _drops() -> _Counters[Mapping[str, int]]:
    return _Counters([(DROPPED, (what,)) for what in DROPS], itemgetter(*DROPS))


class _TierGauges:
    """Reports the changes in one tier's state."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._breakers: Mapping[str, str] = {}
        self._connection = ""
        self._speeds: Mapping[str, TierSpeed] = {}
        self._backend: Mapping[str, int] | None = None

    def report(self, sample: Sample, now: TierStatistics) -> None:
        """Report the changes since the last report."""
        if now.breakers != self._breakers:
            self._breakers = now.breakers
            for work, state in now.breakers.items():
                sample.set(BREAKER, int(BreakerState[state]), (self._tier, work))
        if now.connection != self._connection:
            self._connection = now.connection
            sample.set(CONNECTION, int(Connection[now.connection]), (self._tier,))
        if now.speeds != self._speeds:
            for work, speed in now.speeds.items():
                if speed is not self._speeds.get(work):
                    self._report_speed(sample, work, speed)
            self._speeds = now.speeds
        if now.backend is not self._backend:
            self._backend = now.backend
            for what, value in now.backend.items():
                sample.set(BACKEND, value, (self._tier, what))

    def _report_speed(self, sample: Sample, work: str, speed: TierSpeed) -> None:
        label = (self._tier, work)
        sample.set(LATENCY, speed.latency_s, label)
        sample.set(SPREAD, speed.spread, label)
        sample.set(WINDOW, speed.window, label)
        if speed.bytes_per_s:
            sample.set(BYTES_PER_SECOND, speed.bytes_per_s, label)
        elif speed.answers_per_s:
            sample.set(ANSWERS_PER_SECOND, speed.answers_per_s, (self._tier,))


class TierExporter:
    """Like ``MetricsExporter``, for one tier behind vLLM's own primary tier.

    vLLM's own manager counts the metrics that vLLM has a name for.
    """

    def __init__(
        self,
        tier: str,
        watch: GuardedObserver,
        hosted: HostedStats,
        definitions: Mapping[str, OffloadingMetricMetadata],
    ) -> None:
        """``hosted``: reports of a vLLM tier hosted inside, with its own ``definitions``."""
        self._tier = tier
        self._hosted = hosted
        self._definitions = {**definitions, **tier_metric_definitions()}
        self._watch = watch
        self._counters: _Counters[TierCounts] = _Counters.of(_own_tier_counters(tier))
        self._faults = _faults()
        self._drops = _drops()
        self._gauges = _TierGauges(tier)

    def collect(self, now: TierStatistics, faults: int) -> OffloadingConnectorStats:
        """Return the changes since the last call."""
        sample = Sample(self._definitions, self._watch)
        self._counters.report(sample, now.counts)
        self._faults.report(sample, faults)
        self._gauges.report(sample, now)
        self._watch.safely("metrics", self._hosted.report, sample)
        self._drops.report(sample, self._watch.dropped.copy())
        return sample.stats


class MetricsExporter:
    """Turns the changes since the last call into vLLM's statistics.

    Called in each step of the engine, so unchanged values cost next to nothing.
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
        self._tier_gauges = [_TierGauges(tier.name) for tier in config.tiers]
        self._slots: tuple[float | None, ...] = (None,) * len(_SLOT_GAUGES)
        self._gauges: dict[tuple[str, _Label], float] = {}
        self._seen = -1  # the amount of activity at the last call
        self._next_at = -math.inf  # while requests run, there is no report before this time

    def report_at_once(self) -> None:
        """Report all changes with this step: a user may read them."""
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
        self._primary.report(sample, now.primary.counts)
        self._faults.report(sample, now.faults)
        self._report_slots(sample, now.primary)
        for number, tier in enumerate(now.tiers):
            self._tiers[number].report(sample, tier.counts)
            self._report_jobs(sample, tier, now.primary.slot_count)
            self._tier_gauges[number].report(sample, tier)

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
        for number, (metric, label) in enumerate(_SLOT_GAUGES):
            if values[number] != self._slots[number]:
                sample.set(metric, values[number], label)
        self._slots = values

    def _report_jobs(self, sample: Sample, now: TierStatistics, slot_count: int) -> None:
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
        for name, tier in zip(self._tier_names, observations.tiers, strict=True):
            for seconds in tier.probe_seconds:
                sample.observe(TieringOffloadingMetrics.LOOKUP_ASYNC_DELAY, seconds, (name,))
            if PROMOTION_LATENCY is not None:
                for seconds, success in tier.promotion_seconds:
                    result = "success" if success else "failure"
                    sample.observe(PROMOTION_LATENCY, seconds, (name, result))

    def _set(self, sample: Sample, metric: str, value: float, label: _Label = ()) -> None:
        """Report a gauge if it has changed."""
        if self._gauges.get((metric, label)) != value:
            self._gauges[metric, label] = value
            sample.set(metric, value, label)
