"""Draws the dashboard of a run of an engine with faults, as Grafana lays it out.

REPORT.json is what ``python -m stress.monitored --report REPORT.json`` writes. Needs matplotlib::

    python docs/draw_dashboard.py REPORT.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from io import BytesIO
from itertools import accumulate, cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter
from PIL import Image

from kvtier.tools.monitoring.rows import STATE_NAMES, lines_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Formatter

Series = list[dict[str, Any]]

GROUND, PANEL, INK, FAINT = "#111217", "#181B1F", "#CCCCDC", "#34363C"
COLOURS: Final = ("#73BF69", "#F2CC0C", "#5794F2", "#FF9830", "#F2495C", "#B877D9", "#8AB8FF")
STATES: Final = ("#56A64B", "#FF9830", "#F2CC0C", "#E02F44")
WIDTH_IN, LINE_IN, HEAD_IN, DPI = 13.0, 1.62, 0.3, 76
CHARACTERS_IN, GAP_CHARACTERS = 19.0, 5  #: of a legend, which ends where there is no room
NAMES_FAULTS: Final = "Faults of tiers"
UNITS: Final[dict[str, Formatter]] = {
    "percentunit": PercentFormatter(1.0, decimals=0),
    "s": EngFormatter("s"),
    "ms": FuncFormatter(lambda value, _: f"{value:g} ms"),
    "Bps": EngFormatter("B/s"),
    "bytes": EngFormatter("B"),
    "short": EngFormatter(),
}
"""Grafana's names of units, as far as they are used: how a value is written."""


def draw(report: dict[str, Any]) -> Figure:
    """Return the picture of a report: a tier's row for the first tier only."""
    tiers = [each["row"] for each in report["panels"] if each["row"].startswith("Tier ")]
    panels = [each for each in report["panels"] if each["row"] not in set(tiers) - {tiers[0]}]
    lines: list[tuple[str, list[dict[str, Any]]]] = []
    for title, found in groupby(panels, key=lambda each: each["row"]):
        left = list(found)
        for number, count in enumerate(lines_of(len(left))):
            lines.append(("" if number else title, left[:count]))
            left = left[count:]
    height = sum(LINE_IN + (HEAD_IN if title else 0) for title, _ in lines) + 0.1
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor=GROUND)
    top = height - 0.05
    began = min(map(_first, (each["series"] for each in panels if each["series"])))
    for title, row in lines:
        if title:
            top -= HEAD_IN
            figure.text(0.008, (top + 0.08) / height, f"▾ {title}", color=INK, fontsize=10)
        for number, panel in enumerate(row):
            share = 1 / len(row)
            box = (number * share + 0.003, (top - LINE_IN + 0.04) / height, share - 0.006)
            axes = _panel(figure, panel, (*box, (LINE_IN - 0.07) / height), began)
            if panel["title"] == NAMES_FAULTS:
                _name_faults(axes, report["faults"])
        top -= LINE_IN
    return figure


def _panel(
    figure: Figure, panel: dict[str, Any], box: tuple[float, float, float, float], began: float
) -> Axes:
    left, bottom, width, height = box
    figure.add_axes(box, facecolor=PANEL, xticks=[], yticks=[]).spines[:].set_visible(False)
    total = figure.get_size_inches()
    title_at = bottom + height - 0.19 / total[1]
    figure.text(left + 0.005, title_at, panel["title"], color=INK, fontsize=8, weight="bold")
    space = 1.35 / total[0] if panel["kind"] in STATE_NAMES else 0.62 / total[0]
    room = (left + space, bottom + 0.42 / total[1], width - space - 0.012)
    axes = figure.add_axes((*room, height - 0.68 / total[1]), facecolor=PANEL)
    axes.tick_params(colors=INK, labelsize=7, length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} min"))
    if panel["kind"] == "table":
        _table(axes, panel["series"])
    elif panel["kind"] in STATE_NAMES:
        _states(axes, panel, began)
    else:
        _lines(axes, panel, began)
    return axes


