"""Percentiles of many values in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

STEPS: Final = 16
"""Number of steps in each doubling: a percentile is within 2.2 % of the true one."""

_ZERO: Final = -10_000
"""The step of 0, below that of the least positive number."""


class Spread:
    """The number of values of each size."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value; below 0 it counts as 0."""
        self._counts[round(math.log2(value) * STEPS) if value > 0 else _ZERO] += 1

    def merge(self, other: Spread) -> None:
        """Count all values of another one, too."""
        self._counts.update(other._counts)

    def percentile(self, percent: float) -> float | None:
        """Return the smallest value that ``percent`` do not exceed; None without values."""
        rest = math.ceil(self._counts.total() * percent / 100)
        for step in sorted(self._counts):
            rest -= self._counts[step]
            if rest <= 0:
                return 0.0 if step == _ZERO else 2 ** (step / STEPS)
        return None
