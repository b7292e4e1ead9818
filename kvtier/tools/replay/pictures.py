"""Draws what replays measured, as PNG files.

Each function makes one picture and writes it whole, or not at all. Lines are
labelled where they are, not in a box beside; tiers given in the same order have
the same colours in all pictures. matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, Final

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
CDF_POINTS_MAX: Final = 2000
TIME_STEPS_S: Final = tuple(
    count * unit
    for unit, counts in (
        (1, (1, 2, 5, 10, 15, 30)),
        (60, (1, 2, 5, 10, 15, 30)),
        (3600, (1, 2, 6, 12)),
        (86400, (1, 2, 7, 30, 60)),
    )
    for count in counts
)
TIME_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


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


def draw_hit_ratio_over_time(
    path: str | Path, title: str, times_s: Sequence[float], by_tier: Mapping[str, Sequence[float]]
) -> None:
    """Draw the share of blocks hit in each tier over time, one upon the other.

    If nothing was recorded, the picture is empty. So it is with the others below.
    """
    if not times_s:
        times_s, by_tier = [0.0], dict.fromkeys(by_tier, (0.0,))
    figure = _figure()
    axes = figure.subplots()
    colours = _colours(by_tier)
    axes.stackplot(times_s, *by_tier.values(), colors=colours, alpha=0.85, linewidth=0)
    axes.set_ylim(0, 1)
    below = 0.0
    ends = []
    for colour, (name, ratios) in zip(colours, by_tier.items(), strict=True):
        mean = sum(ratios) / len(ratios)
        ends.append((times_s[-1], below + ratios[-1] / 2, f"{name} ({mean:.1%})", colour))
        below += ratios[-1]
    _label_right(axes, ends)
    _time_axis(axes, times_s)
    _finish(axes, title, "trace time", "blocks hit / blocks asked for (mean in brackets)")
    _save(figure, path)


def draw_occupancy(
    path: str | Path,
    title: str,
    times_s: Sequence[float],
    used_bytes: Mapping[str, Sequence[float]],
    capacity_bytes: Mapping[str, float],
) -> None:
    """Draw how full each tier is over time. A tier without a capacity has no upper line."""
    if not times_s:
        times_s, used_bytes = [0.0], dict.fromkeys(used_bytes, (0.0,))
    figure = _figure()
    panels = figure.subplots(len(used_bytes), 1, sharex=True, squeeze=False)
    for axes, colour, (name, used) in zip(
        panels[:, 0], _colours(used_bytes), used_bytes.items(), strict=True
    ):
        scale, unit = _byte_unit(max(*used, capacity_bytes.get(name, 0), 1))
        axes.fill_between(times_s, [each / scale for each in used], color=colour, alpha=0.85)
        top = max(used)
        limit = capacity_bytes.get(name)
        if limit:
            axes.axhline(limit / scale, color=INK, linewidth=1, linestyle="--")
            top = max(top, limit)
        axes.set_ylim(0, max(top, 1) / scale * 1.18)
        label = f"capacity {limit / scale:.4g} {unit}" if limit else "no capacity set"
        axes.text(
            0.995,
            0.97,
            label,
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=9,
            color=INK,
        )
        _finish(axes, "", "", f"{name}, {unit}")
    _time_axis(panels[-1, 0], times_s)
    panels[-1, 0].set_xlabel("trace time", color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    _save(figure, path)


def draw_latency(
    path: str | Path, title: str, seconds: Mapping[str, Sequence[float]], *, what: str = "latency"
) -> None:
    """Draw the share of operations that took at most so long, a line for each kind."""
    figure = _figure()
    axes = figure.subplots()
    ends = []
    kinds = {name: sorted(values) for name, values in seconds.items() if len(values)}
    for colour, (name, values) in zip(_colours(kinds), kinds.items(), strict=True):
        shares, points = _cdf(values)
        axes.plot(points, shares, color=colour, linewidth=1.6)
        middle, late = (values[int(q * (len(values) - 1))] for q in (0.5, 0.99))
        axes.plot([middle, late], [0.5, 0.99], "o", color=colour, markersize=4)
        note = f"{name}: p50 {format_seconds(middle)}, p99 {format_seconds(late)}"
        ends.append((note, colour))
    if any(value > 0 for values in kinds.values() for value in values):
        axes.set_xscale("log", nonpositive="clip")
    for row, (note, colour) in enumerate(reversed(ends)):
        axes.text(
            0.985,
            0.03 + row * 0.055,
            note,
            transform=axes.transAxes,
            ha="right",
            fontsize=9,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )
    axes.set_ylim(0, 1.01)
    axes.xaxis.set_major_formatter(lambda value, _: format_seconds(value))
    _finish(axes, title, what, "share of operations at most so long")
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


def format_seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


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


def _label_right(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each band's name to the right of the picture, at its height there."""
    heights = _spread([end[1] for end in ends], LABEL_GAP)
    lift = max(0.0, LABEL_GAP / 2 - min(heights))
    for (x, _, label, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            label,
            (x, height + lift),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=9,
            color=colour,
            va="center",
            annotation_clip=False,
        )


def _time_axis(axes: Axes, times_s: Sequence[float]) -> None:
    """Label the time axis at whole seconds or minutes."""
    span_s = times_s[-1] - times_s[0] or 1
    axes.set_xlim(times_s[0], times_s[0] + span_s)
    step_s = next((step for step in TIME_STEPS_S if span_s / step <= 8), span_s / 4)
    ticks = [times_s[0] + step_s * count for count in range(int(span_s / step_s) + 1)]
    scale, unit = next((row for row in TIME_UNITS if step_s >= row[0]), (1, "s"))
    axes.set_xticks(ticks, [f"{tick / scale:.4g} {unit}" for tick in ticks])


def _byte_unit(largest: float) -> tuple[int, str]:
    for bits, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest >= 2**bits:
            return 2**bits, unit
    return 1, "bytes"


def _cdf(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return shares and values of a sorted list, at most so many that a picture can show."""
    count = len(values)
    steps = min(count, CDF_POINTS_MAX)
    indices = [round(step * (count - 1) / max(steps - 1, 1)) for step in range(steps)]
    return [(index + 1) / count for index in indices], [values[index] for index in indices]


def _finish(axes: Any, title: str, x: str, y: str) -> None:  # noqa: ANN401 - of a panel or alone
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
