"""Builds the report of a replay: one mapping, for the JSON file and the tables made from it.

``docs/reference/replay-report.md`` describes its keys. A ``version`` may gain keys; removing or
changing a key raises it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins

from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Connection
from kvtier.tools.replay.measurements import Durations, Misread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.core.statistics import TierStatistics
    from kvtier.tools.replay.measurements import Interval, TierMeasured
    from kvtier.tools.replay.session import Replayed
    from kvtier.tools.replay.settings import ReplaySettings

FORMAT: Final = "kvtier-replay"
VERSION: Final = 1

_TROUBLE: Final = {
    "breaker_opened": "breaker opened: {:,}",
    "crashes": "crashes: {:,}",
    "connections_lost": "connections lost: {:,}",
    "probes_timed_out": "lookups timed out: {:,}",
    "jobs_timed_out": "jobs timed out: {:,}",
    "failed": "blocks failed: {:,}",
    "stores_rejected": "blocks refused as full: {:,}",
}
"""Counters of a tier that is not healthy, in words."""


def build_report(replayed: Replayed, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements as JSON values. ``trace`` describes the trace."""
    measured = replayed.measured
    block_bytes = replayed.settings.runtime.block_bytes
    secondaries = _secondaries(replayed)
    return {
        "format": FORMAT,
        "version": VERSION,
        "partial": not replayed.played,
        "warnings": [_warning(tier) for tier in secondaries if tier["trouble"]],
        "trace": dict(trace),
        "settings": _settings(replayed.settings),
        "time_s": {
            "real": replayed.real_s,
            "replayed": replayed.replayed_s,
            "runtime_calls": measured.scheduler_s,
            "copies_and_checks": measured.gpu_s,
        },
        "peak_memory_bytes": replayed.peak_memory_bytes,
        "requests": {
            "first_tokens": measured.requests,
            "input_tokens": measured.input_tokens,
            "gpu_blocks": measured.gpu_blocks,
            "gpu_tokens": measured.gpu_tokens,
            "computed_tokens": measured.computed_tokens,
            "referenced_blocks": measured.referenced_blocks,
            "hit_blocks": sum(measured.hit_blocks),
            "hit_ratio": _ratio(sum(measured.hit_blocks), measured.referenced_blocks),
        },
        "recorded": _recorded(replayed),
        "tiers": [_primary(replayed), *secondaries],
        "gpu": {
            "stored_bytes": replayed.blocks_stored * block_bytes,
            "loaded_bytes": replayed.blocks_loaded * block_bytes,
            "loaded_blocks": replayed.blocks_loaded,
            "checked_blocks": replayed.blocks_checked,
        },
        "first_token_s": _first_token(replayed),
        "operations_s": {
            "lookup": measured.lookup.summary(),
            **{name: each.summary() for name, each in measured.operations.items()},
        },
        "scheduler_s": {
            "steps": measured.steps,
            "per_request": measured.scheduler_s / max(1, measured.requests),
            "own_calls": measured.scheduler.summary(),
        },
        "faults": measured.statistics.faults,
        "wrong_blocks": measured.wrong_blocks,
        "wrong": [_misread(each) for each in measured.misreads],
        "tiers_closed": replayed.closed,
        "leftovers": replayed.leftovers,
        "interval_s": measured.interval_s,
        "over_time": [
            _interval(number, measured.intervals[number], measured.interval_s)
            for number in sorted(measured.intervals)
        ],
    }


def _recorded(replayed: Replayed) -> dict[str, Any] | None:
    """Return the recorded engine's hits for the same requests, if all were played."""
    recorded = replayed.trace.recorded
    if recorded is None or not replayed.played:
        return None
    return {
        "gpu_tokens": recorded.gpu_tokens,
        "loaded_tokens": dict(recorded.loaded_tokens),
        "computed_tokens": recorded.computed_tokens,
        "events": len(recorded.events),
    }


