"""Defines kvtier's metrics, from the declarations beside the numbers that are counted.

``kvtier/vllm/scheduler/metrics.py`` exports them; ``docs/write_reference.py`` writes their tables.
Counters that vLLM has a metric for (``Counter.in_vllm``) are exported under that name only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    get_args,
    get_type_hints,
)

from kvtier.core.statistics import Counts, PrimaryCounts, SourceCounts, TierCounts
from kvtier.plugin_api.metrics import CAPACITY_BYTES, USED_BYTES, Gauge, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.metrics import BackendMetric

PREFIX: Final = "kvtier:"

PRIMARY_TIER: Final = "0:primary"
"""The label of the primary tier, beside the names of the others; in logs, too."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
_AGES: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
_BYTES: Final = tuple(float(1 << power) for power in range(14, 31, 2))  # 16 KiB to 1 GiB


@dataclass(frozen=True)
class Definition:
    """One metric as Prometheus sees it, but for the suffix of a counter."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


class Series(NamedTuple):
    """One series of a counter or gauge, and the name of the number that is its value."""

    metric: str
    label: tuple[str, ...]
    attribute: str


def _gauge(name: str, text: str, *labels: str) -> Definition:
    return Definition(PREFIX + name, "gauge", text, labels)


def _of_jobs(name: str, text: str, buckets: tuple[float, ...]) -> Definition:
    return Definition(PREFIX + name, "histogram", text, ("tier",), buckets)


INFO: Final = _gauge(
    "info",
    "Versions, tiers and a digest of the configuration of this engine; always 1.",
    "version",
    "vllm",
    "tiers",
    "configuration",
)
SLOTS: Final = _gauge("primary_slots", "Slots of the primary tier, by state.", "state")
FAULTS: Final = Definition(PREFIX + "faults", "counter", "Message handlers that raised.")
DROPPED: Final = Definition(
    PREFIX + "samples_dropped",
    "counter",
    "Parts of metrics and events that were dropped, by cause.",
    ("what",),
)
CAPACITY: Final = _gauge(CAPACITY_BYTES.name, CAPACITY_BYTES.help, "tier")
USED: Final = _gauge(USED_BYTES.name, USED_BYTES.help, "tier")
BREAKER: Final = _gauge(
    "tier_breaker_state",
    "Circuit breaker for probes, loads or stores: 0 closed (in use), 1 open, 2 half-open, "
    "3 disabled.",
    "tier",
    "work",
)
CONNECTION: Final = _gauge(
    "tier_connection_state",
    "Connection to a tier's server, if it has one: 0 up, 1 not yet, 2 gone.",
    "tier",
)
LATENCY: Final = _gauge(
    "tier_estimated_latency_seconds",
    "Estimate from recent jobs: time before the tier starts the latest job.",
    "tier",
    "work",
)
BYTES_PER_SECOND: Final = _gauge(
    "tier_estimated_bytes_per_second",
    "Estimate from recent jobs: bytes a second beyond that latency; jobs overlap.",
    "tier",
    "work",
)
LOOKUPS_PER_SECOND: Final = _gauge(
    "tier_estimated_lookups_per_second",
    "Estimate from recent probes: blocks looked up a second.",
    "tier",
)
ERROR_RATIO: Final = _gauge(
    "tier_estimate_error_ratio",
    "Recent error of these estimates, as a share of the estimate.",
    "tier",
    "work",
)
INFLIGHT_LIMIT: Final = _gauge(
    "tier_inflight_limit_blocks",
    "Most blocks at the tier at once (keys for probes); the rest wait in the engine.",
    "tier",
    "work",
)
TierFault: TypeAlias = Literal[
    "crashes",
    "damaged",
    "stores_rejected",
    "failed",
    "jobs_timed_out",
    "breaker_opened",
    "connections_lost",
]
"""Counters of ``TierCounts`` that stand for trouble, the worst first."""

LAST_FAULT: Final = _gauge(
    "tier_last_fault_timestamp_seconds",
    "Time of the tier's last fault, in seconds since the epoch, by the fault's counter.",
    "tier",
    "fault",
)
MISSES: Final = Definition(
    PREFIX + "misses",
    "counter",
    "Requests by the reason why their stored prefix ended, and by the tier concerned.",
    ("tier", "reason"),
)
RECORDS_DROPPED: Final = Definition(
    PREFIX + "records_dropped",
    "counter",
    "Requests missing from the record: its file could not be written, or not fast enough.",
)
WAIT_SECONDS: Final = Definition(
    PREFIX + "request_wait_seconds",
    "histogram",
    "Time that a request waited for tiers; no sample for a request that did not wait.",
    (),
    _SECONDS,
)
ABSENT_SECONDS: Final = Definition(
    PREFIX + "evicted_before_miss_seconds",
    "histogram",
    "Time from a block's eviction until a request missed it; sampled in large engines.",
    ("tier",),
    _AGES,
)
LOAD_SECONDS: Final = _of_jobs(
    "tier_load_seconds", "Time from sending a load job to the tier until its end.", _SECONDS
)
LOAD_BYTES: Final = _of_jobs("tier_load_bytes", "Size of a load job.", _BYTES)
STORE_SECONDS: Final = _of_jobs(
    "tier_store_seconds", "Time from sending a store job to the tier until its end.", _SECONDS
)
STORE_BYTES: Final = _of_jobs("tier_store_bytes", "Size of a store job.", _BYTES)

OF_TIERS: Final = (
    FAULTS,
    DROPPED,
    CAPACITY,
    USED,
    BREAKER,
    CONNECTION,
    LOAD_SECONDS,
    LOAD_BYTES,
    STORE_SECONDS,
    STORE_BYTES,
    LATENCY,
    BYTES_PER_SECOND,
    LOOKUPS_PER_SECOND,
    ERROR_RATIO,
    INFLIGHT_LIMIT,
    LAST_FAULT,
)
"""Besides the counters of ``TierCounts``: what a tier has without kvtier's primary tier, too."""


