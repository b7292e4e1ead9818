"""Distinguishes outliers from changes, for estimates that are learnt while conditions change.

An observation far from the expected value is one of two things. An outlier
must move the estimate little: it is bounded to ``FACTOR_MAX`` times the expectation. A
change must be followed at once: ``OBSERVATIONS`` far-off observations in a row, all on the same
side, are a change, and then all that was learnt before is worthless. If hardly
anything was learnt recently, one of them is enough.
"""

from __future__ import annotations

from typing import Final

FAR: Final = 2.0
"""Far off: more than this factor between the expected and the seen value, either way."""

FACTOR_MAX: Final = 4.0
"""The factor that an outlier counts as being off at most, either way."""

OBSERVATIONS: Final = 3

SUPPORT_MIN: Final = 1.0
"""With less than the weight of one observation behind it, an expectation is not defended."""


class ChangeDetector:
    """Watches one kind of observation. Holds the latest in a row that may be a change."""

    def __init__(self) -> None:
        self._suspects: list[tuple[tuple[float, ...], float]] = []
        self._are_above = False

    def changed(
        self, at: tuple[float, ...], seen: float, expected: float, support: float
    ) -> list[tuple[tuple[float, ...], float]]:
        """Return the observations to restart from if this one shows a change, else nothing.

        ``at``: where it was made; ``support``: the weight behind the expectation.
        """
        is_above = seen > expected
        if 1 / FAR <= seen / expected <= FAR:
            self._suspects.clear()
            return []
        if is_above is not self._are_above:
            self._suspects.clear()
        self._are_above = is_above
        self._suspects.append((at, seen))
        if len(self._suspects) < OBSERVATIONS and support >= SUPPORT_MIN:
            return []
        suspects, self._suspects = self._suspects, []
        return suspects


def bounded(seen: float, expected: float) -> float:
    """Return the observation, bounded to ``FACTOR_MAX`` times the expectation either way."""
    return min(max(seen, expected / FACTOR_MAX), expected * FACTOR_MAX)