def problems_in(report: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the run failed, in words; empty if it did not."""
    found = [
        f"{tier['name']} was not replayed: it neither stored nor loaded a block"
        for tier in report["tiers"][1:]
        if tier["trouble"] and not report["partial"]
        if not (tier["cascaded"]["bytes"] or tier["promoted"]["bytes"])
    ]
    if report["wrong_blocks"]:
        found.append(f"{report['wrong_blocks']} blocks held wrong bytes when they were read:")
        found += [
            f"  {each['request']}: block {each['key']} from {each['source']}, slot {each['slot']}, "
            f"from byte {each['offset_bytes']} on: {each['found']} instead of {each['expected']}"
            for each in report["wrong"]
        ]
        rest = report["wrong_blocks"] - len(report["wrong"])
        found += [f"  and {rest} more"] if rest else []
    if report["faults"]:
        found.append(f"{report['faults']} actors of the runtime broke; the log says where")
    return found


def _settings(settings: ReplaySettings) -> dict[str, Any]:
    runtime = settings.runtime
    return {
        "block_bytes": runtime.block_bytes,
        "slot_count": runtime.slot_count,
        "eviction_policy": runtime.eviction_policy,
        "secondary_tiers": [
            {"name": tier.name, "eviction_policy": tier.eviction_policy, **tier.options}
            for tier in runtime.tiers
        ],
        "engine": asdict(settings.model),
        "clock": "jumps" if settings.jumps else "real",
        "verify": settings.verify.value,
    }


def _primary(replayed: Replayed) -> dict[str, Any]:
    statistics = replayed.measured.statistics.primary
    return {
        **_hits(replayed, 0),
        "capacity_blocks": statistics.slot_count,
        "resident_blocks": statistics.ready_slots,
        "evicted_blocks": statistics.counts.evictions,
        "quarantined_slots": statistics.quarantined_slots,
        "stores_refused": replayed.measured.stores_refused,
        "counts": to_builtins(statistics.counts),
    }


def _secondaries(replayed: Replayed) -> list[dict[str, Any]]:
    measured = replayed.measured
    return [
        {**_hits(replayed, number), **_secondary(statistics, tier)}
        for number, (statistics, tier) in enumerate(
            zip(measured.statistics.tiers, measured.tiers, strict=True), start=1
        )
    ]


def _secondary(statistics: TierStatistics, tier: TierMeasured) -> dict[str, Any]:
    read, written = statistics.counts.read_bytes, statistics.counts.write_bytes
    return {
        "evicted_blocks": tier.evicted_blocks,
        "promoted": _moved(read, tier.loading_s),
        "cascaded": _moved(written, tier.storing_s),
        "probe_s": tier.probe.summary(),
        "promotion_s": tier.promotion.summary(),
        "cascade_s": tier.cascade.summary(),
        "breaker": statistics.breaker,
        "connection": statistics.connection,
        "trouble": _trouble(statistics),
        "counts": to_builtins(statistics.counts),
        "backend": {**statistics.backend_counters, **statistics.backend_gauges},
    }


def _trouble(tier: TierStatistics) -> list[str]:
    """Return the reasons, in words, why a tier's figures are not those of a healthy one."""
    found = [] if tier.is_open else ["it did not open"]
    if tier.connection == Connection.CONNECTING.name:
        found.append("its server was not reached")
    elif tier.connection == Connection.GONE.name:
        found.append("its server is gone")
    if tier.breaker != BreakerState.CLOSED.name:
        found.append(f"its breaker is {tier.breaker} at the end")
    counts = to_builtins(tier.counts)
    return found + [text.format(counts[name]) for name, text in _TROUBLE.items() if counts[name]]


def _warning(tier: Mapping[str, Any]) -> str:
    trouble = ", ".join(tier["trouble"])
    is_only_full = len(tier["trouble"]) == 1 and bool(tier["counts"]["stores_rejected"])
    remedy = "Give it more room." if is_only_full else "The log has the cause."
    return f"{tier['name']} was bypassed or failed: {trouble}. {remedy}"


def _moved(moved_bytes: float, busy_s: float) -> dict[str, float | None]:
    rate = moved_bytes / busy_s if busy_s else None
    return {"bytes": moved_bytes, "busy_s": busy_s, "bytes_per_busy_s": rate}


def _hits(replayed: Replayed, source: int) -> dict[str, Any]:
    measured = replayed.measured
    return {
        "name": measured.sources[source],
        "hit_blocks": measured.hit_blocks[source],
        "hit_tokens": measured.hit_tokens[source],
        "hit_ratio": _ratio(measured.hit_blocks[source], measured.referenced_blocks),
    }


def _first_token(replayed: Replayed) -> dict[str, Any]:
    measured, model = replayed.measured, replayed.settings.model
    same_requests = replayed.trace.requests[: measured.requests]
    return {
        "with_kvtier": measured.first_token.summary(),
        "without": Durations(model.first_tokens_without_offloading(same_requests)).summary(),
        "of_which_entering": measured.entering.summary(),
        "of_which_waiting_for_tiers": measured.waiting.summary(),
    }


def _misread(misread: Misread) -> dict[str, Any]:
    block = misread.block
    return {
        "request": misread.request,
        "source": misread.source,
        "key": block.key.hex(),
        "slot": block.slot,
        "offset_bytes": block.offset_bytes,
        "expected": f"{block.expected:016x}",
        "found": f"{block.found:016x}",
    }


def _interval(number: int, interval: Interval, interval_s: float) -> dict[str, Any]:
    summary = interval.first_token.summary()
    return {
        "from_s": number * interval_s,
        "requests": interval.requests,
        "referenced_blocks": interval.referenced_blocks,
        "hit_blocks": interval.hit_blocks,
        "resident_blocks": interval.resident_blocks,
        "first_token_p50_s": summary["p50"],
        "first_token_p99_s": summary["p99"],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
