"""Draws what replays measured, as PNG files.

Each function makes one picture and writes it whole, or not at all. Lines are
labelled where they are, not in a box beside. matplotlib is imported when the first one is drawn.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.atomic_file import write_named
from kvtier.tools.replay.curves import MIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvtier.tools.replay.curves import CurvePoint

# Okabe and Ito's colours: told apart with any kind of colour vision.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C564B")
INK: Final = "#222222"
FAINT: Final = "#8A8A8A"
SIZE_INCHES: Final = (9.0, 5.4)
DOTS_PER_INCH: Final = 130
LABEL_GAP: Final = 0.047  #: between two labels of lines, as a share of the axis
TICK_GAP: Final = 0.085  #: between two labels under the axis, as a share of the axis


class PicturesMissing(Misuse):
    """Raised when *you* ask for pictures without matplotlib. Install it."""


def check_can_draw() -> None:
    """Raise ``PicturesMissing`` if no picture can be drawn; better now than after the work."""
    _figure()


def draw_curves(
    path: str | Path,
    title: str,
    curves: Mapping[str, Sequence[CurvePoint]],
    *,
    distinct_blocks: int,
    block_bytes: int | None = None,
) -> None:
    """Draw hit ratio against capacity, a line for each policy. ``MIN`` is the upper bound."""
    figure = _figure()
    axes = figure.subplots()
    ends = []
    for colour, (name, points) in zip(_colours(curves), curves.items(), strict=True):
        capacities = [point.capacity_blocks for point in points]
        ratios = [point.hit_ratio for point in points]
        is_min = name == MIN
        axes.plot(
            capacities,
            ratios,
            color=INK if is_min else colour,
            linestyle="--" if is_min else "-",
            marker="o",
            markersize=3.5,
            linewidth=1.6,
        )
        label = f"{MIN} (knows the future)" if is_min else name
        ends.append((capacities[0], ratios[0], label, INK if is_min else colour))
    axes.set_xscale("log")
    highest = max(point.hit_ratio for line in curves.values() for point in line)
    axes.set_ylim(0, highest * 1.08 or 1)
    all_capacities = sorted({point.capacity_blocks for line in curves.values() for point in line})
    _widen_left(axes, all_capacities)
    _ticks(axes, all_capacities, distinct_blocks, block_bytes)
    _label_left(axes, ends)
    unit = "share of the trace's distinct blocks, blocks" + (", bytes" if block_bytes else "")
    _finish(axes, title, f"capacity: {unit}", "hit blocks / referenced blocks")
    _save(figure, path)


def draw_sizes(
    path: str | Path,
    title: str,
    points: Sequence[tuple[float, float]],
    knee: tuple[float, float] | None,
    *,
    policy: str,
    endless: float,
) -> None:
    """Draw hit ratio against GiB on linear axes, where a knee looks like one.

    ``points`` and ``knee``: GiB, hit ratio.
    """
    figure = _figure()
    axes = figure.subplots()
    sizes, ratios = zip(*points, strict=True)
    axes.plot(sizes, ratios, color=COLOURS[0], marker="o", markersize=3.5, linewidth=1.6)
    axes.axhline(endless, color=FAINT, linewidth=1, linestyle="--")
    axes.set_xlim(0, max(sizes) * 1.03)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_ylim(0, endless * 1.15 or 1)
    right = max(sizes)
    axes.text(right, endless, "endless cache", ha="right", va="bottom", fontsize=9, color=FAINT)
    axes.text(right, ratios[-1] * 0.97, policy, ha="right", va="top", fontsize=9, color=COLOURS[0])
    if knee is not None:
        axes.plot(*knee, "o", color=COLOURS[1], markersize=9, fillstyle="none", markeredgewidth=2)
        axes.annotate(
            f"knee: {knee[0]:,.4g} GiB, {knee[1]:.1%}",
            knee,
            xytext=(12, -18),
            textcoords="offset points",
            fontsize=9,
            color=COLOURS[1],
        )
    _finish(axes, title, "capacity, GiB", "hit blocks / referenced blocks")
    _save(figure, path)


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise PicturesMissing(
            "pictures need matplotlib. Install it with: pip install matplotlib"
        ) from error
    return Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")


def _colours(names: Iterable[str]) -> list[str]:
    others = 0
    colours = []
    for name in names:
        colours.append(INK if name == MIN else COLOURS[others % len(COLOURS)])
        others += name != MIN
    return colours


def _widen_left(axes: Axes, capacities: Sequence[int]) -> None:
    """Make room between the axis and the first points for labels."""
    first, last = capacities[0], max(capacities[-1], capacities[0] * 2)
    axes.set_xlim(first / (last / first) ** 0.3, last * (last / first) ** 0.03)


def _ticks(
    axes: Axes, capacities: Sequence[int], distinct_blocks: int, block_bytes: int | None
) -> None:
    """Label the capacities themselves, as many as fit beside each other."""
    low, high = (math.log(edge) for edge in axes.get_xlim())
    shown: list[int] = []
    for capacity in capacities:
        if not shown or math.log(capacity / shown[-1]) >= TICK_GAP * (high - low):
            shown.append(capacity)
    labels = []
    for capacity in shown:
        lines = [f"{100 * capacity / distinct_blocks:.3g} %", f"{capacity:,}"]
        if block_bytes:
            scale, unit = _byte_unit(capacity * block_bytes)
            lines.append(f"{capacity * block_bytes / scale:.3g} {unit}")
        labels.append("\n".join(lines))
    axes.set_xticks(shown, labels)
    axes.set_xticks([], minor=True)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart to at least ``gap``, each as little as that takes, in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    groups: list[list[float]] = []  # mean and number of members
    for index in order:
        groups.append([values[index], 1])
        while len(groups) > 1:
            (low, count_low), (high, count_high) = groups[-2:]
            if high - low >= gap * (count_low + count_high) / 2:
                break
            count = count_low + count_high
            groups[-2:] = [[(low * count_low + high * count_high) / count, count]]
    placed = [
        mean + gap * (place - (count - 1) / 2)
        for mean, count in groups
        for place in range(int(count))
    ]
    spread = list(values)
    for index, place in zip(order, placed, strict=True):
        spread[index] = place
    return spread


def _label_left(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name to the left of its first point."""
    low, high = axes.get_ylim()
    heights = _spread([end[1] for end in ends], LABEL_GAP * (high - low))
    lift = max(0.0, low + LABEL_GAP * (high - low) / 2 - min(heights))
    for (x, y, label, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            label,
            (x, y),
            xytext=(-26, height + lift),
            textcoords=("offset points", "data"),
            fontsize=9,
            color=colour,
            ha="right",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "relpos": (1, 0.5),
                "shrinkA": 2,
                "shrinkB": 3,
            },
        )


def _byte_unit(largest: float) -> tuple[int, str]:
    for bits, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest >= 2**bits:
            return 2**bits, unit
    return 1, "bytes"


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(visible=True, axis="y", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: str | Path) -> None:
    drawn = io.BytesIO()  # what draws wants to go back in its file, and a pipe can't
    figure.savefig(drawn, format="png")
    write_named(path, lambda place: place.write_bytes(drawn.getvalue()))