@cache
def declared(counts: type[Counts]) -> Mapping[str, Metric]:
    """Return the declaration of each counter of a class, by attribute."""
    hints: dict[str, Any] = get_type_hints(counts, include_extras=True)
    return {name: get_args(hints[name])[1] for name in counts.__struct_fields__}


def counter_series(counts: type[Counts], prefix: str, label: tuple[str, ...] = ()) -> list[Series]:
    """Return the series of the counters that only kvtier has."""
    return _series(declared(counts), prefix, label)


def backend_series(kind: str, metrics: Mapping[str, BackendMetric], tier: str) -> list[Series]:
    """Return the series of what a backend counts. ``kind``: the tier's type."""
    return _series(metrics, _type_prefix(kind), (tier,))


def tier_definitions() -> dict[str, Definition]:
    """Return the metrics of tiers, without those of a primary tier or of a backend, by name."""
    return _by_name(*OF_TIERS) | _definitions(declared(TierCounts), "tier_", ("tier",))


def primary_definitions() -> dict[str, Definition]:
    """Return the metrics of the primary tier and of the engine, by name."""
    return (
        _by_name(INFO, SLOTS, MISSES, RECORDS_DROPPED, WAIT_SECONDS, ABSENT_SECONDS)
        | _definitions(declared(SourceCounts), "", ("tier",))
        | _definitions(declared(PrimaryCounts), "primary_", ())
    )


def backend_definitions(kind: str, metrics: Mapping[str, BackendMetric]) -> dict[str, Definition]:
    """Return the metrics of a backend, by name. ``kind``: the tier's type."""
    return _definitions(metrics, _type_prefix(kind), ("tier",))


def _by_name(*definitions: Definition) -> dict[str, Definition]:
    return {each.name: each for each in definitions}


def _definitions(
    metrics: Mapping[str, Metric], prefix: str, labels: tuple[str, ...]
) -> dict[str, Definition]:
    return _by_name(
        *(
            Definition(
                _name(metric, prefix, attribute),
                "gauge" if isinstance(metric, Gauge) else "counter",
                metric.help,
                (*labels, *(name for name, _ in metric.labels)),
            )
            for attribute, metric in metrics.items()
            if not metric.in_vllm
        )
    )


def _series(metrics: Mapping[str, Metric], prefix: str, label: tuple[str, ...]) -> list[Series]:
    return [
        Series(_name(metric, prefix, name), (*label, *(at for _, at in metric.labels)), name)
        for name, metric in metrics.items()
        if not metric.in_vllm
    ]


def _name(metric: Metric, prefix: str, attribute: str) -> str:
    return PREFIX + (metric.name or prefix + attribute)


def _type_prefix(kind: str) -> str:
    return re.sub(r"\W", "_", kind, flags=re.ASCII) + "_"
