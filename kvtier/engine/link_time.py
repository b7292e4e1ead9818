"""What time it is at one tier's link, and how much of it the tier's process could use.

Part of a link's actor. The time is that of the last Tick, or that at which something of the tier
arrived, if that is later: between two Ticks the engine may compute for seconds, and what a
link sends with the time from before counts as seconds old at the next one.

While a tier's process is ready to run and the machine runs others, its silence shows nothing.
"""

from __future__ import annotations


class LinkTime:
    """Of one link. In seconds of the runtime's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._not_run_s = 0.0

    @property
    def given(self) -> float:
        """The time without what the tier's process waited for a processor: differences count."""
        return self.now - self._not_run_s

    def pass_to(self, now: float) -> None:
        """Learn the time."""
        self.now = now

    def leave_out(self, seconds: float) -> None:
        """Note for how long the tier's process was not run, though it was ready to."""
        self._not_run_s += seconds
