"""Metrics: vLLM's own names where vLLM has them, ``kvtier:`` for the rest.

vLLM takes increments of counters, values of gauges and lists of observations
with each step's statistics; Prometheus sees the sums.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.engine.circuit_breaker import BreakerState
from kvtier.plugin_api.log import log
from kvtier.vllm.watch import DROPS, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvtier.core.statistics import PrimaryStatistics, TierStatistics
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.vllm.watch import Watch

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
    "promotion_jobs": "Promotions sent to the tier.",
    "cascade_jobs": "Cascades sent to the tier.",
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
    "policies_replaced": "Eviction policies of the tier that raised; lru took their place.",
    "breaker_opened": "How often a tier was left alone after failures in a row.",
    "broke": "How often a tier was cut off because its own code raised, or its process ended.",
}

_OWN_PRIMARY_COUNTERS: Final = {
    "evictions": "Blocks evicted from the primary tier.",
    "stores_dropped": "Blocks not stored for want of room in the primary tier.",
    "policies_replaced": "Eviction policies that raised or named no block; lru took their place.",
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
_DROPPED: Final = "kvtier:samples_dropped"
_SLOTS: Final = "kvtier:primary_slots"
_BREAKER: Final = "kvtier:tier_breaker_state"
_BACKEND: Final = "kvtier:tier_backend"

_FAULT_COUNTER: Final[Mapping[str, tuple[str, _Label]]] = {"faults": (_FAULTS, ())}
_DROPPED_COUNTERS: Final[Mapping[str, tuple[str, _Label]]] = {
    what: (_DROPPED, (what,)) for what in DROPS
}


def metric_definitions(_extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that only kvtier has, by name."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        _FAULTS: OffloadingCounterMetadata(documentation="Message handlers that raised."),
        _DROPPED: OffloadingCounterMetadata(
            documentation="Parts of metrics and events that were dropped, by what was wrong.",
            labelnames=("what",),
        ),
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
    try:
        for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
            if getattr(collector, "_name", "").startswith(_OWN_PREFIX):
                REGISTRY.unregister(collector)
    except Exception:  # noqa: BLE001 - another version's registry may be another
        log.error("metrics of an earlier engine in this process stay registered", exc_info=True)


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
    ) -> None:
        self._facade = facade
        self._definitions = definitions
        self._watch = watch
        self._primary_metrics = dict(_PRIMARY_COUNTERS)
        if config.store_threshold >= 2:
            self._primary_metrics["stores_skipped"] = (CPUOffloadingMetrics.STORES_SKIPPED, ())
        self._tier_metrics = [
            {name: (metric, (tier.name,)) for name, metric in _TIER_COUNTERS.items()}
            for tier in config.tiers
        ]
        self._tier_names = [tier.name for tier in config.tiers]
        self._backends: list[Mapping[str, int] | None] = [None for _ in config.tiers]
        self._totals: list[dict[str, float]] = [{} for _ in range(3 + len(config.tiers))]
        self._slots: tuple[int, ...] = ()
        self._gauges: dict[tuple[str, _Label], float] = {}

    def take(self) -> OffloadingConnectorStats:
        """Return the increments, gauges and observations since the last call. Never raises.

        A part that fails is left out, and counted.
        """
        sample = Sample(self._definitions, self._watch)
        parts: list[Callable[[Sample], None]] = [self._take_state, self._take_observations]
        for part in parts:
            self._watch.safely("metrics", partial(part, sample))
        # The last, since the others add to it.
        self._watch.safely("metrics", partial(self._take_drops, sample))
        return sample.stats

    def _take_state(self, sample: Sample) -> None:
        now = self._facade.statistics()
        self._count(sample, 0, now.primary.counts, self._primary_metrics)
        self._count(sample, 1, {"faults": now.faults}, _FAULT_COUNTER)
        self._take_slots(sample, now.primary)
        for number, tier in enumerate(now.tiers):
            self._count(sample, 3 + number, tier.counts, self._tier_metrics[number])
            self._take_jobs(sample, tier, now.primary.slot_count)
            if tier.backend is not self._backends[number]:
                self._backends[number] = tier.backend
                for what, value in tier.backend.items():
                    self._set(sample, _BACKEND, value, (tier.name, what))

    def _take_drops(self, sample: Sample) -> None:
        self._count(sample, 2, dict(self._watch.dropped), _DROPPED_COUNTERS)

    def _take_slots(self, sample: Sample, now: PrimaryStatistics) -> None:
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
        self._set(sample, CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading)
        self._set(sample, CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        self._set(sample, CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading)
        for state, attribute in _SLOT_STATES.items():
            self._set(sample, _SLOTS, getattr(now, attribute), state)

    def _take_jobs(self, sample: Sample, now: TierStatistics, slot_count: int) -> None:
        names = TieringOffloadingMetrics
        label = (now.name,)
        self._set(sample, names.PRIMARY_WRITE_USAGE_PERC, now.promotion_slots / slot_count, label)
        self._set(sample, names.PRIMARY_READ_USAGE_PERC, now.cascade_slots / slot_count, label)
        self._set(sample, names.ACTIVE_PROMOTION_JOBS, now.promotion_jobs_in_flight, label)
        self._set(sample, names.ACTIVE_CASCADE_JOBS, now.cascade_jobs_in_flight, label)
        self._set(sample, _BREAKER, int(BreakerState[now.breaker]), label)

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

    def _count(
        self,
        sample: Sample,
        number: int,
        now: Mapping[str, float],
        metrics: Mapping[str, tuple[str, _Label]],
    ) -> None:
        """Report how much counters have grown. One that fell counts on from where it is now."""
        before = self._totals[number]
        if now == before:
            return
        for name, value in now.items() - before.items():
            if name in metrics:
                metric, label = metrics[name]
                sample.count(metric, value - before.get(name, 0), label)
            before[name] = value  # afterwards: if that raises, it is reported the next time

    def _set(self, sample: Sample, metric: str, value: float, label: _Label = ()) -> None:
        """Report a gauge that has moved."""
        if self._gauges.get((metric, label)) != value:
            self._gauges[metric, label] = value
            sample.set(metric, value, label)
