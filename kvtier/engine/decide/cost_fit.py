"""Learns ``seconds = first * x + second * y`` from observations, while conditions change.

Least squares with exponential forgetting (Haykin, *Adaptive Filter Theory*, "recursive least
squares"). Neither coefficient is ever negative, and errors count relative to the expected time.
While all observations are of one kind, ``x / y`` hardly varies, and the two can't be separated:
then all time counts as ``second``.

An observation far from the expected value is an outlier or a change. An outlier is bounded, so that
it moves the estimate little. Several far-off observations in a row, all on the same side, are a
change: the fit restarts with them. If hardly anything was learnt recently, one is enough.

Rejected: numpy, whose solver takes longer for each job than the formula for two coefficients; a
third coefficient, for the fixed time of an engine step: costs are needed by the token, so it would
have to be spread over tokens, and the fit of two does that over the steps observed.
"""

from __future__ import annotations

from typing import Final

FAR: Final = 2.0
"""Far off: more than this factor between the expected and the seen value, either way."""

FACTOR_MAX: Final = 4.0  #: the most that an outlier counts as being off, either way
CHANGED: Final = 3  #: this many far-off observations in a row are a change
SUPPORT_MIN: Final = 1.0  #: with less weight than one observation, one far-off value is a change

ALIKE: Final = 0.02
"""Minimum variance of ``x / y``, as a share of its mean square, to separate the coefficients."""

ERROR_FIRST: Final = 0.5
ERROR_MAX: Final = 2.0
SECONDS_MIN: Final = 1e-6
"""The shortest time that counts: a coarse clock may show 0."""


class CostFit:
    """``first``, ``second``: the coefficients. ``error``: recent, as a share of the expectation."""

    def __init__(self, forgetting: float) -> None:
        """``forgetting``: factor on an observation's weight for each later one."""
        self._forgetting = forgetting
        self._suspects: list[tuple[float, float, float]] = []  # latest in a row: maybe a change
        self._are_above = False
        self.first = self.second = 0.0
        self.restart()

    def restart(self, *observations: tuple[float, float, float]) -> None:
        """Learn from these only: ``x``, ``y`` above 0, seconds. Without any, coefficients stay."""
        self.weight = 0.0  #: of all observations; the newest has 1
        self.error = ERROR_FIRST
        self._sums = [0.0] * 5  # weighted, for the normal equations: xx, xy, yy, xs and ys
        self._suspects.clear()
        for x, y, seconds in observations:
            self._add(x, y, seconds, seconds)

    def seconds(self, x: float, y: float) -> float:
        """Return the expected seconds; ``SECONDS_MIN`` if nothing is known."""
        return max(SECONDS_MIN, self.first * x + self.second * y)

    @property
    def may_be_less(self) -> bool:
        """Whether the latest observation was far below the expected value: perhaps a change."""
        return bool(self._suspects) and not self._are_above

    def age(self, factor: float) -> None:
        """Multiply the weight of earlier observations by ``factor``."""
        self.weight *= factor
        self._sums = [factor * each for each in self._sums]

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from an observation; ``y`` is above 0."""
        seconds = max(seconds, SECONDS_MIN)
        if not self.weight:
            self.restart((x, y, seconds))
            return
        expected = self.seconds(x, y)
        if self._has_changed(x, y, seconds, expected):
            self.restart(*self._suspects)
            return
        kept, error = self._forgetting, abs(seconds - expected) / expected
        self.error = min(ERROR_MAX, kept * self.error + (1 - kept) * error)
        bounded = min(max(seconds, expected / FACTOR_MAX), expected * FACTOR_MAX)
        self._add(x, y, bounded, expected)

    def _has_changed(self, x: float, y: float, seconds: float, expected: float) -> bool:
        is_above = seconds > expected
        is_far = not 1 / FAR <= seconds / expected <= FAR
        if not is_far or is_above is not self._are_above:
            self._suspects.clear()
        if not is_far:
            return False
        self._are_above = is_above
        self._suspects.append((x, y, seconds))
        return len(self._suspects) >= CHANGED or self.weight < SUPPORT_MIN

    def _add(self, x: float, y: float, seconds: float, expected: float) -> None:
        self.weight = self._forgetting * self.weight + 1
        new = (x * x, x * y, y * y, x * seconds, y * seconds)
        kept = self._forgetting
        self._sums = [
            kept * old + each / expected for old, each in zip(self._sums, new, strict=True)
        ]
        xx, xy, yy, xs, ys = self._sums
        self.first, self.second = 0.0, ys / yy
        determinant = xx * yy - xy * xy
        if determinant <= ALIKE * xx * yy:
            return
        if xx * ys < xy * xs:  # ``second`` would be negative
            self.first, self.second = xs / xx, 0.0
        elif yy * xs > xy * ys:
            self.first = (yy * xs - xy * ys) / determinant
            self.second = (xx * ys - xy * xs) / determinant