def _name_faults(axes: Axes, faults: dict[str, Any]) -> None:
    """Write the name of each fault where it begins."""
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    for number, (name, fault) in enumerate(faults.items()):
        at = fault["began_s"] / 60
        axes.axvline(at, color=INK, linewidth=0.5, linestyle=":")
        height = 0.93 - 0.11 * (number % 2)
        place = axes.get_xaxis_transform()
        axes.text(at, height, name, color=INK, fontsize=6.5, ha="center", transform=place)


def _first(series: Series) -> float:
    return min((float(each["values"][0][0]) for each in series), default=0.0)


def _points(each: dict[str, Any], began: float) -> tuple[list[float], list[float]]:
    values = [(float(at), float(value)) for at, value in each["values"]]
    return [(at - began) / 60 for at, _ in values], [value for _, value in values]


def _name(each: dict[str, Any]) -> str:
    return ", ".join(value for _, value in sorted(each["metric"].items()))


def _lines(axes: Axes, panel: dict[str, Any], began: float) -> None:
    drawn = [(_name(each), *_points(each, began)) for each in panel["series"]]
    drawn.sort(key=lambda each: -max(each[2], default=0.0))
    if panel["kind"] == "stack":
        width = max(len(each[1]) for each in drawn)
        whole = [each for each in drawn if len(each[1]) == width]
        axes.stackplot(
            whole[0][1], *[each[2] for each in whole], colors=COLOURS, alpha=0.75, linewidth=0
        )
    else:
        for (_, minutes, values), colour in zip(drawn, cycle(COLOURS), strict=False):
            axes.plot(minutes, values, color=colour, linewidth=1.0)
    axes.set_ylim(bottom=-0.03 * (axes.get_ylim()[1] if panel["unit"] != "percentunit" else 1.0))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(UNITS[panel["unit"]])
    axes.grid(visible=True, color=FAINT, linewidth=0.6)
    named = [(name, colour) for (name, *_), colour in zip(drawn, cycle(COLOURS)) if name]
    _legend(axes, named)


def _states(axes: Axes, panel: dict[str, Any], began: float) -> None:
    series = sorted(panel["series"], key=_name, reverse=True)
    for line, each in enumerate(series):
        minutes, values = _points(each, began)
        steps = [*minutes, minutes[-1] + (minutes[1] - minutes[0] if minutes[1:] else 1)]
        for number, state in enumerate(values):
            span = steps[number + 1] - steps[number]
            axes.barh(line, span, left=steps[number], height=0.8, color=STATES[int(state)])
    axes.set_yticks(range(len(series)), [_name(each)[:22] for each in series])
    axes.margins(x=0)
    _legend(axes, list(zip(STATE_NAMES[panel["kind"]].values(), STATES, strict=False)))


def _legend(axes: Axes, named: list[tuple[str, str]]) -> None:
    room = CHARACTERS_IN * WIDTH_IN * axes.get_position().width
    ends = accumulate(len(name) + GAP_CHARACTERS for name, _ in named)
    named = [each for each, end in zip(named, ends, strict=True) if end <= room]
    handles = [axes.plot([], [], color=colour, linewidth=2)[0] for _, colour in named]
    if handles:
        axes.legend(
            handles,
            [name for name, _ in named],
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.14),
            ncols=len(named),
            fontsize=6.5,
            frameon=False,
            labelcolor=INK,
            handlelength=0.9,
            columnspacing=0.9,
            handletextpad=0.4,
        )


def _table(axes: Axes, series: Series) -> None:
    axes.set_axis_off()
    for line, each in enumerate(series):
        text = "    ".join(f"{name}: {value}" for name, value in sorted(each["metric"].items()))
        axes.text(0, 0.8 - 0.25 * line, f"{text}    engines: {each['values'][-1][1]}", color=INK)


def main() -> None:
    """Draw a report into a picture of few colours, which is a small file."""
    report, picture = map(Path, sys.argv[1:])
    drawn = BytesIO()
    draw(json.loads(report.read_text())).savefig(drawn, facecolor=GROUND)
    Image.open(drawn).convert("RGB").quantize(192).save(picture, optimize=True)


if __name__ == "__main__":
    main()
