"""Draws the cost of a key against the number of resident blocks, both sides in one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from stress.bench.sides import KVTIER, VLLM
from stress.bench.turns import (
    COMPLETE_LOAD,
    COMPLETE_STORE,
    LOOKUP_HIT,
    LOOKUP_MISS,
    PREPARE_LOAD,
    PREPARE_STORE,
    PREPARE_STORE_EVICTING,
    TOUCH,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PANELS: Final = (
    LOOKUP_HIT,
    LOOKUP_MISS,
    PREPARE_STORE,
    PREPARE_STORE_EVICTING,
    COMPLETE_STORE,
    PREPARE_LOAD,
    COMPLETE_LOAD,
    TOUCH,
)
PANELS_A_ROW: Final = 4
PANEL_INCHES: Final = (3.0, 2.5)
DOTS_PER_INCH: Final = 110
VLLM_COLOUR: Final = "tab:orange"
KVTIER_COLOURS: Final = ("tab:blue", "tab:green", "tab:purple", "tab:red", "tab:cyan", "tab:brown")


def draw_scale(points: Sequence[dict[str, Any]], path: str) -> None:
    """Write the picture to ``path``. ``points``: what ``measure`` returned at each size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    rows = -(-len(PANELS) // PANELS_A_ROW)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * PANELS_A_ROW, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, call in enumerate(PANELS, start=1):
        axes = figure.add_subplot(rows, PANELS_A_ROW, number)
        for label, colour, sizes, medians in _lines(points, call):
            axes.plot(sizes, medians, "o-", color=colour, label=label, markersize=4)
        axes.set_title(call, fontsize=10)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.set_xlabel("resident blocks", fontsize=8)
        axes.set_ylabel("ns a key (median)", fontsize=8)
        axes.tick_params(labelsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _lines(
    points: Sequence[dict[str, Any]], call: str
) -> list[tuple[str, str, list[int], list[float]]]:
    """Return label, colour, sizes and medians of each line: one a policy, on either side."""
    lines = []
    policies = list(dict.fromkeys(point["policy"] for point in points))
    drawn = set()
    for number, policy in enumerate(policies):
        chosen = [point for point in points if point["policy"] == policy]
        beside = chosen[0]["vllm_policy"]
        sizes = [point["blocks"] for point in chosen]
        if beside not in drawn:
            drawn.add(beside)
            medians = [point["calls"][call][VLLM]["median_ns"] for point in chosen]
            lines.append((f"vLLM, {beside}", VLLM_COLOUR, sizes, medians))
        medians = [point["calls"][call][KVTIER]["median_ns"] for point in chosen]
        colour = KVTIER_COLOURS[number % len(KVTIER_COLOURS)]
        lines.append((f"kvtier, {policy}", colour, sizes, medians))
    return lines
