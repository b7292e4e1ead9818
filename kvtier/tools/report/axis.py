"""The horizontal axis of a page: its bins, ticks and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

BINS_MAX: Final = 240
TICKS_MAX: Final = 9
MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400
UNBROKEN: Final = "\N{NO-BREAK SPACE}"

_STEPS_S: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(each * MINUTE_S for each in (1, 2, 5, 10, 15, 30)),
    *(each * HOUR_S for each in (1, 2, 3, 6, 12)),
    *(each * DAY_S for each in (1, 2, 7, 14, 30, 90)),
)
"""Distances between two ticks."""


@dataclass(frozen=True)
class Axis:
    """Positions of bins and ticks, as fractions of the width."""

    name: str  #: for readers
    edges: Sequence[float]  #: of the bins: one more than bins
    middles: Sequence[float]  #: of the bins: positions of the points of lines
    labels: Sequence[str]  #: of the bins, in a table
    ticks: Sequence[tuple[float, str]]
    shaded_from: float = 1.0

    @property
    def count(self) -> int:
        """The number of bins."""
        return len(self.middles)


def elapsed_axis(ends_s: float, count: int, *, shaded_from_s: float | None = None) -> Axis:
    """Return an axis of the time since the beginning, cut into ``count`` bins."""
    from_s = [ends_s * at / count for at in range(count)]
    step_s = _step_s(ends_s)
    ticks = [
        (at * step_s / ends_s, lasted(at * step_s)) for at in range(math.floor(ends_s / step_s) + 1)
    ]
    shaded_from = 1.0 if shaded_from_s is None else min(1.0, shaded_from_s / ends_s)
    return _even("time since the beginning", count, [*map(lasted, from_s)], ticks, shaded_from)


def clock_axis(begins_s: float, bin_s: float, count: int) -> Axis:
    """Return an axis of the time of day. ``begins_s``: since 1970."""
    whole_s = bin_s * count
    step_s = _step_s(whole_s)
    first = math.ceil(begins_s / step_s)
    last = math.floor((begins_s + whole_s) / step_s)
    ticks = [
        ((at * step_s - begins_s) / whole_s, _tick(at * step_s, step_s))
        for at in range(first, last + 1)
    ]
    labels = [moment(begins_s + bin_s * at) for at in range(count)]
    return _even("time (UTC)", count, labels, ticks, 1.0)


def _even(
    name: str,
    count: int,
    labels: Sequence[str],
    ticks: Sequence[tuple[float, str]],
    shaded_from: float,
) -> Axis:
    edges = [at / count for at in range(count + 1)]
    middles = [(at + 0.5) / count for at in range(count)]
    return Axis(name, edges, middles, labels, ticks, shaded_from)


def _step_s(whole_s: float) -> int:
    for step_s in _STEPS_S:
        if whole_s / step_s < TICKS_MAX:
            return step_s
    step_s = _STEPS_S[-1]
    while whole_s / step_s >= TICKS_MAX:
        step_s *= 2
    return step_s


def _tick(at_s: float, step_s: int) -> str:
    when = datetime.fromtimestamp(at_s, UTC)
    if at_s % DAY_S == 0:
        return f"{when:%-d %b}"
    return f"{when:%H:%M:%S}" if step_s < MINUTE_S else f"{when:%H:%M}"


def moment(at_s: float) -> str:
    """Return a time since 1970 as text, in UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def lasted(seconds: float) -> str:
    """Return a duration as text, to about a hundredth of it."""
    return _lasted(seconds).replace(" ", UNBROKEN)


def _lasted(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0"
    if seconds < MINUTE_S:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit_s, part_s, name in ((HOUR_S, 1, "min"), (DAY_S, MINUTE_S, "h")):
        if whole < unit_s:
            units, rest = divmod(whole // part_s, MINUTE_S)
            return f"{units}:{rest:02} {name}" if rest else f"{units} {name}"
    days, rest = divmod(whole // HOUR_S, 24)
    return f"{days} d {rest} h" if rest else f"{days} d"
