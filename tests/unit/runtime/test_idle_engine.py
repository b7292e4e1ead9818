"""Deadlines count from when work is sent, however long nobody has called before."""

from __future__ import annotations

import time

from kvtier import open_runtime
from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import RuntimeConfig

IDLE_S = 1000.0


def test_the_first_probe_after_an_idle_hour_has_its_time() -> None:
    """Links learn the time from ticks; a probe sent before the tick was overdue at once."""
    now = 0.0
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": [{"type": "memory", "capacity_bytes": 1 << 20}]},
        slot_count=8,
        block_bytes=4096,
    )
    facade = open_runtime(
        config,
        SlotMemory.anonymous(8, 4096),
        Namespace({"model": "m"}),
        clock=lambda: now,
    )
    try:
        facade.step_end()
        for request in ("ended by a step", "ended by a lookup"):
            now += IDLE_S
            facade.on_request_started(request)
            assert facade.lookup(request.encode(), request) is not True
            if request == "ended by a step":
                facade.step_end()
            facade.on_request_finished(request)
            (tier,) = facade.statistics().tiers
            assert tier.counts.probes_timed_out == 0, request
            while facade.get_finished():
                time.sleep(0)  # let the tier's thread answer
    finally:
        assert facade.close()
