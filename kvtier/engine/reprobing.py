"""When a tier that nobody loads from is tried all the same, to learn how fast it is now.

A tier that is declined tells nothing new of itself. So now and then a request loads a few
blocks from it, and waits for them no longer than a small share of what it computes anyway. It is
tried again:

- after ``REQUESTS`` that declined it, once all that it was asked for has come back: that bounds
  what exploring costs, as a share of computing, however many requests come;
- after a time, whatever it still owes. That time grows while nothing becomes better, so that
  little is sent to a tier that hangs;
- at once, if what was learnt has become better since the last time. A single observation that is
  far off may be an outlier, and moves an estimate little. It takes some in a row to be
  believed (``kvtier/engine/changes.py``), and the next ones must not be long in coming.
"""

from __future__ import annotations

from typing import Final

REQUESTS: Final = 4
FIRST_S: Final = 1.0
LAST_S: Final = 60.0

BETTER: Final = 0.9
"""A load that is expected to take at most so much of what it was before has become better."""


class Reprobing:
    """Of one tier. Times are seconds of the clock of the engine cell."""

    __slots__ = ("_at", "_declined", "_expected_s", "_interval_s")

    def __init__(self) -> None:
        self._at = 0.0  # when it is tried at the latest
        self._interval_s = FIRST_S
        self._declined = 0  # requests since it was tried
        self._expected_s = 0.0  # what a load was expected to take then

    def begin(self, now: float, expected_s: float) -> None:
        """Note that the tier is declined from now on. ``expected_s``: for some number of blocks."""
        self._interval_s = FIRST_S
        self._note(now, expected_s)

    def is_due(self, now: float, expected_s: float, outstanding: int) -> bool:
        """Tell whether a request that declines the tier should try it; if so, it counts as tried.

        ``expected_s``: what a load of the same number of blocks is expected to take by now;
        ``outstanding``: blocks that the tier was asked for and has not answered.
        """
        self._declined += 1
        is_better = expected_s <= BETTER * self._expected_s
        has_time = outstanding == 0 and self._declined > REQUESTS
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
        self._at = now + self._interval_s
        self._declined = 0
        self._expected_s = expected_s
