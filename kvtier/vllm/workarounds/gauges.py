"""Has several API servers of one engine show a gauge once, with its most recent value.

The engine reports a change to one of its API servers only, and any of them answers ``/metrics`` for
all. vLLM 0.32 made the connector's gauges so that each server's own value was shown: after a tier
had come back, another server's ``kvtier:tier_breaker_state`` stayed as it was, and with it an alert
on the maximum. Delete with 0.32: vLLM 0.33 does the same by itself.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import OffloadingGaugeMetadata

from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

MODE = "mostrecent"


@once_a_process
def merge_gauges() -> None:
    """Make the gauges of connectors in this process so. Once a process, before they are made."""
    if any(each.name == "multiprocess_mode" for each in fields(OffloadingGaugeMetadata)):
        return
    create = OffloadPromMetrics._create_metric  # noqa: SLF001 - the only place that makes them

    @wraps(create)
    def create_merged(self: Any, name: str, metadata: OffloadingMetricMetadata) -> Any:  # noqa: ANN401 - vLLM has no stubs
        gauge = self._gauge_cls
        self._gauge_cls = partial(gauge, multiprocess_mode=MODE)
        try:
            return create(self, name, metadata)
        finally:
            self._gauge_cls = gauge

    OffloadPromMetrics._create_metric = create_merged  # noqa: SLF001
