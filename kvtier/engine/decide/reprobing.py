"""Decides when to try a tier that no request loads from, to measure how fast it is now.

A declined tier yields no new measurements. So now and then a request loads a few blocks from it,
and waits for them no longer than a small share of the time that it computes anyway. The tier is
tried again:

- after ``REQUESTS`` that declined it, once all blocks that it was asked for have come back: that
  bounds the cost of reprobing, as a share of computing, however many requests come;
- after a time, even if blocks are outstanding. That time grows while nothing becomes better, so
  that little is sent to a tier that hangs;
- at once, if the last try was far faster than expected, or the estimate has become better since. A
  single observation that is far off moves an estimate little, and several in a row count as a
  change (``kvtier/engine/decide/cost_fit.py``): the next ones must follow soon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.core.messages import LoadCost

REQUESTS: Final = 4
FIRST_S: Final = 1.0
LAST_S: Final = 60.0

BETTER: Final = 0.9
"""A load has become better if its expected time is at most this share of the earlier one."""


class Reprobing:
    """Reprobing of one tier, from when it is declined. Times are the engine cell's seconds."""

    __slots__ = ("_at", "_declined", "_expected_s", "_interval_s")

    def __init__(self, now: float, expected_s: float) -> None:
        """``expected_s``: for some number of blocks."""
        self._interval_s, self._expected_s = FIRST_S, expected_s
        self._note(now, expected_s)

    def is_due(self, now: float, expected_s: float, cost: LoadCost) -> bool:
        """Return whether a request that declines the tier should try it; it then counts as tried.

        ``expected_s``: the time that a load of the same number of blocks is now expected to take.
        """
        self._declined += 1
        is_better = expected_s <= BETTER * self._expected_s
        has_time = not cost.outstanding and (cost.may_be_less or self._declined > REQUESTS)
        if not (is_better or has_time or now >= self._at):
            self._expected_s = max(self._expected_s, expected_s)
            return False
        if is_better:
            self._interval_s = FIRST_S
        elif now >= self._at:
            self._interval_s = min(2 * self._interval_s, LAST_S)
        self._note(now, expected_s)
        return True

    def _note(self, now: float, expected_s: float) -> None:
        self._at = now + self._interval_s  # the latest time to try it
        self._declined = 0  # requests since it was tried
        self._expected_s = expected_s  # the expected time of a load then
