"""The tables of ``stress.bench ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.terminal import table
from stress.bench.harness import spread, yes_or_no
from stress.bench.sides import KVTIER, SIDES, VLLM
from stress.bench.turns import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

LRU_FACTOR_MAX: Final = 2.0
"""A policy may cost this many times what lru does."""


def show_calls(policies: Sequence[dict[str, Any]], runs: int) -> None:
    """Print what each call costs, by policy; beside the first one, those after it."""
    for figures in policies:
        columns = ["ns a key", "vLLM", "p99", "kvtier", "p99", "ratio", "of runs", "bound", "holds"]
        rows = [
            [
                name if call["unit"] == "ns/key" else f"{name} (a call)",
                *(f"{call[side][key]:,.0f}" for side in SIDES for key in ("median_ns", "p99_ns")),
                f"{call['ratio']:.2f}",
                spread([call["ratio_min"], call["ratio_max"]], 2),
                "" if call["bound"] is None else f"{call['bound']:.2f}",
                yes_or_no(call["holds"]),
            ]
            for name, call in figures["calls"].items()
        ]
        first = policies[0]
        if figures is not first:
            columns.append(f"x {first['policy']} (max {LRU_FACTOR_MAX:.0f})")
            for row, name in zip(rows, figures["calls"], strict=True):
                ours, lru = (each["calls"][name][KVTIER]["median_ns"] for each in (figures, first))
                row.append(f"{ours / lru:.2f}")
        table(
            f"{figures['policy']} beside vLLM's {figures['vllm_policy']}: "
            f"{figures['blocks']:,} blocks, {runs} runs",
            columns,
            rows,
        )


def show_scale(points: Sequence[dict[str, Any]]) -> None:
    """Print the cost by resident blocks."""
    for policy in dict.fromkeys(point["policy"] for point in points):
        ours = [point for point in points if point["policy"] == policy]
        rows = []
        for name in Call:
            calls = [point["calls"][name] for point in ours if name in point["calls"]]
            if not calls:
                continue
            for side in SIDES:
                medians = [call[side]["median_ns"] for call in calls]
                times = f"{medians[-1] / medians[0]:.2f}"
                rows.append([f"{name}: {side}", *(f"{each:,.0f}" for each in medians), times])
            rows.append([f"{name}: ratio", *(f"{call['ratio']:.2f}" for call in calls), ""])
        table(
            f"{policy}: ns a key (calls of a step: ns a call) by resident blocks",
            ["", *(f"{point['blocks']:,}" for point in ours), "last / first"],
            rows,
        )


def show_memory(
    policies: Sequence[dict[str, Any]], block_bytes_max: int, gc_pause_ms_max: float
) -> None:
    """Print memory and pauses."""
    for weighed in policies:
        both = [weighed[side] for side in (VLLM, KVTIER)]
        blocks = both[1]["blocks"]
        shown = (
            ("bytes a block (allocated)", "traced_bytes_per_block", 0),
            ("bytes a block (growth of the process)", "rss_bytes_per_block", 0),
            ("longest garbage collection, ms", "gc_longest_ms", 2),
        )
        bars = (
            (f"{block_bytes_max}", weighed["bytes_hold"]),
            ("", None),
            (f"{gc_pause_ms_max:.0f}", weighed["gc_holds"]),
        )
        rows = [
            [name, *(f"{each[key]:.{digits}f}" for each in both), bound, yes_or_no(holds)]
            for (name, key, digits), (bound, holds) in zip(shown, bars, strict=True)
        ]
        for name in both[1]["call_longest_us"]:
            pauses = (f"{each['call_longest_us'][name] / 1e3:.2f}" for each in both)
            rows.append([f"longest {name}, ms", *pauses, "", ""])
        table(
            f"{weighed['policy']}: {blocks:,} blocks, each side alone (times: CPU)",
            ["", "vLLM", "kvtier", "bound", "holds"],
            rows,
        )
