"""Whether what a tier was sent of one kind of work moves. Part of a link's actor.

Slow is not sick: no piece of work has a deadline of its own. It is late once nothing of its
kind has ended for as long as the tier may take over one, or once it was overtaken for as long:
what was sent after it has ended, and it has not. So neither a queue in front of a
slow tier nor a slow neighbour makes work late; a tier that hangs does, and so does a single
call that hangs beside others that go on.

Work counts as begun when it is sent, since a link sends no more than its tier works off soon
(``kvtier/engine/transfer_times.py``).

# Invariant: what is watched was begun, and has neither ended nor been called late.
#            Checked: on_begin, a_link_watches_what_it_waits_for.
"""

from __future__ import annotations


class StallDetector:
    """Of one peer of a tier and one kind of work. Times are seconds of the clock of its link."""

    def __init__(self) -> None:
        self._begun: dict[int, None] = {}  # in the order in which it was sent
        self._overtaken: dict[int, float] = {}  # since when
        self._moved_at = 0.0  # when something ended last, or the tier had something to do again

    @property
    def watched(self) -> frozenset[int]:
        """What is watched. For tests and diagnosis."""
        return frozenset((*self._begun, *self._overtaken))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is watched."""
        return not (self._begun or self._overtaken)

    def on_begin(self, number: int, now: float) -> None:
        """Watch a piece of work, whose number is larger than those before."""
        if self.is_idle:
            self._moved_at = now
        assert number not in self._overtaken, "a number is given once"
        self._begun[number] = None

    def on_end(self, number: int, now: float) -> None:
        """Note that the tier has ended a piece of work, watched or not: it moves."""
        self._moved_at = now
        if self._overtaken.pop(number, None) is not None or number not in self._begun:
            return
        while (first := next(iter(self._begun))) != number:
            del self._begun[first]
            self._overtaken[first] = now
        del self._begun[number]

    def leave(self, number: int) -> None:
        """Watch a piece of work no longer, though the tier has not ended it."""
        self._begun.pop(number, None)
        self._overtaken.pop(number, None)

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Tell whether nothing has ended for so long, though there is something to end."""
        return not self.is_idle and now - self._moved_at >= limit_s

    def pop_late(self, now: float, limit_s: float) -> list[int]:
        """Return what is late, and watch it no longer: all that there is if the tier is stalled."""
        if self.is_stalled(now, limit_s):
            late = [*self._overtaken, *self._begun]
            self.forget()
            return late
        late = [number for number, since in self._overtaken.items() if now - since >= limit_s]
        for number in late:
            del self._overtaken[number]
        return late

    def forget(self) -> None:
        """Watch nothing any more."""
        self._begun.clear()
        self._overtaken.clear()
