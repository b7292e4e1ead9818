"""Draws the cost of a key against the number of resident blocks, both sides in one picture."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse
from kvtier.tools.terminal import check_can_write
from stress.bench.sides import KVTIER, VLLM
from stress.bench.turns import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

PANELS: Final = (
    Call.LOOKUP_HIT,
    Call.LOOKUP_MISS,
    Call.PREPARE_STORE,
    Call.PREPARE_STORE_EVICTING,
    Call.COMPLETE_STORE,
    Call.PREPARE_LOAD,
    Call.COMPLETE_LOAD,
    Call.TOUCH,
)
PANELS_A_ROW: Final = 4
PANEL_INCHES: Final = (3.0, 2.5)
DOTS_PER_INCH: Final = 110
VLLM_LABEL, VLLM_COLOUR = "vLLM", "tab:orange"
KVTIER_COLOURS: Final = ("tab:blue", "tab:green", "tab:purple", "tab:red", "tab:cyan", "tab:brown")


def check_can_draw(path: str) -> None:
    """Raise ``Misuse`` for a picture that could not be drawn, better now than after the work."""
    check_can_write(path)
    if find_spec("matplotlib") is None:
        raise Misuse("the picture needs matplotlib. Install it with: pip install matplotlib")


def draw_scale(points: Sequence[dict[str, Any]], path: str) -> None:
    """Write the picture to ``path``. ``points``: what ``measure_policy`` returned at each size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    rows = -(-len(PANELS) // PANELS_A_ROW)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * PANELS_A_ROW, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, call in enumerate(PANELS, start=1):
        axes, colours = figure.add_subplot(rows, PANELS_A_ROW, number), cycle(KVTIER_COLOURS)
        for label, medians in _lines(points, call).items():
            colour = VLLM_COLOUR if label.startswith(VLLM_LABEL) else next(colours)
            axes.plot(*zip(*medians.items(), strict=True), "o-", color=colour, label=label, ms=4)
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


def _lines(points: Sequence[dict[str, Any]], call: str) -> dict[str, dict[int, float]]:
    """Return the medians of each line by size: one line a policy, on either side."""
    lines: dict[str, dict[int, float]] = {}
    for point in points:
        for side, label in (
            (VLLM, f"{VLLM_LABEL}, {point['vllm_policy']}"),
            (KVTIER, f"kvtier, {point['policy']}"),
        ):
            # vLLM's is measured beside each of kvtier's policies: once is enough.
            line = lines.setdefault(label, {})
            line.setdefault(point["blocks"], point["calls"][call][side]["median_ns"])
    return lines
