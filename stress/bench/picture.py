"""Draws the cost of a key against the number of resident blocks, both sides in one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from stress.bench.sides import KVTIER, VLLM
from stress.bench.turns import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

PANELS: Final = (
    (Call.LOOKUP_HIT, Call.LOOKUP_MISS, Call.PREPARE_STORE, Call.PREPARE_STORE_EVICTING),
    (Call.COMPLETE_STORE, Call.PREPARE_LOAD, Call.COMPLETE_LOAD, Call.TOUCH),
)


def draw_scale(points: Sequence[dict[str, Any]], path: str) -> None:
    """Write the picture to ``path``. ``points``: what ``measure_policy`` returned at each size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    policies = list(dict.fromkeys(point["policy"] for point in points))
    lines = [
        (VLLM, policies[0], "vLLM, lru"),
        *((KVTIER, each, f"kvtier, {each}") for each in policies),
    ]
    for row, calls in zip(figure.subplots(2, 4), PANELS, strict=True):
        for axes, call in zip(row, calls, strict=True):
            for side, policy, label in lines:
                of_line = [point for point in points if point["policy"] == policy]
                sizes = [point["blocks"] for point in of_line]
                medians = [point["calls"][call][side]["median_ns"] for point in of_line]
                axes.plot(sizes, medians, "o-", label=label, ms=4)
            axes.set_title(call, fontsize=10)
            axes.set(xscale="log", ylim=(0, None), xlabel="resident blocks", ylabel="ns a key")
            axes.grid(visible=True, alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    figure.savefig(path, dpi=110)
