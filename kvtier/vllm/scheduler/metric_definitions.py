"""Defines the metrics: vLLM's own names if vLLM has them, ``kvtier:`` for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

_OWN_PREFIX: Final = "kvtier:"
FAULTS: Final = "kvtier:faults"
DROPPED: Final = "kvtier:samples_dropped"
SLOTS: Final = "kvtier:primary_slots"
DECISIONS: Final = "kvtier:load_decisions"
BREAKER: Final = "kvtier:tier_breaker_state"
CONNECTION: Final = "kvtier:tier_connection_state"
BACKEND: Final = "kvtier:tier_backend"
LATENCY: Final = "kvtier:tier_latency_seconds"
BYTES_PER_SECOND: Final = "kvtier:tier_bytes_per_second"
ANSWERS_PER_SECOND: Final = "kvtier:tier_lookups_per_second"
SPREAD: Final = "kvtier:tier_estimate_error_ratio"
WINDOW: Final = "kvtier:tier_inflight_limit_blocks"

VLLM_TIER_COUNTERS: Final[Mapping[str, str]] = {
    TieringOffloadingMetrics.CHUNK_QUERIES: "queries",
    TieringOffloadingMetrics.CHUNK_HITS: "hits",
    TieringOffloadingMetrics.READ_BYTES: "read_bytes",
    TieringOffloadingMetrics.READ_TIME: "read_seconds",
    TieringOffloadingMetrics.WRITE_BYTES: "write_bytes",
    TieringOffloadingMetrics.WRITE_TIME: "write_seconds",
    TieringOffloadingMetrics.PROMOTION_JOB_FAILURES: "promotion_jobs_failed",
    TieringOffloadingMetrics.CASCADE_JOB_FAILURES: "cascade_jobs_failed",
}
"""Counts of one tier that vLLM has a name for, by that name."""

OWN_TIER_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "kvtier:tier_promotion_jobs": ("promotion_jobs", "Promotions sent to the tier."),
    "kvtier:tier_cascade_jobs": ("cascade_jobs", "Cascades sent to the tier."),
    "kvtier:tier_load_misses": (
        "load_misses",
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
    "kvtier:tier_stores_rejected": ("stores_rejected", "Blocks that a tier had no room for."),
    "kvtier:tier_stores_deferred": (
        "stores_deferred",
        "Blocks whose write was deferred because the tier was failing, full or backlogged.",
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
    "kvtier:tier_loads_abandoned": (
        "loads_abandoned",
        "Blocks whose load took longer than computing them; their requests went on without.",
    ),
    "kvtier:tier_loads_cancelled": (
        "loads_cancelled",
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
    "kvtier:tier_crashes": (
        "crashes",
        "How often a tier was disabled because its own code raised, or its process ended.",
    ),
}
"""Counts of one tier that only kvtier has, with their descriptions."""

OWN_PRIMARY_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
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
    "kvtier:primary_blocks_recomputed": (
        "blocks_recomputed",
        "Blocks that tiers have, as far as known, and that were recomputed as that is faster.",
    ),
    "kvtier:primary_requests_waited": (
        "requests_waited",
        "Requests that waited for slots that others held, as that is faster than recomputing.",
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
"""Counts of the primary tier that only kvtier has, with their descriptions."""

_SPEED_GAUGES: Final[Mapping[str, str]] = {
    LATENCY: "Recent queueing delay: time before the tier starts the latest job.",
    SPREAD: "How far off what was expected of the tier was lately, as a share of it.",
    WINDOW: "Blocks that the tier is given at once; keys for probes. The rest waits before it.",
}
"""One series for each kind of work."""


def metric_definitions(_extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that only kvtier has, by name."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        **tier_metric_definitions(),
        SLOTS: OffloadingGaugeMetadata(
            documentation="Slots of the primary tier, by state.", labelnames=("state",)
        ),
        DECISIONS: OffloadingCounterMetadata(
            documentation="Decisions whether a request loads what tiers have, by outcome.",
            labelnames=("outcome",),
        ),
    }
    for name, (_, text) in OWN_PRIMARY_COUNTERS.items():
        definitions[name] = OffloadingCounterMetadata(documentation=text)
    return definitions


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of tiers, without those of a primary tier, by name."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        FAULTS: OffloadingCounterMetadata(documentation="Message handlers that raised."),
        DROPPED: OffloadingCounterMetadata(
            documentation="Parts of metrics and events that were dropped, by what was wrong.",
            labelnames=("what",),
        ),
        BREAKER: OffloadingGaugeMetadata(
            documentation="Circuit breaker for probes, loads or stores: 0 closed (in use), 1 open, "
            "2 half-open, 3 disabled.",
            labelnames=("tier", "work"),
        ),
        CONNECTION: OffloadingGaugeMetadata(
            documentation="Connection to a tier's server, if it has one: 0 up, 1 not yet, 2 gone.",
            labelnames=("tier",),
        ),
        BYTES_PER_SECOND: OffloadingGaugeMetadata(
            documentation="Bytes a second that a tier loads, or stores, as it was lately.",
            labelnames=("tier", "work"),
        ),
        ANSWERS_PER_SECOND: OffloadingGaugeMetadata(
            documentation="Blocks a second that a tier looks up, as it was lately.",
            labelnames=("tier",),
        ),
        BACKEND: OffloadingGaugeMetadata(
            documentation="What the tier's backend counts itself, by its own names.",
            labelnames=("tier", "count"),
        ),
    }
    for name, text in _SPEED_GAUGES.items():
        definitions[name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier", "work"))
    for name, (_, text) in OWN_TIER_COUNTERS.items():
        definitions[name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
    return definitions


def unregister_own_metrics() -> None:
    """Unregister an earlier engine's metrics, so that a second engine in this process may start.

    vLLM does the same at each start, but only for names that begin with ``vllm:``.
    """
    try:
        for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
            if getattr(collector, "_name", "").startswith(_OWN_PREFIX):
                REGISTRY.unregister(collector)
    except Exception:  # noqa: BLE001 - another version's registry may be another
        log.error("metrics of an earlier engine in this process stay registered", exc_info=True)
