"""What must hold of kvtier's numbers: after each step, and once nobody has anything to do."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)

_LEFT_OF_PRIMARY = (
    "requests",
    "pinned_slots",
    "quarantined_slots",
    "promotion_slots",
    "filling_from_gpu_slots",
    "filling_from_tiers_slots",
)
_LEFT_OF_A_TIER = (
    "probes_in_flight",
    "promotion_jobs_in_flight",
    "cascade_jobs_in_flight",
    "promotion_slots",
    "cascade_slots",
)


class NotAtRest(AssertionError):
    """Raised when a scenario does not end as it must."""


class CounterFell(AssertionError):
    """Raised when a counter is less than it was."""


class Counters:
    """Watches that counters only grow: kvtier's own, and what reaches vLLM of them."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, ...]] = {}

    def check(self, statistics: Any, outputs: Any) -> None:
        """Compare with the step before. ``outputs``: what the step gave vLLM's front end."""
        self._check("primary", statistics.primary.counts)
        for tier in statistics.tiers:
            self._check(tier.name, tier.counts)
        for output in (outputs or {}).values():
            stats = output.scheduler_stats
            _check_increments(stats and stats.kv_connector_stats)

    def _check(self, whose: str, counts: msgspec.Struct) -> None:
        now = msgspec.structs.astuple(counts)
        before = self._before.get(whose, (0,) * len(now))
        if now == before:
            return
        names = counts.__struct_fields__
        fell = [each for each in zip(names, before, now, strict=True) if each[2] < each[1]]
        if fell:
            raise CounterFell(f"{whose} (before, now): {fell}")
        self._before[whose] = now


def _check_increments(told: dict[str, Any] | None) -> None:
    """Refuse an increment that Prometheus would raise at, which would end the server."""
    if not told:
        return
    stats = OffloadingConnectorStats(data=told)
    for name, by_label in stats._values.items():
        if stats._types[name] == "counter":
            fell = {label: value for label, value in by_label.items() if value < 0}
            if fell:
                raise CounterFell(f"vLLM is told that {name} grew by {fell}")


def left_over(now: Any, *, void: int) -> dict[str, Any]:
    """Return what should be zero at rest and is not.

    ``void``: blocks of completions that kvtier was to ignore, and to count.
    """
    primary = now.primary
    told = {name: getattr(primary, name) for name in _LEFT_OF_PRIMARY}
    told["slots lost"] = primary.slot_count - primary.free_slots - primary.ready_slots
    told["unknown completions"] = primary.counts.unknown_completions - void
    told["faults"] = now.faults
    for tier in now.tiers:
        for name in _LEFT_OF_A_TIER:
            told[f"{tier.name} {name}"] = getattr(tier, name)
    return {name: value for name, value in told.items() if value}
