"""Draws series as inline SVG. Numbers are outside of it, so that phones do not shrink them.

A picture is stretched to its place, so that it has the width of the page; lines keep their width.
"""

from __future__ import annotations

from html import escape
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tools.report.axis import Axis

    Values = Sequence[float | None]

WIDTH: Final = 1000
HEIGHT: Final = 100


def lines(
    title: str, text: str, series: Sequence[tuple[str, Values]], top: float, axis: Axis
) -> str:
    """Draw lines, one for each series, in the style of its class."""
    drawn = []
    for style, values in series:
        for run in _runs(values):
            points = [f"{_x(axis.middles[at])},{_y(values[at], top)}" for at in run]
            if len(points) == 1:  # a point is a line without a length
                points *= 2
            drawn.append(f'<polyline class="{style}" points="{" ".join(points)}"/>')
    return _svg("graph", title, text, axis, drawn)


def stack(
    title: str, text: str, series: Sequence[tuple[str, Values]], top: float, axis: Axis
) -> str:
    """Draw series on top of each other, the first at the bottom; None is 0."""
    below = [0.0] * axis.count
    drawn = []
    for style, values in series:
        above = [low + (value or 0.0) for low, value in zip(below, values, strict=True)]
        drawn += [
            f'<polygon class="{style}" points="{_band(run, below, above, top, axis)}"/>'
            for run in _runs([value or None for value in values])
        ]
        below = above
    return _svg("graph", title, text, axis, drawn)


def strip(title: str, text: str, styles: Sequence[str | None], axis: Axis) -> str:
    """Draw a strip: one rectangle for each run of equal styles, none for None."""
    drawn = []
    for style, run in groupby(range(axis.count), key=lambda at: styles[at]):
        bins = list(run)
        left, right = axis.edges[bins[0]], axis.edges[bins[-1] + 1]
        if style is not None:
            drawn.append(
                f'<rect class="{style}" x="{_x(left)}" width="{_x(right - left)}" '
                f'height="{HEIGHT}"/>'
            )
    return _svg("strip", title, text, axis, drawn)


def _runs(values: Values) -> list[list[int]]:
    """Return the positions that have a value, in runs without a gap."""
    runs = groupby(range(len(values)), key=lambda at: values[at] is None)
    return [list(run) for is_gap, run in runs if not is_gap]


def _band(
    run: Sequence[int], below: Sequence[float], above: Sequence[float], top: float, axis: Axis
) -> str:
    """Return the corners of one run of a series that stands on others, bin by bin."""
    edges = [_x(edge) for edge in axis.edges]
    there = [f"{edges[at + side]},{_y(above[at], top)}" for at in run for side in (0, 1)]
    back = [f"{edges[at + side]},{_y(below[at], top)}" for at in reversed(run) for side in (1, 0)]
    corners = [*there, *back]
    return " ".join([corners[0], *(now for was, now in pairwise(corners) if now != was)])


def _x(fraction: float) -> str:
    return f"{fraction * WIDTH:.1f}"


def _y(value: float | None, top: float) -> str:
    return f"{HEIGHT - 98 * min(1.0, (value or 0.0) / top if top else 0.0) - 1:.1f}"


def _svg(style: str, title: str, text: str, axis: Axis, drawn: Sequence[str]) -> str:
    """``title`` and ``text`` are for screen readers."""
    shade = ""
    if axis.shaded_from < 1.0:
        left, wide = _x(axis.shaded_from), _x(1.0 - axis.shaded_from)
        shade = f'<rect class="rest" x="{left}" width="{wide}" height="{HEIGHT}"/>'
    ticks = "".join(
        f'<line class="tick" x1="{_x(at)}" x2="{_x(at)}" y2="{HEIGHT}"/>' for at, _ in axis.ticks
    )
    return (
        f'<svg class="{style}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img"><title>{escape(title)}</title><desc>{escape(text)}</desc>'
        f"{shade}{ticks}{''.join(drawn)}</svg>"
    )
