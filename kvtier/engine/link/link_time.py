"""Keeps the time at one tier's link, and how much of it the tier's process could use.

Part of a link's actor. The time is that of the last Tick, or that at which a message of the tier
arrived, if that is later: between two Ticks the engine may compute for seconds, and work that a
link sends with the earlier time counts as seconds old at the next one.

While a tier's process is ready to run but the machine runs others, its silence shows nothing.
"""

from __future__ import annotations


class LinkTime:
    """The time at one link, in seconds of the runtime's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._not_run_s = 0.0

    @property
    def given(self) -> float:
        """The time less the tier's process's waits for a processor: only differences matter."""
        return self.now - self._not_run_s

    def pass_to(self, now: float) -> None:
        """Set the time."""
        self.now = now

    def leave_out(self, seconds: float) -> None:
        """Note for how long the tier's process was not run, though it was ready to."""
        self._not_run_s += seconds
