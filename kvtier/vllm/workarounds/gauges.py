"""Makes several API servers of one engine show a gauge once, with its most recent value.

The engine reports a change to one of its API servers only, and any of them serves ``/metrics`` for
all. vLLM 0.32 shows each server's own value of a connector's gauge: after a tier has recovered,
another server's ``kvtier:tier_breaker_state`` stays as it was, and with it an alert on the maximum.
Delete with 0.32: vLLM 0.33 does the same by itself.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import OffloadingGaugeMetadata

from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from collections.abc import Mapping

MODE: Final = "mostrecent"


@once_a_process
def merge_gauges() -> None:
    """Make connectors' gauges show the most recent value. Once a process, before they exist."""
    if any(each.name == "multiprocess_mode" for each in fields(OffloadingGaugeMetadata)):
        return
    real = OffloadPromMetrics.__init__

    @wraps(real)
    def init(self: Any, config: Any, types: Mapping[Any, Any], *arguments: Any) -> None:  # noqa: ANN401 - vLLM has no stubs
        real(
            self,
            config,
            {**types, Gauge: partial(types[Gauge], multiprocess_mode=MODE)},
            *arguments,
        )

    OffloadPromMetrics.__init__ = init
