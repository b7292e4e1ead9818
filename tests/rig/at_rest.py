"""What must hold of kvtier's numbers: after each step, and once nobody has anything to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

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
        self._before: dict[str, float] = {}

    def check(self, statistics: Any, outputs: Any) -> None:
        """Compare with the step before. ``outputs``: what the step gave vLLM's front end."""
        now = {f"primary {name}": value for name, value in _numbers(statistics.primary.counts)}
        for tier in statistics.tiers:
            now |= {f"{tier.name} {name}": value for name, value in _numbers(tier.counts)}
        fell = {
            name: (self._before[name], value)
            for name, value in now.items()
            if value < self._before.get(name, 0)
        }
        if fell:
            raise CounterFell(f"(before, now): {fell}")
        self._before = now
        for output in (outputs or {}).values():
            stats = output.scheduler_stats
            _check_increments(stats and stats.kv_connector_stats)


def _numbers(counts: msgspec.Struct) -> Iterator[tuple[str, float]]:
    return ((name, getattr(counts, name)) for name in counts.__struct_fields__)


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
