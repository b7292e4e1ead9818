"""Decides when to try a tier that no request loads from, to measure how fast it is now.

A declined tier yields no new measurements. So now and then a request loads a few blocks from it,
and waits for them no longer than a small share of the time that it computes anyway. The tier is
tried again:

- after ``REQUESTS`` requests that declined it, once it has no blocks outstanding: that bounds the
  cost of reprobing, as a share of computing, however many requests come;
- after an interval, even if blocks are outstanding. It doubles while the tier does not improve, so
  that little is sent to a tier that hangs;
- by the next request, if the last try was far faster than expected. A single observation that is
  far off moves an estimate little, and several in a row count as a change
  (``kvtier/engine/decide/cost_fit.py``): the next ones must follow soon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.core.messages import LoadCost

REQUESTS: Final = 4
FIRST_S: Final = 1.0
LAST_S: Final = 60.0


class Reprobing:
    """Reprobing of one tier, from when it is declined. Times are the engine cell's seconds."""

    __slots__ = ("_at", "_declined", "_interval_s")

    def __init__(self, now: float) -> None:
        self._interval_s = FIRST_S
        self._restart(now)

    def try_if_due(self, now: float, cost: LoadCost) -> bool:
        """Return whether a request that declines the tier tries it; it then counts as tried.

        ``cost``: of a load now, behind all blocks that the tier was asked for.
        """
        self._declined += 1
        has_time = not cost.outstanding and (cost.may_be_less or self._declined > REQUESTS)
        if not (has_time or now >= self._at):
            return False
        if cost.may_be_less:
            self._interval_s = FIRST_S
        elif now >= self._at:
            self._interval_s = min(2 * self._interval_s, LAST_S)
        self._restart(now)
        return True

    def _restart(self, now: float) -> None:
        self._at = now + self._interval_s  # the latest time to try it
        self._declined = 0  # requests since it was tried
