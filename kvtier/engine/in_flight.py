"""What a tier was sent of one kind of work, and has not ended: watched for stalls, and measured.

Each peer of a tier is watched by itself: that others go on says nothing of it, nor it of them.
Part of a link's actor. The watches count what time the tier's process could use.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kvtier.engine.stall_detector import StallDetector
from kvtier.engine.transfer_times import TransferTimes

if TYPE_CHECKING:
    from kvtier.engine.jobs import Sent
    from kvtier.engine.link_time import LinkTime


class InFlight:
    """Of one tier and one kind of work. Whoever uses it keeps the work itself, by its number."""

    def __init__(self, time: LinkTime, first_blocks: int, limit_s: float) -> None:
        """As ``TransferTimes``."""
        self._time = time
        self.times = TransferTimes(first_blocks, limit_s)
        # Of each peer that has something to do.
        self._watches: defaultdict[str, StallDetector] = defaultdict(StallDetector)

    @property
    def is_idle(self) -> bool:
        """Whether the tier has nothing to do, and all that it has done is noted."""
        return self.times.is_idle

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the work that would be noticed to be late."""
        return frozenset().union(*(watch.watched for watch in self._watches.values()))

    def begin(self, number: int, work: Sent) -> float:
        """Note that work is sent; return from when on nobody waits for it at the latest."""
        self._watches[work.peer].on_begin(number, self._time.given)
        self.times.on_sent(work, self._time.now)
        # What the tier has besides may take as long again.
        return self._time.now + 2 * self.times.late_after_s

    def leave(self, number: int, work: Sent) -> None:
        """Note that work was not sent after all, or that nobody wants to know of its end."""
        if (watch := self._watches.get(work.peer)) is not None:
            watch.leave(number)
        self.times.on_end(work, is_whole=False)

    def end(self, number: int, work: Sent, *, is_whole: bool, at: float = 0.0) -> None:
        """Note that the tier has ended work. As ``TransferTimes.ended``."""
        if (watch := self._watches.get(work.peer)) is not None:
            watch.on_end(number, self._time.given)
        self.times.on_end(work, is_whole=is_whole, at=at)

    def pop_late(self) -> list[tuple[str, list[int], bool]]:
        """Return what each peer is late with, and whether that is all, since nothing moves."""
        given, limit_s = self._time.given, self.times.late_after_s
        found = []
        for peer, watch in list(self._watches.items()):
            is_stalled = watch.is_stalled(given, limit_s)
            late = watch.pop_late(given, limit_s)
            if late or is_stalled:
                found.append((peer, late, is_stalled))
            if watch.is_idle:
                del self._watches[peer]
        return found

    def pop_all(self) -> list[int]:
        """Return all that is watched, oldest first: the tier will not end it."""
        watched = sorted(self.watched)
        self._watches.clear()
        return watched

    def forget(self) -> None:
        """Note that nothing is left of the tier."""
        self._watches.clear()
        self.times.forget()
