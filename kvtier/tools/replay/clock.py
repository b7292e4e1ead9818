"""The clock of a replay: real time while a tier works, jumps while none does.

Tiers are real and need real time; an engine's computing is only stated. With
jumps, time passes at its real pace as long as any tier has work in flight, and
goes straight to the next event when nothing but stated time would pass. So durations on this clock
are as if the engine really computed. The runtime
counts a tier's deadlines on this clock, and the tier on the machine's
(``kvtier/hosts/machine_time.py``): no jump ever happens while one runs, so they
agree. Without jumps the clock is a real one, and stated time is slept through.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_S: Final = 0.001
"""Duration of the engine's steps while it waits for a tier.

The replay sleeps it, so that the threads of tiers get the processor.
"""

SLEEP_S_MAX: Final = 0.1
"""The longest sleep without a check whether the run is to stop."""


class ReplayClock:
    """Seconds since ``begin``, real ones and skipped ones; 0 before."""

    def __init__(
        self,
        *,
        jumps: bool,
        real: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._jumps = jumps
        self._real = real
        self._sleep = sleep
        self._zero: float | None = None
        self.skipped_s = 0.0

    def begin(self) -> None:
        """Let time pass from now on."""
        self._zero = self._real()

    def now(self) -> float:
        """Return the time."""
        return self.real_s() + self.skipped_s

    def real_s(self) -> float:
        """Return the real seconds that have passed."""
        return 0.0 if self._zero is None else self._real() - self._zero

    def pass_time(self, until: float | None, *, tiers_work: bool) -> None:
        """Let time pass, at most until the next event (None: there is none).

        May return early; then the caller checks again.
        """
        left = STEP_S if until is None else until - self.now()
        if left <= 0:
            return
        if tiers_work:
            self._sleep(min(left, STEP_S))
        elif self._jumps and until is not None:
            self.skipped_s += left
        else:
            self._sleep(min(left, SLEEP_S_MAX))
