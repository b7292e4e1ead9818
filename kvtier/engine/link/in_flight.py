"""Tracks a tier's unfinished work of one kind: watches for stalls, and measures times.

Each peer of a tier is watched by itself: progress at one shows nothing about another.
Part of a link's actor. The watches count only time that the tier's process could use.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kvtier.engine.link.stall_detector import StallDetector
from kvtier.engine.link.transfer_times import TransferTimes

if TYPE_CHECKING:
    from kvtier.engine.link.jobs import Sent
    from kvtier.engine.link.link_time import LinkTime


class InFlight:
    """Work of one kind in flight at one tier. The caller keeps the work itself, by its number."""

    def __init__(self, time: LinkTime, first_blocks: int, limit_s: float) -> None:
        """Create it with the arguments of ``TransferTimes``."""
        self._time = time
        self.times = TransferTimes(first_blocks, limit_s)
        # One for each peer that has work.
        self._watches: defaultdict[str, StallDetector] = defaultdict(StallDetector)

    @property
    def is_idle(self) -> bool:
        """Whether the tier has no work, and all that it has done is recorded."""
        return self.times.is_idle

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the work that is watched for lateness."""
        return frozenset().union(*(watch.watched for watch in self._watches.values()))

    def begin(self, number: int, work: Sent) -> float:
        """Note that work is sent; return the latest time until which it is waited for."""
        self._watches[work.peer].on_begin(number, self._time.given)
        self.times.on_sent(work, self._time.now)
        # The tier's other work may take as long again.
        return self._time.now + 2 * self.times.late_after_s

    def leave(self, number: int, work: Sent) -> None:
        """Note that work was not sent after all, or that its end no longer matters."""
        if (watch := self._watches.get(work.peer)) is not None:
            watch.leave(number)
        self.times.on_end(work, is_whole=False)

    def end(self, number: int, work: Sent, *, is_whole: bool, at: float = 0.0) -> None:
        """Note that the tier has ended work. Arguments as for ``TransferTimes.on_end``."""
        if (watch := self._watches.get(work.peer)) is not None:
            watch.on_end(number, self._time.given)
        self.times.on_end(work, is_whole=is_whole, at=at)

    def pop_late(self) -> list[tuple[str, list[int], bool]]:
        """Return each peer's late work, and whether the peer is stalled: then that is all of it."""
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
        """Return all watched numbers, oldest first, and forget them: the tier will not end them."""
        watched = sorted(self.watched)
        self._watches.clear()
        return watched

    def forget(self) -> None:
        """Forget all work: nothing is left of the tier."""
        self._watches.clear()
        self.times.forget()
