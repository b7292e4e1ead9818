"""What a tier was sent of one kind of work, and has not ended: watched for stalls, and measured.

Part of a link's actor, whose clock is that of its Ticks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.engine.stall_watch import StallWatch
from kvtier.engine.transfer_times import TransferTimes

if TYPE_CHECKING:
    from kvtier.engine.in_flight import Sent


class UnderWay:
    """Of one tier and one kind of work. Whoever uses it keeps the work itself, by its number."""

    def __init__(self, first_blocks: int, limit_s: float) -> None:
        """As ``TransferTimes``."""
        self.times = TransferTimes(first_blocks, limit_s)
        self._watch = StallWatch()

    @property
    def is_idle(self) -> bool:
        """Whether the tier has nothing to do, and all that it has done is noted."""
        return self.times.is_idle

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the work that would be noticed to be late."""
        return self._watch.watched

    def begin(self, number: int, work: Sent, now: float) -> float:
        """Note that work is sent; return from when on nobody waits for it at the latest."""
        self._watch.begun(number, now)
        self.times.sent(work, now)
        # What the tier has besides may take as long again.
        return now + 2 * self.times.late_after_s

    def leave(self, number: int, work: Sent) -> None:
        """Note that work was not sent after all, or that nobody wants to know of its end."""
        self._watch.leave(number)
        self.times.ended(work, is_whole=False)

    def end(self, number: int, work: Sent, now: float, *, is_whole: bool, at: float = 0.0) -> None:
        """Note that the tier has ended work. As ``TransferTimes.ended``."""
        self._watch.ended(number, now)
        self.times.ended(work, is_whole=is_whole, at=at)

    def pop_late(self, now: float) -> tuple[list[int], bool]:
        """Return what the tier is late with, and whether that is all, since nothing moves."""
        limit_s = self.times.late_after_s
        is_stalled = self._watch.is_stalled(now, limit_s)
        return self._watch.pop_late(now, limit_s), is_stalled

    def pop_all(self) -> list[int]:
        """Return all that is watched, oldest first: the tier will not end it."""
        watched = sorted(self._watch.watched)
        self._watch.forget()
        return watched

    def forget(self) -> None:
        """Note that nothing is left of the tier."""
        self._watch.forget()
        self.times.forget()
