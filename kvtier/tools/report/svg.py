"""Pictures of series as inline SVG. Text stays outside: it is to be as large on a phone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH: Final = 1000
HEIGHT: Final = 100


def lines(series: Mapping[str, Sequence[float | None]], top: float, ended: float) -> str:
    """Draw lines, one a series, over a shaded part from the fraction ``ended`` on.

    A series is drawn in the style of the class that it is given for.
    """
    drawn = "".join(
        f'<polyline class="{style}" points="{points}"/>'
        for style, values in series.items()
        for points in _runs(values, top)
    )
    return _svg("graph", f"{_shade(ended)}{drawn}")


def strip(styles: Sequence[str | None], ended: float) -> str:
    """Draw a strip: one rectangle for each run of equal styles, none for None."""
    step = WIDTH / max(1, len(styles))
    drawn = []
    start = 0
    for at in range(1, len(styles) + 1):
        if at == len(styles) or styles[at] != styles[start]:
            if styles[start] is not None:
                drawn.append(
                    f'<rect class="{styles[start]}" x="{start * step:.1f}" '
                    f'width="{(at - start) * step:.1f}" height="{HEIGHT}"/>'
                )
            start = at
    return _svg("strip", f"{_shade(ended)}{''.join(drawn)}")


def _runs(values: Sequence[float | None], top: float) -> list[str]:
    """Return the points of each run of values without a gap."""
    step = WIDTH / max(1, len(values))
    runs: list[list[str]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        height = HEIGHT - 98 * min(1.0, value / top if top else 0.0) - 1
        runs[-1].append(f"{(number + 0.5) * step:.1f},{height:.1f}")
    return [" ".join(run) for run in runs if run]


def _shade(ended: float) -> str:
    """Mark the time after the faults."""
    return (
        f'<rect class="rest" x="{ended * WIDTH:.1f}" width="{(1 - ended) * WIDTH:.1f}" '
        f'height="{HEIGHT}"/>'
    )


def _svg(style: str, inside: str) -> str:
    return (
        f'<svg class="{style}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true">{inside}</svg>'
    )
