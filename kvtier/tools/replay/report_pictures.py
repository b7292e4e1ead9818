"""A replay's pictures: hits and occupancy over time, and latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.tools.replay.pictures import draw_hit_ratio_over_time, draw_latency, draw_occupancy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtier.tools.replay.session import Replayed


def draw_replay(report: Mapping[str, Any], replayed: Replayed, folder: Path) -> list[Path]:
    """Draw what there is to draw into ``folder``; return the files.

    What happened over time needs two stretches of it; a run that was stopped
    at once has no such pictures.
    """
    files = []
    name = report["trace"]["name"]
    intervals = report["over_time"]
    if len(intervals) > 1:
        times = [interval["from_s"] for interval in intervals]
        files.append(folder / "hit-ratio.png")
        draw_hit_ratio_over_time(files[-1], f"{name}: hits by tier", times, _hit_ratios(report))
        files.append(folder / "occupancy.png")
        used, capacity = _occupancy(report)
        draw_occupancy(files[-1], f"{name}: blocks held", times, used, capacity)
    latencies = _latencies(replayed)
    if latencies:
        files.append(folder / "latency.png")
        draw_latency(files[-1], f"{name}: latency", latencies)
    return files


def _hit_ratios(report: Mapping[str, Any]) -> dict[str, list[float]]:
    return {
        tier["name"]: [
            interval["hit_blocks"][number] / max(1, interval["referenced_blocks"])
            for interval in report["over_time"]
        ]
        for number, tier in enumerate(report["tiers"])
    }


def _occupancy(report: Mapping[str, Any]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the bytes held by each tier in each stretch, and the capacities that are known."""
    settings = report["settings"]
    block_bytes = settings["block_bytes"]
    used: dict[str, list[float]] = {tier["name"]: [] for tier in report["tiers"]}
    held = [0] * len(used)
    for interval in report["over_time"]:
        held = interval["resident_blocks"] or held
        for blocks, line in zip(held, used.values(), strict=True):
            line.append(blocks * block_bytes)
    capacity = {report["tiers"][0]["name"]: float(settings["slot_count"] * block_bytes)}
    for tier in settings["secondary_tiers"]:
        if "capacity_bytes" in tier:
            capacity[tier["name"]] = float(tier["capacity_bytes"])
    return used, capacity


def _latencies(replayed: Replayed) -> dict[str, list[float]]:
    measured, model = replayed.measured, replayed.settings.model
    same_requests = replayed.trace.requests[: measured.requests]
    kinds = {
        "first token, with kvtier": list(measured.first_token.seconds),
        "first token, without": model.first_tokens_without_offloading(same_requests),
        "waiting for tiers": list(measured.waiting.seconds),
    }
    for name, tier in zip(measured.sources[1:], measured.tiers, strict=True):
        kinds[f"promotion from {name}"] = list(tier.promotion.seconds)
        kinds[f"cascade to {name}"] = list(tier.cascade.seconds)
    return {name: seconds for name, seconds in kinds.items() if seconds}
