"""The page of a comparison of eviction policies, as ``kvtier replay --policies`` writes it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.tools.replay.curves import MIN
from kvtier.tools.report.axis import Axis
from kvtier.tools.report.page import REST, PageTable, Panel, ReportPage, Series, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENDLESS: Final = "an endless cache"


class _Point(msgspec.Struct):
    capacity_blocks: int
    capacity_share: float
    hit_ratio: float


class _ComparedTrace(msgspec.Struct):
    name: str
    references: int
    distinct_blocks: int


class Policies(msgspec.Struct):
    """A report on policies."""

    complete: bool
    trace: _ComparedTrace
    endless_hit_ratio: float
    policies: dict[str, list[_Point]]


def policies_page(figures: Mapping[str, Any], source: str) -> ReportPage:
    """Return the page of a report. Raises ``ValueError`` if a part is missing."""
    read = msgspec.convert(figures, Policies)
    capacities = sorted(
        {
            each.capacity_blocks: each.capacity_share
            for row in read.policies.values()
            for each in row
            if each.capacity_blocks > 0
        }.items()
    )
    ratios = {
        name: {each.capacity_blocks: each.hit_ratio for each in row}
        for name, row in read.policies.items()
    }
    series = [
        Series(name, [row.get(blocks) for blocks, _ in capacities], "f" if name == MIN else "")
        for name, row in ratios.items()
    ]
    series.append(Series(ENDLESS, [read.endless_hit_ratio] * len(capacities), REST))
    return ReportPage(
        title=f"kvtier replay, policies: {read.trace.name}",
        summary=_summary(read, capacities, ratios),
        axis=_axis(capacities) if capacities else None,
        panels=[Panel("Hit ratio", "of the requested blocks, by capacity", series, shown=percent)],
        tables=[_table(read, capacities, ratios)],
        source=source,
        verdict="" if read.complete else "warned",
    )


def _axis(capacities: Sequence[tuple[int, float]]) -> Axis:
    """Return a logarithmic axis of capacities."""
    logs = [math.log(blocks) for blocks, _ in capacities]
    wide = logs[-1] - logs[0]
    middles = [(each - logs[0]) / wide if wide else 0.5 for each in logs]
    edges = [0.0, *((low + high) / 2 for low, high in pairwise(middles)), 1.0]
    labels = [f"{blocks:,} blocks ({percent(share)})" for blocks, share in capacities]
    ticks = [(at, percent(share)) for at, (_, share) in zip(middles, capacities, strict=True)]
    return Axis("capacity", edges, middles, labels, ticks)


def _summary(
    read: Policies,
    capacities: Sequence[tuple[int, float]],
    ratios: Mapping[str, Mapping[int, float]],
) -> list[str]:
    real = {name: row for name, row in ratios.items() if name != MIN}
    sentences = []
    compared = []
    for blocks, share in capacities:
        there = [row[blocks] for row in real.values() if blocks in row]
        if len(there) > 1:
            compared.append((max(there) - min(there), blocks, share))
    if compared:
        _, blocks, share = max(compared)
        order = sorted(((row[blocks], name) for name, row in real.items() if blocks in row))[::-1]
        listed = ", ".join(f"{name} {percent(ratio)}" for ratio, name in order)
        sentences.append(
            f"The choice of the policy matters most at {percent(share)} of the distinct blocks "
            f"({blocks:,} blocks). Hits there: {listed}."
        )
    sentences.append(
        f"A cache that never evicts would hit {percent(read.endless_hit_ratio)} of the "
        f"{read.trace.references:,} requested blocks. {MIN} knows the future: no policy hits more."
    )
    if not read.complete:
        sentences.append("The run was stopped: not all was compared.")
    return sentences


def _table(
    read: Policies,
    capacities: Sequence[tuple[int, float]],
    ratios: Mapping[str, Mapping[int, float]],
) -> PageTable:
    columns = ["policy", *(f"{blocks:,} ({percent(share)})" for blocks, share in capacities)]
    rows = [
        [name, *(percent(row[blocks]) if blocks in row else "" for blocks, _ in capacities)]
        for name, row in ratios.items()
    ]
    name = f"Hit ratio, by blocks of capacity (share of {read.trace.distinct_blocks:,})"
    return PageTable(name, columns, rows)
