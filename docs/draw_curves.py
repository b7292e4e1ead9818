"""Draws hit ratio against capacity, a line for each policy, as the pages show it.

REPORT.json is what ``kvtier replay TRACE --policies all --json REPORT.json`` writes::

    python docs/draw_curves.py REPORT.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

BOUND: Final = "MIN"  #: knows the future: no policy, but what policies are compared with
INK: Final = "#222222"
# Okabe and Ito's colours: told apart with any kind of colour vision.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LABEL_GAP: Final = 0.047  #: between two labels of lines, as a share of the axis


def draw(report: dict[str, Any]) -> Figure:
    """Return the picture of a report."""
    curves = {policy: points for policy, points in report["policies"].items() if points}
    figure = Figure(figsize=(9.0, 5.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    highest = max(point["hit_ratio"] for points in curves.values() for point in points)
    axes.set_ylim(0, highest * 1.08 or 1)
    colours = dict(zip([policy for policy in curves if policy != BOUND], cycle(COLOURS)))
    label_height = 0.0
    for policy, points in sorted(curves.items(), key=lambda item: item[1][0]["hit_ratio"]):
        capacities = [point["capacity_blocks"] for point in points]
        ratios = [point["hit_ratio"] for point in points]
        colour, dashes = (INK, "--") if policy == BOUND else (colours[policy], "-")
        axes.plot(capacities, ratios, color=colour, linestyle=dashes, marker="o", markersize=3.5)
        # Each label stands where its line begins, or as far above the one below as it needs.
        label_height = max(ratios[0], label_height + LABEL_GAP * axes.get_ylim()[1])
        axes.annotate(
            f"{BOUND} (knows the future)" if policy == BOUND else policy,
            (capacities[0], ratios[0]),
            xytext=(-26, label_height),
            textcoords=("offset points", "data"),
            fontsize=9,
            color=colour,
            ha="right",
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (1, 0.5)},
        )
    _label_capacities(axes, max(curves.values(), key=len))
    axes.set_title(f"Hit ratio against capacity: {report['trace']['name']}", loc="left", color=INK)
    axes.set_xlabel("capacity: share of the trace's distinct blocks, blocks")
    axes.set_ylabel("hit blocks / referenced blocks")
    axes.grid(visible=True, axis="y", color="#E4E4E4", linewidth=0.7)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label_capacities(axes: Any, points: list[dict[str, Any]]) -> None:  # noqa: ANN401 - Axes
    """Label the capacities themselves, and make room on their left for the lines' labels."""
    capacities = [point["capacity_blocks"] for point in points]
    labels = [
        f"{100 * point['capacity_share']:.3g} %\n{point['capacity_blocks']:,}" for point in points
    ]
    axes.set_xticks(capacities, labels)
    axes.set_xticks([], minor=True)
    first, last = capacities[0], max(capacities[-1], 2 * capacities[0])
    axes.set_xlim(first / (last / first) ** 0.3, last * (last / first) ** 0.03)


def main() -> None:
    """Draw one picture."""
    report, picture = map(Path, sys.argv[1:])
    draw(json.loads(report.read_text())).savefig(picture)


if __name__ == "__main__":
    main()
