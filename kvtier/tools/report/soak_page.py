"""The page of a soak: load, tiers and faults of a run, and the checks after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.tools.report.axis import elapsed_axis, lasted
from kvtier.tools.report.page import PageTable, Panel, ReportPage, Series, Strips, number, percent
from kvtier.tools.report.soak import STATES, Bins, Soak, bins_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MANY: Final = 4
"""Faults of a kind at once, or in a bin: drawn in full."""

_AT_ONCE: Final = {**{f"{each}": f"f{each}" for each in range(1, MANY)}, f"{MANY} or more": "f4"}


def soak_page(figures: Mapping[str, Any], source: str) -> ReportPage:
    """Return the page of a record. Raises ``ValueError`` if a part is missing."""
    soak = msgspec.convert(figures, Soak)
    bins = bins_of(soak)
    return ReportPage(
        title=f"kvtier soak: {soak.layer}, seed {soak.seed}",
        summary=_summary(soak),
        axis=elapsed_axis(bins.ends_s, bins.count, shaded_from_s=soak.faults_ended_s or None),
        panels=[*_graphs(bins), _breakers(bins), _faults(bins)],
        tables=_tables(soak),
        source=source,
        verdict="passed" if soak.failure is None else "failed",
        failure=soak.failure or "",
    )


def _summary(soak: Soak) -> list[str]:
    word = "PASSED" if soak.failure is None else "FAILED"
    rate = soak.injected_a_minute
    much = "" if rate is None else f", {rate:,.0f} a minute"
    ends = f"--minutes {soak.planned_s / 60:g}" if soak.planned_s else "--gate"
    found = [f"{word}: {soak.injected_total:,} faults injected{much}, in {lasted(soak.seconds)}."]
    if soak.samples:
        last = soak.samples[-1]
        hits = f", {percent(last.hits / last.lookups)} of lookups hit" if last.lookups else ""
        found.append(
            f"{last.requests:,} requests; {last.blocks_stored:,} blocks stored, "
            f"{last.blocks_read:,} read and right{hits}."
        )
    if soak.spells:
        worst = max(soak.spells, key=lambda each: each.to_s - each.from_s)
        found.append(
            f"The longest fault: {worst.kind} of {worst.target} for "
            f"{lasted(worst.to_s - worst.from_s)}, {lasted(worst.from_s)} after the beginning."
        )
    return [*found, f"python -m stress --layer {soak.layer} --seed {soak.seed} {ends}"]


def _graphs(bins: Bins) -> list[Panel]:
    resident = [Series(tier, values) for tier, values in bins.resident.items()]
    panels = [
        Panel("Throughput", "blocks read and stored a second", [Series("", bins.blocks_per_s)]),
        Panel(
            "Hit ratio", "of blocks looked up", [Series("", bins.hit_ratio)], shown=percent, top=1.0
        ),
        Panel("Residency", "blocks that a tier holds", resident),
    ]
    if any(bins.quarantined):
        panels.append(Panel("Quarantine", "slots", [Series("", bins.quarantined)]))
    if any(bins.memory_bytes):
        memory = Series("", [each and each / 2**20 for each in bins.memory_bytes])
        panels.append(Panel("Memory", "MiB, of the process that has the runtime", [memory]))
    return panels


def _breakers(bins: Bins) -> Strips:
    note = "the worst state of each moment"
    styles = {_word(state): state for state in STATES}
    rows = {
        tier: [state and _word(state) for state in states] for tier, states in bins.breakers.items()
    }
    return Strips("Circuit breakers", note, rows, styles)


def _word(state: str) -> str:
    return state.lower().replace("_", "-")


def _faults(bins: Bins) -> Strips:
    words: Sequence[str] = list(_AT_ONCE)
    rows: dict[str, list[str | None]] = {
        kind: [words[min(MANY, count) - 1] if count else None for count in counts]
        for kind, counts in bins.faults.items()
    }
    note = "under way at once, by kind; the shaded time is without faults"
    return Strips("Faults", note, rows, _AT_ONCE)


def _tables(soak: Soak) -> list[PageTable]:
    tables = [_counts("Injected", soak.injected)]
    tables += [_counts(f"Noticed by {tier}", counts) for tier, counts in soak.noticed.items()]
    tables.append(_counts("Figures", soak.figures))
    tables.append(PageTable("After the faults", (), list(soak.checks.items()), is_text=True))
    return tables


def _counts(name: str, counts: Mapping[str, float]) -> PageTable:
    return PageTable(
        name, (), [(each, number(count)) for each, count in sorted(counts.items()) if count]
    )
