"""Estimates how long a load from one tier takes now: latency, and time per outstanding block.

A job that was sent when ``blocks`` were outstanding at the tier, its own included, takes
``latency_s + block_s * blocks``. That is fitted to the jobs that ended
(``kvtier/engine/decide/cost_fit.py``). An observation weighs half as much after three more, and
after ``HALF_LIFE_S`` without any. While all jobs have been about equally long, time is taken to be
proportional to the blocks.

A job that was given up took at least as long as it was waited for. A wait that has lasted for
``t`` will often last as long again, so it counts as twice that. If the job ends after all, that is
an observation like any other.

Times are seconds of the clock of its link, which passes them in; no clock is read here.
"""

from __future__ import annotations

from typing import Final

from kvtier.core.messages import LoadCost
from kvtier.engine.decide.cost_fit import SECONDS_MIN, CostFit

FORGETTING: Final = 0.8
HALF_LIFE_S: Final = 10.0
SPREAD_MIN: Final = 0.1
GIVEN_UP_FACTOR: Final = 2.0


class TransferEstimate:
    """The estimate for one tier. ``spread``: its usual error, as a share of the estimate."""

    def __init__(self) -> None:
        self._fit = CostFit(FORGETTING)
        self._learnt_at(0.0)

    def _learnt_at(self, now: float) -> None:
        self._at = now
        self.latency_s, self.block_s = self._fit.first, self._fit.second
        self.spread = max(SPREAD_MIN, self._fit.error)

    @property
    def is_known(self) -> bool:
        """Whether anything has been learnt."""
        return self._fit.weight > 0

    def seconds(self, blocks: int) -> float | None:
        """Return the seconds that a job takes with ``blocks`` outstanding; None: not known yet."""
        return self._fit.seconds(1, blocks) if self.is_known else None

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        """Learn from a job that ended. ``blocks``: outstanding when it was sent, with its own."""
        self._fit.age(0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S))
        self._fit.observe(1, blocks, seconds)
        self._learnt_at(now)

    def given_up(self, blocks: int, seconds: float, now: float) -> None:
        """Learn at once from a job that has not ended after ``seconds``."""
        least = GIVEN_UP_FACTOR * max(seconds, SECONDS_MIN)
        if not self.is_known or self._fit.seconds(1, blocks) < least:
            self._fit.restart((1, blocks, least))
            self._learnt_at(now)

    def cost(self, outstanding: int) -> LoadCost | None:
        """Return the estimate for the next load; None: not known yet."""
        if not self.is_known:
            return None
        may_be_less = self._fit.may_be_less
        return LoadCost(self.latency_s, self.block_s, outstanding, self.spread, may_be_less)
