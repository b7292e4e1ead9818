"""The frame of a page: sentences, panels over one axis, and tables, as self-contained HTML.

Any text of a page, such as the name of a tier, may come from an untrusted file. So all text is
plain until it is escaped here (or in ``svg``), in one place each.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal

from kvtier.tools.report.axis import UNBROKEN
from kvtier.tools.report.svg import lines, stack, strip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.tools.report.axis import Axis

STYLES: Final = "abcdef"
"""Classes of series, in order; colours repeat if there are more series."""

NARROW_TICKS_MAX: Final = 6
"""The most ticks with labels on a narrow page; of more, every second one has a label."""

REST: Final = "g"
"""Class of the rest, which no tier had."""


def number(value: float) -> str:
    """Return a number as text: whole from a hundred on, otherwise with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def percent(value: float) -> str:
    """Return a share as text."""
    digits = ".1f" if abs(value) >= 0.001 or not value else ".1g"
    return f"{100 * value:{digits}}{UNBROKEN}%"


def whole(value: float) -> str:
    """Return a count as text."""
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Series:
    """One line of a panel, or one layer of a stack, with a value for each bin of the axis."""

    name: str
    values: Sequence[float | None]
    style: str = ""  #: by default, by its place in the panel

    @property
    def known(self) -> list[float]:
        """The values that exist."""
        return [value for value in self.values if value is not None]


@dataclass(frozen=True)
class Panel:
    """A graph. It is left out if no series has a value."""

    name: str
    unit: str
    series: Sequence[Series]
    kind: Literal["lines", "stack"] = "lines"
    top: float | None = None  #: of the scale; by default the highest value
    shown: Callable[[float], str] = number  #: returns a value as text


@dataclass(frozen=True)
class Strips:
    """Rows of states or counts. A row has a word for each bin of the axis, or None for nothing."""

    name: str
    note: str
    rows: Mapping[str, Sequence[str | None]]
    styles: Mapping[str, str]  #: class of each word


@dataclass(frozen=True)
class PageTable:
    """Rows of texts. The first column is text, the others are figures unless ``is_text``."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False


@dataclass(frozen=True)
class ReportPage:
    """Contents of a page. ``axis`` is that of all its panels."""

    title: str
    summary: Sequence[str]  #: sentences with the main figures
    axis: Axis | None
    panels: Sequence[Panel | Strips]
    tables: Sequence[PageTable]
    source: str  #: name of the file that was drawn
    verdict: Literal["", "passed", "failed", "warned"] = ""
    failure: str = ""  #: in full, as it was printed

    def html(self) -> str:
        """Return the page."""
        style = (files("kvtier.tools.report") / "page.css").read_text(encoding="utf-8")
        parts = [f"<h1>{escape(self.title)}</h1>", self._summary()]
        if self.axis is not None:
            name = escape(self.axis.name)
            parts.append(f"<p><small>From left to right in all graphs: {name}.</small></p>")
            parts += [_graph(each, self.axis) for each in self.panels if _has_something(each)]
        tables = "".join(_table(each) for each in self.tables if each.rows)
        parts.append(f'<section class="tables">{tables}</section>' if tables else "")
        parts.append(self._figures())
        parts.append(f"<footer>{escape(self.source)}</footer>")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8" />'
            '<meta name="viewport" content="width=device-width, initial-scale=1" />'
            f"<title>{escape(self.title)}</title><style>{style}</style></head>"
            f"<body><main>{''.join(parts)}</main></body></html>\n"
        )

    def _summary(self) -> str:
        failure = f"<pre>{escape(self.failure)}</pre>" if self.failure else ""
        sentences = "".join(f"<p>{escape(each)}</p>" for each in self.summary)
        return f'<section class="summary {self.verdict}">{sentences}</section>{failure}'

    def _figures(self) -> str:
        """Return all drawn values as a table, for screen readers and for figures."""
        axis, shown = self.axis, [each for each in self.panels if _has_something(each)]
        if axis is None or not shown:
            return ""
        columns = [axis.name]
        cells: list[list[str]] = [list(axis.labels)]
        for panel in shown:
            for name, values in _written(panel):
                columns.append(f"{panel.name}: {name}" if name else panel.name)
                cells.append([value or "" for value in values])
        table = _table(PageTable("", columns, list(zip(*cells, strict=True))))
        return f"<details><summary>All that is drawn, as figures</summary>{table}</details>"


def _has_something(panel: Panel | Strips) -> bool:
    if isinstance(panel, Strips):
        return any(word is not None for row in panel.rows.values() for word in row)
    return any(each.known for each in panel.series)


def _written(panel: Panel | Strips) -> list[tuple[str, Sequence[str | None]]]:
    """Return the names of a panel's series or rows, with their values as text."""
    if isinstance(panel, Strips):
        return list(panel.rows.items())
    return [
        (each.name, [None if value is None else panel.shown(value) for value in each.values])
        for each in panel.series
    ]


