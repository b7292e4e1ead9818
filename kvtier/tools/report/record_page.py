"""The page of a record: sources of prompt tokens, requests, and faults of tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.tools.report.axis import clock_axis, lasted, moment
from kvtier.tools.report.page import (
    REST,
    PageTable,
    Panel,
    ReportPage,
    Series,
    Strips,
    percent,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.tools.report.record import Bin, Record, RecordFault
    from kvtier.tools.report.spread import Spread

FAULTS_SHOWN_MAX: Final = 10
PERCENTS: Final = (50, 99)
ON_GPU: Final = "the GPU's prefix cache"
COMPUTED: Final = "computed"
NO_WORK: Final = "no work done"
RESET: Final = "reset"


def record_page(record: Record, title: str, source: str, notes: Sequence[str] = ()) -> ReportPage:
    """Return the page. ``notes``: sentences about the file's faults."""
    bins = record.bins
    return ReportPage(
        title=title,
        summary=[*_summary(record), *notes],
        axis=clock_axis(record.begins_s, record.bin_s, len(bins)),
        panels=[*_sources(record, bins), _tiers(record, len(bins)), *_requests(record, bins)],
        tables=[_totals(record), _shapes(record.all), _faults(record)],
        source=source,
        verdict="warned" if record.fault_count or notes else "",
    )


def _tiers_of(record: Record) -> list[str]:
    return sorted(record.all.loaded)


def _summary(record: Record) -> list[str]:
    every = record.all
    found = [_avoided(record)]
    found.append(
        f"{every.requests:,} requests with {every.tokens:,} prompt tokens, from "
        f"{moment(record.first_s)} to {moment(record.last_s)} UTC "
        f"({lasted(record.last_s - record.first_s)})."
    )
    if every.never_ran:
        found.append(
            f"Requests that never ran: {every.never_ran:,}. Their prompts count as computed."
        )
    found.append(_fault_sentence(record))
    return found


def _avoided(record: Record) -> str:
    every = record.all
    tokens = every.tokens or 1
    loaded = every.loaded.total()
    tiers = ", ".join(
        f"{tier} {percent(every.loaded[tier] / tokens)}" for tier in _tiers_of(record)
    )
    by_tier = f" ({tiers})" if loaded else ""
    return (
        f"{percent((every.gpu + loaded) / tokens)} of the prompt tokens needed no prefill: "
        f"{percent(loaded / tokens)} were loaded from kvtier's tiers{by_tier}, and "
        f"{percent(every.gpu / tokens)} were in {ON_GPU}."
    )


def _fault_sentence(record: Record) -> str:
    if not record.fault_count:
        return "No tier failed."
    longest = record.faults[0]
    until = "" if longest.is_over else ", and still did not at the end"
    faults = "1 fault" if record.fault_count == 1 else f"{record.fault_count:,} faults"
    return (
        f"{faults} of tiers. The longest: {longest.tier} did no {longest.work} for "
        f"{lasted(longest.seconds)} from {moment(longest.from_s)} UTC on{until}."
    )


def _sources(record: Record, bins: Sequence[Bin]) -> list[Panel]:
    def a_second(of: Callable[[Bin], int]) -> list[float | None]:
        return [of(each) / record.bin_s for each in bins]

    def share(of: Callable[[Bin], int]) -> list[float | None]:
        return [of(each) / each.tokens if each.tokens else None for each in bins]

    every = record.all
    tiers = [
        Series(tier, [each.loaded[tier] / record.bin_s for each in bins])
        for tier in _tiers_of(record)
    ]
    gpu = [Series(ON_GPU, a_second(lambda each: each.gpu))] if every.gpu else []
    computed = Series(COMPUTED, a_second(lambda each: each.computed), REST)
    avoided = [Series("in all", share(lambda each: each.gpu + each.loaded.total()))]
    if every.gpu and every.loaded:
        avoided.append(Series("by kvtier alone", share(lambda each: each.loaded.total())))
    return [
        Panel(
            "Where prompt tokens came from",
            f"tokens a second, by the arrival of their requests; a point is {lasted(record.bin_s)}",
            [*tiers, *gpu, computed],
            "stack",
        ),
        Panel(
            "Prefill avoided",
            "of the prompt tokens needed no prefill",
            avoided,
            top=1.0,
            shown=percent,
        ),
    ]


def _requests(record: Record, bins: Sequence[Bin]) -> list[Panel]:
    def spreads(of: Callable[[Bin], Spread]) -> list[Series]:
        return [Series(f"p{each}", [of(one).percentile(each) for one in bins]) for each in PERCENTS]

    rate: list[float | None] = [each.requests / record.bin_s for each in bins]
    panels = [
        Panel("Requests", "arrivals a second", [Series("", rate)]),
        Panel("Prompts", "tokens", spreads(lambda each: each.prompt), shown=whole),
        Panel("Answers", "tokens", spreads(lambda each: each.answer), shown=whole),
    ]
    waited = spreads(lambda each: each.waited)
    panels.append(
        Panel("Wait of requests", "from arrival until they load or run", waited, shown=lasted)
    )
    took = spreads(lambda each: each.took)
    panels.append(Panel("Duration of requests", "from arrival to end", took, shown=lasted))
    return panels


def _tiers(record: Record, count: int) -> Strips:
    rows: dict[str, list[str | None]] = {
        f"{tier}, {work}": [None] * count for tier, work in sorted(record.works)
    }
    for fault in record.faults:
        first, last = record.bin_of(fault.from_s), record.bin_of(fault.from_s + fault.seconds)
        for at in range(first, last + 1):
            rows[f"{fault.tier}, {fault.work}"][at] = NO_WORK
    if record.resets:
        rows["resets of the connector"] = [None] * count
        for at_s in record.resets:
            rows["resets of the connector"][record.bin_of(at_s)] = RESET
    note = "when a tier did no loads or stores, and resets"
    return Strips("Faults", note, rows, {NO_WORK: "OPEN", RESET: "a"})


def _totals(record: Record) -> PageTable:
    every = record.all
    tokens = every.tokens or 1
    sources = [(tier, every.loaded[tier]) for tier in _tiers_of(record)]
    sources += [(ON_GPU, every.gpu), (COMPUTED, every.computed), ("all", every.tokens)]
    rows = [(name, f"{each:,}", percent(each / tokens)) for name, each in sources if each]
    return PageTable("Prompt tokens", ("from", "tokens", "share"), rows)


def _shapes(every: Bin) -> PageTable:
    measured: list[tuple[str, Spread, Callable[[float], str]]] = [
        ("prompt, tokens", every.prompt, whole),
        ("answer, tokens", every.answer, whole),
        ("wait before it loads or runs", every.waited, lasted),
        ("duration", every.took, lasted),
    ]
    rows = []
    for name, spread, shown in measured:
        found = [spread.percentile(each) for each in (50, 90, 99)]
        if None not in found:
            rows.append((name, *(shown(each) for each in found if each is not None)))
    return PageTable("Requests", ("", "p50", "p90", "p99"), rows)


def _faults(record: Record) -> PageTable:
    rows = [_fault_row(each) for each in record.faults[:FAULTS_SHOWN_MAX]]
    shown = f"The {FAULTS_SHOWN_MAX} longest faults" if record.fault_count > len(rows) else "Faults"
    return PageTable(shown, ("tier", "did no", "from (UTC)", "for"), rows, is_text=True)


def _fault_row(fault: RecordFault) -> tuple[str, ...]:
    until = "" if fault.is_over else ", to the end"
    return fault.tier, fault.work, moment(fault.from_s), f"{lasted(fault.seconds)}{until}"
