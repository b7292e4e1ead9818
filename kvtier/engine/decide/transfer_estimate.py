"""Estimates how long a load from one tier takes now: latency, and time per outstanding block.

The model is a line: a job that was sent when ``blocks`` were outstanding at the tier, its
own included, takes ``latency_s + seconds_per_block * blocks``. It is fitted to the jobs
that ended, by least squares with exponential forgetting (Haykin, *Adaptive Filter Theory*,
"recursive least squares"; with two parameters the normal equations are solved outright).
An observation weighs half as much after three more, and after ``HALF_LIFE_S`` without any.
Both parameters are at least 0. Errors count in proportion to the expected time.

A job that was given up took at least as long as it was waited for. A wait that has lasted for
``t`` will often last as long again, so it counts as twice that. If the job ends after all, that is
an observation like others.

While all jobs were about as long, latency and throughput can't be separated. Then all time counts
as throughput: a longer load is expected to take longer.

Times are seconds of the clock of its link, which passes them in; no clock is read here.
"""

from __future__ import annotations

from typing import Final

from kvtier.core.messages import LoadCost
from kvtier.engine.decide.changes import ChangeDetector, bounded

FORGETTING: Final = 0.8
"""Factor on an observation's weight for each later one."""

HALF_LIFE_S: Final = 10.0
"""Time without an observation after which earlier ones count half."""

ALIKE: Final = 0.02
"""Minimum variance of lengths, as a share of their square, to separate latency and throughput."""

SPREAD_FIRST: Final = 0.5
SPREAD_MIN: Final = 0.1
SPREAD_MAX: Final = 2.0
SECONDS_MIN: Final = 1e-6
"""No load takes less, though a clock that stands still between two ticks may show 0."""

GIVEN_UP_FACTOR: Final = 2.0


class TransferEstimate:
    """The transfer estimate of one tier."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.block_s = 0.0
        self.spread = SPREAD_FIRST
        self._changes = ChangeDetector()
        self._weights = 0.0  # sum over observations; the newest has weight 1
        self._at = 0.0  # when the last observation was made
        self._forget()

    def _forget(self) -> None:
        self._weights = 0.0
        # Sums for the normal equations: of 1, x, x², y and xy, all weighted.
        self._s = self._sx = self._sxx = self._sy = self._sxy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything has been learnt."""
        return self._weights > 0

    def seconds(self, blocks: int) -> float | None:
        """Return the seconds that a job takes with ``blocks`` outstanding; None: not known yet."""
        return self._expected(blocks) if self.is_known else None

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        """Learn from a job that ended. ``blocks``: outstanding when it was sent, with its own."""
        seconds = max(seconds, SECONDS_MIN)
        if not self.is_known:
            self._restart([((blocks,), seconds)], now)
            return
        self._age(now)
        expected = self._expected(blocks)
        anew = self._changes.changed((blocks,), seconds, expected, self._weights)
        if anew:
            self._restart(anew, now)
            return
        error = abs(seconds - expected) / expected
        self.spread = min(
            SPREAD_MAX, max(SPREAD_MIN, FORGETTING * self.spread + (1 - FORGETTING) * error)
        )
        self._add(blocks, bounded(seconds, expected), expected, now)

    def given_up(self, blocks: int, seconds: float, now: float) -> None:
        """Learn at once from a job that has not ended after ``seconds``."""
        least = GIVEN_UP_FACTOR * max(seconds, SECONDS_MIN)
        if self.is_known and self._expected(blocks) >= least:
            return
        self._restart([((blocks,), least)], now)

    def cost(self, outstanding: int) -> LoadCost | None:
        """Return the estimate for the next load; None: not known yet."""
        if not self.is_known:
            return None
        return LoadCost(self.latency_s, self.block_s, outstanding, self.spread)

    def _expected(self, blocks: float) -> float:
        return max(SECONDS_MIN, self.latency_s + self.block_s * blocks)

    def _restart(self, observations: list[tuple[tuple[float, ...], float]], now: float) -> None:
        self._forget()
        self.spread = SPREAD_FIRST
        for (blocks,), seconds in observations:
            self._add(blocks, seconds, seconds, now)

    def _age(self, now: float) -> None:
        idle_s = max(0.0, now - self._at)
        self._scale(0.5 ** (idle_s / HALF_LIFE_S))

    def _scale(self, factor: float) -> None:
        self._weights *= factor
        self._s *= factor
        self._sx *= factor
        self._sxx *= factor
        self._sy *= factor
        self._sxy *= factor

    def _add(self, blocks: float, seconds: float, expected: float, now: float) -> None:
        self._scale(FORGETTING)
        self._weights += 1
        weight = 1 / expected
        self._s += weight
        self._sx += weight * blocks
        self._sxx += weight * blocks * blocks
        self._sy += weight * seconds
        self._sxy += weight * blocks * seconds
        self._at = now
        self._fit()

    def _fit(self) -> None:
        """Solve for both parameters, neither of which may be negative."""
        determinant = self._s * self._sxx - self._sx * self._sx
        self.latency_s, self.block_s = 0.0, self._sxy / self._sxx
        if determinant <= ALIKE * self._s * self._sxx:
            return
        block_s = (self._s * self._sxy - self._sx * self._sy) / determinant
        if block_s < 0:
            self.latency_s, self.block_s = self._sy / self._s, 0.0
            return
        latency_s = (self._sxx * self._sy - self._sx * self._sxy) / determinant
        if latency_s > 0:
            self.latency_s, self.block_s = latency_s, block_s