def _graph(panel: Panel | Strips, axis: Axis) -> str:
    drawn = _strips(panel, axis) if isinstance(panel, Strips) else _panel(panel, axis)
    return f"<section>{drawn}{_axis(axis)}</section>"


def _panel(panel: Panel, axis: Axis) -> str:
    series = [each for each in panel.series if each.known]
    top = _top(panel)
    styled = [
        (each, each.style or STYLES[at % len(STYLES)]) for at, each in enumerate(panel.series)
    ]
    draw = stack if panel.kind == "stack" else lines
    picture = draw(
        panel.name,
        " ".join(_described(each, panel, axis) for each in series),
        [(style, each.values) for each, style in styled],
        top,
        axis,
    )
    legend = _legend((style, each.name) for each, style in styled if each.name and each.known)
    scale = f"0 to {panel.shown(top)} {panel.unit}"
    return f"<h2>{escape(panel.name)} <small>{escape(scale)}</small></h2>{legend}{picture}"


def _top(panel: Panel) -> float:
    if panel.top is not None:
        return panel.top
    if panel.kind == "stack":
        sums = zip(*(each.values for each in panel.series), strict=True)
        return max((sum(value or 0.0 for value in each) for each in sums), default=1.0) or 1.0
    return max((max(each.known) for each in panel.series if each.known), default=1.0) or 1.0


def _described(series: Series, panel: Panel, axis: Axis) -> str:
    """Return a description of a line in words."""
    highest = max(series.known)
    at = axis.labels[series.values.index(highest)]
    mean = sum(series.known) / len(series.known)
    values = ", ".join(
        f"{word} {panel.shown(value)}"
        for word, value in (("lowest", min(series.known)), ("mean", mean), ("highest", highest))
    )
    return f"{series.name or panel.name}: {values} (at {at})."


def _strips(strips: Strips, axis: Axis) -> str:
    words = {word for row in strips.rows.values() for word in row if word is not None}
    legend = _legend((style, word) for word, style in strips.styles.items() if word in words)
    rows = "".join(
        f'<div class="row"><span>{escape(name)}</span>'
        f"{strip(name, _shares(row), [strips.styles.get(word or '') for word in row], axis)}</div>"
        for name, row in strips.rows.items()
    )
    note = escape(strips.note)
    return f"<h2>{escape(strips.name)} <small>{note}</small></h2>{legend}{rows}"


def _shares(row: Sequence[str | None]) -> str:
    """Return the share of the time of each word."""
    words = dict.fromkeys(word for word in row if word is not None)
    return ", ".join(f"{word}: {percent(row.count(word) / len(row))}" for word in words) + "."


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    keys = " ".join(f'<span class="key {style}">{escape(name)}</span>' for style, name in entries)
    return f'<p class="legend">{keys}</p>' if keys else ""


def _axis(axis: Axis) -> str:
    marks = "".join(
        f'<span style="left:{100 * at:.2f}%"{_side(at)}>{escape(label)}</span>'
        for at, label in axis.ticks
    )
    style = "axis many" if len(axis.ticks) > NARROW_TICKS_MAX else "axis"
    return f'<div class="{style}" aria-hidden="true">{marks}</div>'


def _side(at: float) -> str:
    """Return the side of its tick on which a label is, at the ends of the page."""
    if at < 0.03:
        return ' class="first"'
    return ' class="last"' if at > 0.95 else ""


def _table(table: PageTable) -> str:
    caption = f"<caption>{escape(table.name)}</caption>" if table.name else ""
    head = ""
    if any(table.columns):
        cells = "".join(f'<th scope="col">{escape(each)}</th>' for each in table.columns)
        head = f"<thead><tr>{cells}</tr></thead>"
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        f"{''.join(f'<td>{escape(each)}</td>' for each in others)}</tr>"
        for first, *others in table.rows
    )
    style = ' class="text"' if table.is_text else ""
    return (
        f'<div class="scroll" tabindex="0"><table{style}>{caption}{head}<tbody>{rows}</tbody>'
        "</table></div>"
    )
