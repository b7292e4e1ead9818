"""Detects whether a tier's work of one kind is late or stalled. Part of a link's actor.

Slow is not failing: no piece of work has its own deadline. It is late once no work of its
kind has ended for as long as the tier may take for one, or once it was overtaken for as long:
work sent after it has ended, and it has not. So neither a queue in front of a slow tier nor a slow
neighbour makes work late. A tier that hangs does, and so does a single call that hangs while
others go on.

Work counts as begun when it is sent, since a link sends no more than its tier completes soon
(``kvtier/engine/link/transfer_times.py``).

# Invariant: what is watched was begun, and has neither ended nor been called late.
#            Checked: on_begin, a_link_watches_what_it_waits_for.
"""

from __future__ import annotations


class StallDetector:
    """Watches one kind of work of one peer of a tier. Times are seconds of its link's clock."""

    def __init__(self) -> None:
        self._begun: dict[int, None] = {}  # in the order of sending
        self._overtaken: dict[int, float] = {}  # since when
        self._moved_at = 0.0  # when work last ended, or the tier last got work after being idle

    @property
    def watched(self) -> frozenset[int]:
        """The watched numbers. For tests and diagnosis."""
        return frozenset((*self._begun, *self._overtaken))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is watched."""
        return not (self._begun or self._overtaken)

    def on_begin(self, number: int, now: float) -> None:
        """Watch a piece of work. Its number must be larger than earlier ones."""
        if self.is_idle:
            self._moved_at = now
        assert number not in self._overtaken, "a number is given once"
        self._begun[number] = None

    def on_end(self, number: int, now: float) -> None:
        """Note that the tier has ended a piece of work, watched or not, so it makes progress."""
        self._moved_at = now
        if self._overtaken.pop(number, None) is not None or number not in self._begun:
            return
        while (first := next(iter(self._begun))) != number:
            del self._begun[first]
            self._overtaken[first] = now
        del self._begun[number]

    def leave(self, number: int) -> None:
        """Stop watching a piece of work, though the tier has not ended it."""
        self._begun.pop(number, None)
        self._overtaken.pop(number, None)

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Return whether no work has ended for ``limit_s``, though some is watched."""
        return not self.is_idle and now - self._moved_at >= limit_s

    def pop_late(self, now: float, limit_s: float) -> list[int]:
        """Return the late work, all of it if the tier is stalled, and stop watching it."""
        if self.is_stalled(now, limit_s):
            late = [*self._overtaken, *self._begun]
            self.forget()
            return late
        late = [number for number, since in self._overtaken.items() if now - since >= limit_s]
        for number in late:
            del self._overtaken[number]
        return late

    def forget(self) -> None:
        """Stop watching all work."""
        self._begun.clear()
        self._overtaken.clear()
