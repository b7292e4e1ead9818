"""Which gauges the engine layer wants to be zero before it ends: the soak waits for that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from stress.engine.watch import NOT_ZERO_AT_REST

PAGE: Final = Path(__file__).parents[3] / "docs/reference/metrics.md"
ZERO_AT_REST: Final = {
    "vllm:kv_offload_tiering_active_promotion_jobs",
    "vllm:kv_offload_tiering_active_cascade_jobs",
    "vllm:kv_offload_tiering_primary_write_usage_perc",
    "vllm:kv_offload_tiering_primary_read_usage_perc",
    "vllm:kv_offload_cpu_cache_usage_perc",
    "vllm:kv_offload_cpu_cache_write_usage_perc",
    "vllm:kv_offload_cpu_cache_read_usage_perc",
    "kvtier:tier_breaker_state",
    "kvtier:tier_connection_state",
}


def test_every_gauge_is_known_to_be_zero_at_rest_or_not() -> None:
    """A new one that says what there is would have the soak wait for ever."""
    gauges = set(re.findall(r"^\| `([\w:]+)` \| gauge \|", PAGE.read_text(), re.MULTILINE))
    assert gauges >= ZERO_AT_REST
    says_what_there_is = {
        gauge for gauge in gauges if NOT_ZERO_AT_REST.match(f'{gauge}{{state="ready"}}')
    }
    assert says_what_there_is == gauges - ZERO_AT_REST
