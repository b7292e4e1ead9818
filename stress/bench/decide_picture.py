"""Draws what ``stress.bench decide`` has measured: the ratio in each cell, and the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.cli.terminal import ToolMissing
from stress.bench.decide_figures import PROMISED

if TYPE_CHECKING:
    from collections.abc import Mapping

FIGURE_INCHES: Final = (9.0, 4.0)
DOTS_PER_INCH: Final = 110


def draw(found: Mapping[str, Any], path: str) -> None:
    """Write the picture to ``path``. ``found``: what the command has measured."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ToolMissing(
            "the picture needs matplotlib. Install it with: pip install matplotlib"
        ) from error
    figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    cells, steps = figure.subplots(1, 2)
    tiers = list(dict.fromkeys(cell["tier"] for cell in found["cells"]))
    kinds = dict.fromkeys((cell["tokens"], cell["clients"]) for cell in found["cells"])
    for tokens, clients in kinds:
        ratios = {
            cell["tier"]: cell["ratio"]
            for cell in found["cells"]
            if (cell["tokens"], cell["clients"]) == (tokens, clients)
        }
        label = f"{tokens:,} tokens, {clients} at once"
        cells.plot(tiers, [ratios[tier] for tier in tiers], "o-", label=label, markersize=4)
    cells.axhline(PROMISED, color="grey", linestyle="--")
    cells.set_ylim(bottom=0)
    cells.set_title("auto / better choice, first token", fontsize=10)
    cells.legend(fontsize=7)
    start = 0
    for step in found["steps"]:
        times = [1e3 * seconds for seconds in step["first_token_s"]]
        numbers = range(start, start + len(times))
        steps.plot(numbers, times, "o", label=f"auto, {step['tier']}", markersize=3)
        steps.plot(numbers, [1e3 * step["better_s"]] * len(times), "-", color="grey")
        start += len(times)
    steps.set_yscale("log")
    steps.set_title("first token, ms, while the tier's rate steps", fontsize=10)
    steps.set_xlabel("request", fontsize=8)
    if found["steps"]:
        steps.legend(fontsize=7)
    figure.savefig(path, dpi=DOTS_PER_INCH)
