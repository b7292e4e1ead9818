"""Passes metrics of hosted tiers from a tier's thread to vLLM.

vLLM's tiers keep their own counts until they are polled, and define their metrics beforehand. Only
metrics that a tier has defined are passed on: any other would end vLLM's front end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.vllm.hosted.tier_class import hosted_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvtier.vllm.workarounds.guarded_observer import Sample

WAITING_MAX: Final = 64
"""Limit of reports queued while the engine does not step: tiers keep counting, and report later."""


class HostedStats:
    """Metrics that tiers have reported, and that have not been passed to vLLM yet."""

    def __init__(self) -> None:
        self._waiting: deque[OffloadingConnectorStats] = deque()

    @property
    def has_room(self) -> bool:
        """Whether a tier may be polled. Any thread."""
        return len(self._waiting) < WAITING_MAX

    @property
    def has_news(self) -> bool:
        """Whether ``report`` would add anything. Any thread."""
        return bool(self._waiting)

    def post(self, stats: OffloadingConnectorStats) -> None:
        """Queue a tier's report and take ownership of it. Any thread."""
        self._waiting.append(stats)

    def report(self, sample: Sample) -> None:
        """Add all queued reports to a sample. Scheduler's thread."""
        while self._waiting:
            reported = self._waiting.popleft().data
            for metric, values in reported["data"].items():
                kind = reported["types"][metric]
                for label, value in values.items():
                    if kind == "counter":
                        sample.count(metric, value, label)
                    elif kind == "gauge":
                        sample.set(metric, value, label)
                    else:
                        for each in value:
                            sample.observe(metric, each, label)


def definitions_of(tiers: Iterable[Mapping[str, Any]]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that hosted tiers among ``tiers`` define, by name.

    ``tiers``: entries of kvtier's ``secondary_tiers``. One that can't be hosted defines
    none: the start will refuse it, by its name.
    """
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for tier in tiers:
        try:
            hosted = hosted_in(tier)
        except ConfigError:
            continue
        if hosted is not None:
            found, options = hosted
            definitions.update(found.build_metric_definitions(options))
    return definitions
