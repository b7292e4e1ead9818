"""Defines the metrics for vLLM: its own names if it has them, ``kvtier:`` for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.core.metrics import (
    PREFIX,
    backend_definitions,
    primary_definitions,
    tier_definitions,
)
from kvtier.errors import ConfigError
from kvtier.plugin_api.log import log
from kvtier.settings.plugins import backend_class
from kvtier.vllm.workarounds.gauges import merge_gauges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvtier.core.metrics import Definition

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
"""Counts of one tier that vLLM has a metric for, by the metric's name."""


def metric_definitions(tiers: Iterable[Mapping[str, Any]]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that only kvtier has, by name. ``tiers``: the ``secondary_tiers``."""
    return {**_for_vllm(primary_definitions()), **tier_metric_definitions(tiers)}


def tier_metric_definitions(
    tiers: Iterable[Mapping[str, Any]],
) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of tiers, without those of a primary tier, by name."""
    definitions = tier_definitions()
    for tier in tiers:
        kind = tier.get("type")
        try:
            definitions |= backend_definitions(str(kind), backend_class(str(kind)).metrics)
        except ConfigError:
            continue  # the start will refuse the tier, by its name
    return _for_vllm(definitions)


def _for_vllm(definitions: Mapping[str, Definition]) -> dict[str, OffloadingMetricMetadata]:
    return {name: _metadata(definition) for name, definition in definitions.items()}


def _metadata(metric: Definition) -> OffloadingMetricMetadata:
    if metric.kind == "counter":
        return OffloadingCounterMetadata(metric.help, metric.labels)
    if metric.kind == "gauge":
        return OffloadingGaugeMetadata(metric.help, metric.labels)
    return OffloadingHistogramMetadata(metric.help, metric.labels, metric.buckets)


def prepare_front_end() -> None:
    """Prepare this process for the metrics of one more engine. Called before vLLM makes them."""
    merge_gauges()
    _unregister_own_metrics()


def _unregister_own_metrics() -> None:
    """Unregister an earlier engine's metrics, so that a second engine in this process may start.

    vLLM does the same at each start, but only for names that begin with ``vllm:``.
    """
    try:
        for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
            if getattr(collector, "_name", "").startswith(PREFIX):
                REGISTRY.unregister(collector)
    except Exception:  # noqa: BLE001 - another version's registry may differ
        log.error("metrics of an earlier engine in this process stay registered", exc_info=True)
