"""One self-contained page of a run: all that happened on one time axis, readable on a phone."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from kvtier.tools.report.svg import lines, strip
from stress.report.bins import STATES, Bins, bins_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stress.record import Record

STYLE: Final = files("kvtier.tools.report") / "page.css"
TICKS: Final = 4
MANY: Final = 4  #: faults of a kind at once, or in a bin: drawn in full


def page_of(record: Record) -> str:
    """Return the page as HTML."""
    bins = bins_of(record)
    ended = min(1.0, record.faults_ended_s / bins.ends_s) if record.faults_ended_s else 1.0
    title = f"kvtier soak: {record.layer}, seed {record.seed}"
    parts = [_verdict(record), _graphs(bins, ended), _breakers(bins, ended), _faults(bins, ended)]
    parts += [_counts(record), _checks(record)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{''.join(parts)}</main></body></html>\n"
    )


def _verdict(record: Record) -> str:
    failed = record.failure is not None
    word = "FAILED" if failed else "PASSED"
    ends = f"--minutes {record.planned_s / 60:g}" if record.planned_s else "--gate"
    command = f"python -m stress --layer {record.layer} --seed {record.seed} {ends}"
    why = f"<pre>{escape(record.failure or '')}</pre>" if failed else ""
    return (
        f'<p class="verdict {word.lower()}"><strong>{word}</strong> '
        f"{faults_of(record)}, in {record.seconds / 60:.1f} minutes</p>{why}"
        f"<p><code>{escape(command)}</code></p>"
    )


def faults_of(record: Record) -> str:
    """Return how many faults there were, in words."""
    rate = record.injected_a_minute
    much = "" if rate is None else f", {rate:,.0f} a minute"
    return f"{record.injected_total:,} faults injected{much}"


def _graphs(bins: Bins, ended: float) -> str:
    rates = [value for value in bins.blocks_per_s if value is not None]
    top = max(rates, default=1.0)
    panels = [
        _panel(
            "Throughput",
            f"blocks read and stored a second, up to {top:,.0f}",
            lines({"a": bins.blocks_per_s}, top, ended),
        ),
        _panel(
            "Hit ratio",
            "of blocks looked up, up to 100 %",
            lines({"b": bins.hit_ratio}, 1.0, ended),
        ),
    ]
    blocks = [value for each in bins.resident.values() for value in each if value is not None]
    most = max(blocks, default=1.0)
    styles = dict(zip(bins.resident, "abcdef", strict=False))
    legend = " ".join(
        f'<span class="key {style}">{escape(tier)}</span>' for tier, style in styles.items()
    )
    drawn = lines({styles[tier]: each for tier, each in bins.resident.items()}, most, ended)
    panels.append(_panel("Residency", f"blocks, up to {most:,.0f}: {legend}", drawn))
    held = max((each for each in bins.quarantined if each is not None), default=0.0)
    panels.append(
        _panel(
            "Quarantine",
            f"slots, up to {held:,.0f}",
            lines({"c": bins.quarantined}, max(held, 1.0), ended),
        )
    )
    return f"<section>{''.join(panels)}{_axis(bins)}</section>"


def _panel(name: str, text: str, drawn: str) -> str:
    return f"<h2>{name} <small>{text}</small></h2>{drawn}"


def _axis(bins: Bins) -> str:
    unit, name = (60.0, "min") if bins.ends_s >= 120 else (1.0, "s")
    marks = [f"{bins.ends_s / unit * tick / TICKS:.1f} {name}" for tick in range(TICKS + 1)]
    return f'<div class="axis">{"".join(f"<span>{mark}</span>" for mark in marks)}</div>'


def _breakers(bins: Bins, ended: float) -> str:
    legend = " ".join(f'<span class="key {state}">{state.lower()}</span>' for state in STATES)
    rows = [_row(tier, strip(states, ended)) for tier, states in bins.breakers.items()]
    heading = f"<h2>Breakers <small>the worst of each moment: {legend}</small></h2>"
    return f"<section>{heading}{''.join(rows)}{_axis(bins)}</section>" if rows else ""


def _faults(bins: Bins, ended: float) -> str:
    rows = [
        _row(kind, strip([f"f{min(MANY, count)}" if count else None for count in counts], ended))
        for kind, counts in bins.faults.items()
    ]
    heading = "<h2>Faults <small>darker: more at once; then shaded, without faults</small></h2>"
    return f"<section>{heading}{''.join(rows)}{_axis(bins)}</section>" if rows else ""


def _row(name: str, drawn: str) -> str:
    return f'<div class="row"><span>{escape(name)}</span>{drawn}</div>'


def _counts(record: Record) -> str:
    tables = [_table("Injected", record.injected)]
    tables += [_table(f"Noticed by {tier}", counts) for tier, counts in record.noticed.items()]
    if record.figures:
        tables.append(_table("Figures", record.figures))
    return f'<section class="tables">{"".join(tables)}</section>'


def _table(name: str, counts: Mapping[str, float]) -> str:
    rows = "".join(
        f"<tr><td>{escape(each)}</td><td>{count:,.6g}</td></tr>"
        for each, count in sorted(counts.items())
        if count
    )
    return f"<table><caption>{escape(name)}</caption>{rows}</table>" if rows else ""


def _checks(record: Record) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(result)}</td></tr>"
        for name, result in record.checks.items()
    )
    return f"<section><table><caption>After the faults</caption>{rows}</table></section>"
