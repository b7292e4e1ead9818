"""Metrics: vLLM's own names where vLLM has them, ``kvtier:`` for the rest.

vLLM takes increments of counters, values of gauges and lists of observations
with each step's statistics; Prometheus sees the sums.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.states import BreakerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvtier.config import RuntimeConfig
    from kvtier.facade import SchedulerFacade
    from kvtier.metrics import PrimaryStatistics, TierStatistics

_Label = tuple[str, ...]

_PRIMARY_LABEL: Final[_Label] = ("0:primary",)
_PROMOTION_LATENCY: Final = getattr(TieringOffloadingMetrics, "PROMOTION_LATENCY", None)

_VLLM_TIER_COUNTERS: Final = {
    "queries": TieringOffloadingMetrics.CHUNK_QUERIES,
    "hits": TieringOffloadingMetrics.CHUNK_HITS,
    "read_bytes": TieringOffloadingMetrics.READ_BYTES,
    "read_seconds": TieringOffloadingMetrics.READ_TIME,
    "write_bytes": TieringOffloadingMetrics.WRITE_BYTES,
    "write_seconds": TieringOffloadingMetrics.WRITE_TIME,
    "promotion_jobs_failed": TieringOffloadingMetrics.PROMOTION_JOB_FAILURES,
    "cascade_jobs_failed": TieringOffloadingMetrics.CASCADE_JOB_FAILURES,
}
"""Counts of one tier that vLLM has a name for: name in ``TierCounts`` → metric."""

_OWN_TIER_COUNTERS: Final = {
    "absent": "Blocks that a load did not find, though the tier was said to have them.",
    "damaged": "Blocks whose bytes failed their check; each was treated as a miss.",
    "failed": "Blocks whose load or store failed at the medium.",
    "full": "Blocks that a tier had no room for.",
    "cascades_dropped": "Blocks not sent to a tier that is sick, full or has too much to do.",
    "cascades_refused": "Blocks that the tier's admission policy found not worth writing.",
    "promotions_dropped": "Blocks not loaded from a tier that is sick or has too much to do.",
    "jobs_timed_out": "Jobs that had not ended at their deadline.",
    "probes_timed_out": "Probes that had no answer at their deadline.",
    "late_completions": "Jobs and probes that ended after their deadline, or twice.",
    "unknown_completions": "Completions of jobs that never were.",
    "breaker_opened": "How often a tier was left alone after failures in a row.",
    "broke": "How often a tier was cut off because its own code raised, or its process ended.",
}

_OWN_PRIMARY_COUNTERS: Final = {
    "evictions": "Blocks evicted from the primary tier.",
    "stores_dropped": "Blocks not stored for want of room in the primary tier.",
    "unknown_completions": "Loads and stores completed by the engine that never began.",
}

_PRIMARY_COUNTERS: Final[Mapping[str, tuple[str, _Label]]] = {
    **{name: (f"kvtier:primary_{name}", ()) for name in _OWN_PRIMARY_COUNTERS},
    "promotions_refused": (TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES, ()),
    "queries": (TieringOffloadingMetrics.CHUNK_QUERIES, _PRIMARY_LABEL),
    "hits": (TieringOffloadingMetrics.CHUNK_HITS, _PRIMARY_LABEL),
}
"""Counts of the primary tier: name in ``PrimaryCounts`` → metric and labels."""

_TIER_COUNTERS: Final = {
    **_VLLM_TIER_COUNTERS,
    **{name: f"kvtier:tier_{name}" for name in _OWN_TIER_COUNTERS},
}

_SLOT_STATES: Final = {
    (state,): f"{state}_slots"
    for state in ("free", "filling_from_gpu", "filling_from_tiers", "ready", "quarantined")
}
"""Label of a gauge → attribute of ``PrimaryStatistics``."""

_OWN_PREFIX: Final = "kvtier:"
_FAULTS: Final = "kvtier:faults"
_SLOTS: Final = "kvtier:primary_slots"
_BREAKER: Final = "kvtier:tier_breaker_state"
_BACKEND: Final = "kvtier:tier_backend"

BACKEND_S: Final = 1.0
"""How often backends are asked for their own counters: they may have to wait for a lock."""


def metric_definitions(_extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that only kvtier has, by name."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        _FAULTS: OffloadingCounterMetadata(documentation="Message handlers that raised."),
        _SLOTS: OffloadingGaugeMetadata(
            documentation="Slots of the primary tier, by state.", labelnames=("state",)
        ),
        _BREAKER: OffloadingGaugeMetadata(
            documentation="0: tier in use, 1: left alone, 2: on trial, 3: cut off.",
            labelnames=("tier",),
        ),
        _BACKEND: OffloadingGaugeMetadata(
            documentation="What the tier's backend counts itself, by its own names.",
            labelnames=("tier", "count"),
        ),
    }
    for name, text in _OWN_TIER_COUNTERS.items():
        definitions[f"kvtier:tier_{name}"] = OffloadingCounterMetadata(
            documentation=text, labelnames=("tier",)
        )
    for name, text in _OWN_PRIMARY_COUNTERS.items():
        definitions[f"kvtier:primary_{name}"] = OffloadingCounterMetadata(documentation=text)
    return definitions


def unregister_own_metrics() -> None:
    """Let go of an earlier engine's metrics, so that a second one in this process may start.

    vLLM does the same at each start, for names that begin with ``vllm:`` only.
    """
    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
        if getattr(collector, "_name", "").startswith(_OWN_PREFIX):
            REGISTRY.unregister(collector)


class MetricsExporter:
    """Turns what has changed since the last call into vLLM's statistics.

    Called in each step of the engine, so what stands still costs next to nothing.
    """

    def __init__(self, facade: SchedulerFacade, config: RuntimeConfig) -> None:
        self._facade = facade
        self._primary_metrics = dict(_PRIMARY_COUNTERS)
        if config.store_threshold >= 2:
            self._primary_metrics["stores_skipped"] = (CPUOffloadingMetrics.STORES_SKIPPED, ())
        self._tier_metrics = [
            {name: (metric, (tier.name,)) for name, metric in _TIER_COUNTERS.items()}
            for tier in config.tiers
        ]
        self._tier_names = [tier.name for tier in config.tiers]
        self._backends_asked = -BACKEND_S
        self._faults = 0
        self._counts: list[Mapping[str, float]] = [{} for _ in range(1 + len(config.tiers))]
        self._slots: tuple[int, ...] = ()
        self._gauges: dict[tuple[str, _Label], float] = {}

    def take(self) -> OffloadingConnectorStats:
        """Return the increments, gauges and observations since the last call."""
        stats = OffloadingConnectorStats()
        now = self._facade.engine_statistics()
        if now.faults > self._faults:
            stats.increase_counter(_FAULTS, now.faults - self._faults)
            self._faults = now.faults
        self._count(stats, 0, now.primary.counts, self._primary_metrics)
        self._take_slots(stats, now.primary)
        for number, tier in enumerate(now.tiers):
            self._count(stats, 1 + number, tier.counts, self._tier_metrics[number])
            self._take_jobs(stats, tier, now.primary.slot_count)
        self._take_observations(stats)
        if self._tier_names:
            self._take_backends(stats)
        return stats

    def _take_backends(self, stats: OffloadingConnectorStats) -> None:
        now = time.monotonic()
        if now - self._backends_asked < BACKEND_S:
            return
        self._backends_asked = now
        for name, counts in zip(self._tier_names, self._facade.backend_counters(), strict=True):
            for what, value in counts.items():
                self._set(stats, _BACKEND, value, (name, what))

    def _take_slots(self, stats: OffloadingConnectorStats, now: PrimaryStatistics) -> None:
        slots = (
            now.free_slots,
            now.filling_from_gpu_slots,
            now.filling_from_tiers_slots,
            now.quarantined_slots,
            now.pinned_slots,
        )
        if slots == self._slots:
            return
        self._slots = slots
        writing = (now.filling_from_gpu_slots + now.filling_from_tiers_slots) / now.slot_count
        reading = now.pinned_slots / now.slot_count
        self._set(stats, CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading)
        self._set(stats, CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        self._set(stats, CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading)
        for state, attribute in _SLOT_STATES.items():
            self._set(stats, _SLOTS, getattr(now, attribute), state)

    def _take_jobs(
        self, stats: OffloadingConnectorStats, now: TierStatistics, slot_count: int
    ) -> None:
        names = TieringOffloadingMetrics
        label = (now.name,)
        self._set(stats, names.PRIMARY_WRITE_USAGE_PERC, now.promotion_slots / slot_count, label)
        self._set(stats, names.PRIMARY_READ_USAGE_PERC, now.cascade_slots / slot_count, label)
        self._set(stats, names.ACTIVE_PROMOTION_JOBS, now.promotion_jobs_in_flight, label)
        self._set(stats, names.ACTIVE_CASCADE_JOBS, now.cascade_jobs_in_flight, label)
        self._set(stats, _BREAKER, int(BreakerState[now.breaker]), label)

    def _take_observations(self, stats: OffloadingConnectorStats) -> None:
        observations = self._facade.take_observations()
        for size in observations.allocation_sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        for seconds in observations.lookup_seconds:
            stats.observe_histogram(
                TieringOffloadingMetrics.LOOKUP_SYNC_DELAY, seconds, _PRIMARY_LABEL
            )
        for name, tier in zip(self._tier_names, observations.tiers, strict=True):
            for seconds in tier.probe_seconds:
                stats.observe_histogram(
                    TieringOffloadingMetrics.LOOKUP_ASYNC_DELAY, seconds, (name,)
                )
            if _PROMOTION_LATENCY is not None:
                for seconds, success in tier.promotion_seconds:
                    result = "success" if success else "failure"
                    stats.observe_histogram(_PROMOTION_LATENCY, seconds, (name, result))

    def _count(
        self,
        stats: OffloadingConnectorStats,
        actor: int,
        now: Mapping[str, float],
        metrics: Mapping[str, tuple[str, _Label]],
    ) -> None:
        """Report how much an actor's counters have grown."""
        before = self._counts[actor]
        if now == before:
            return
        self._counts[actor] = now
        for name, value in now.items() - before.items():
            grown = value - before.get(name, 0)
            if grown and name in metrics:
                metric, label = metrics[name]
                stats.increase_counter(metric, grown, label)

    def _set(
        self, stats: OffloadingConnectorStats, metric: str, value: float, label: _Label = ()
    ) -> None:
        """Report a gauge that has moved."""
        if self._gauges.get((metric, label)) != value:
            self._gauges[metric, label] = value
            stats.set_gauge(metric, value, label)
