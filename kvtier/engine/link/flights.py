"""Tracks flights: the jobs and probes that were sent to a tier and have not ended.

Part of a link's actor. A job or probe is in flight from ``begin`` until its tier ends it, whether
or not a request still waits for it. Meanwhile it loses three properties, each once:

- it is *awaited* until its request has lost patience, or its tier is late with it;
- it is *watched* until its tier is late with it: only the end of a watched flight shows whether the
  tier is well;
- it *takes room*, of which a tier has as much as it completes soon (``pacing.py``), until its tier
  is late with it. An awaited probe also loses the room, and is awaited no more, at its deadline.

Slow is not failing: a flight is not late because of its own age. It is late once no flight of its
kind has ended for as long as the tier may take for one, or once that long has passed since a later
flight ended. So neither a queue in front of a slow tier nor a slow neighbour makes a flight late. A
tier that hangs does, and so does a single call that hangs while others go on. Each peer of a tier
is watched separately: progress at one shows nothing about another. Only time in which the tier's
process could run is counted.

A flight counts as begun when it is sent, since a link sends no more than its tier completes soon.

# Invariant: a watched flight was begun, and has neither ended nor been called late.
#            Checked: begin, a_link_watches_what_it_waits_for.
# Invariant: the outstanding blocks are those of the jobs in flight.
#            Checked: _remove, what_is_outstanding_is_in_flight.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Generic, TypeVar

from kvtier.engine.link.pacing import Pacing
from kvtier.plugin_api.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.core.messages import LoadCost
    from kvtier.core.statistics import TierCounts
    from kvtier.plugin_api.keys import RequestId


class LinkTime:
    """The time at one link, in seconds of the runtime's clock.

    It is that of the last Tick, or of the tier's last message if that arrived later: between two
    Ticks the engine may compute for seconds, and work sent with the earlier time would count as
    seconds old at the next one.

    While a tier's process is ready to run but the machine runs others, its silence shows nothing.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._not_run_s = 0.0

    @property
    def given(self) -> float:
        """The time, less the tier's process's waits for a processor: only differences matter."""
        return self.now - self._not_run_s

    def pass_to(self, now: float) -> None:
        """Set the time."""
        self.now = now

    def leave_out(self, seconds: float) -> None:
        """Note for how long the tier's process was ready to run but did not."""
        self._not_run_s += seconds


class Flight:
    """A job or a probe of a link."""

    __slots__ = (
        "backlog",
        "deadline",
        "is_awaited",
        "is_lost",
        "number",
        "overtaken_at",
        "peer",
        "request",
        "size",
        "started",
    )

    def __init__(self, request: RequestId, size: int, since: float = 0.0) -> None:
        """``size``: blocks or keys; ``since``: when the link received it."""
        self.request = request
        self.size = size
        self.started = since  #: when it was sent; until then, when the link received it
        self.number = 0  #: its number in messages, from 1
        self.peer = ""  #: the address of the peer that is to do it, if its tier has peers
        self.backlog = 0  #: blocks outstanding at the tier when it was sent, its own included
        self.deadline = NEVER  #: passed to its tier; an awaited probe becomes a miss then
        self.overtaken_at = NEVER
        self.is_awaited = True
        self.is_lost = False  #: whether it takes no more room at its tier

    def assign(self, peer: str) -> None:
        """Set the peer of its tier that is to do it."""
        self.peer = peer


F = TypeVar("F", bound=Flight)


class Flights(Generic[F]):
    """The flights of one kind of work at one tier. Times are seconds of its link's clock."""

    def __init__(self, time: LinkTime, first_blocks: int, limit_s: float) -> None:
        """``first_blocks`` and ``limit_s`` are those of ``Pacing``."""
        self.pacing = Pacing(first_blocks, limit_s)
        self.outstanding = 0  #: blocks at the tier, or on their way there and back
        self.left = 0  #: number of flights that are not awaited any more
        self.left_blocks = 0  #: their blocks
        self._time = time
        self._flights: dict[int, F] = {}  # in the order of sending
        # One for each peer that has watched flights.
        self._watches: defaultdict[str, _Watch[F]] = defaultdict(_Watch)
        self._lost_blocks = 0  # outstanding, without taking room
        self._ended: list[tuple[F, float]] = []  # complete, since the last look; and when

    def __iter__(self) -> Iterator[F]:
        """Iterate over a copy of the flights, in the order in which they were sent."""
        return iter(list(self._flights.values()))

    def __len__(self) -> int:
        """Return the number of flights, awaited or not."""
        return len(self._flights)

    def get(self, number: int) -> F | None:
        """Return the flight of a number; None: there is none in flight."""
        return self._flights.get(number)

    @property
    def awaited(self) -> int:
        """The number of awaited flights."""
        return len(self._flights) - self.left

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the watched flights. For tests and diagnosis: it costs O(n)."""
        return frozenset(flight.number for flight in self if self.is_watched(flight))

    def is_watched(self, flight: F) -> bool:
        """Return whether the end of a flight will show if its tier is well."""
        watch = self._watches.get(flight.peer)
        return watch is not None and (
            flight.number in watch.begun or flight.number in watch.overtaken
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and all that has ended was learnt from."""
        return not (self.outstanding or self._ended)

    @property
    def room(self) -> int:
        """How many more blocks the tier can be given now; 0 or less: it has enough."""
        return self.pacing.window - (self.outstanding - self._lost_blocks)

    def cost(self, waiting: int) -> LoadCost | None:
        """Return the cost of a load behind what is outstanding and ``waiting`` more blocks."""
        return self.pacing.cost(self.outstanding + waiting)

    # --- a flight's life ---

    def begin(self, flight: F, number: int) -> None:
        """Note that a job or probe is sent now. Its number is larger than earlier ones."""
        assert number not in self._flights, "a number is given once"
        now = self._time.now
        if self.is_idle:  # no look was taken meanwhile
            self.pacing.look(now, is_busy=False)
        self.outstanding += flight.size
        flight.number, flight.started, flight.backlog = number, now, self.outstanding
        self._flights[number] = flight
        self._watches[flight.peer].on_begin(flight, self._time.given)
        self.pacing.allow(flight.backlog)
        # The tier's other work may take as long again.
        flight.deadline = now + 2 * self.pacing.late_after_s

    def leave(self, flight: F) -> None:
        """Note that a flight is not awaited any more; its end still counts."""
        assert flight.is_awaited, "a flight is left once"
        flight.is_awaited = False
        self.left += 1
        self.left_blocks += flight.size

    def lose(self, flight: F) -> None:
        """Free the room that a flight takes at its tier: it takes too long, whatever the cause."""
        if not flight.is_lost:
            flight.is_lost = True
            self._lost_blocks += flight.size

    def withdraw(self, flight: F) -> None:
        """Note that a flight was not sent after all, or that its end no longer matters."""
        if (watch := self._watches.get(flight.peer)) is not None:
            watch.remove(flight)
        self._remove(flight)

    def end(self, flight: F, *, is_whole: bool, at: float = 0.0) -> None:
        """Note that the tier has ended a flight, late or not. ``is_whole``: with all its blocks.

        ``at``: when it ended, by the tier's clock, which should be the link's.
        """
        if (watch := self._watches.get(flight.peer)) is not None:
            watch.on_end(flight, self._time.given)
        self._remove(flight)
        if is_whole:
            self._ended.append((flight, at))

    def _remove(self, flight: F) -> None:
        del self._flights[flight.number]
        self.outstanding -= flight.size
        assert self.outstanding >= 0, "a flight ended that was not sent"
        if flight.is_lost:
            self._lost_blocks -= flight.size
        if not flight.is_awaited:
            self.left -= 1
            self.left_blocks -= flight.size

    # --- at a look of its link ---

    def pop_late(self) -> list[tuple[str, list[F], bool]]:
        """Return each peer's late flights, and whether the peer is stalled: then all are late.

        The late ones are not watched any more, and take no more room.
        """
        given, limit_s = self._time.given, self.pacing.late_after_s
        found = []
        for peer, watch in list(self._watches.items()):
            is_stalled = watch.is_stalled(given, limit_s)
            late = watch.pop_late(given, limit_s)
            for flight in late:
                self.lose(flight)
            if late:
                found.append((peer, late, is_stalled))
            if watch.is_idle:
                del self._watches[peer]
        return found

    def seconds(self, flight: F, at: float) -> float:
        """Return how long a flight took that ended ``at`` that time of the tier's clock.

        The tier's time counts, not that of the link's look, which is late if the engine computes
        for long. If the tier's time can't be true, the link's counts.
        """
        now = self._time.now
        return (at if flight.started < at < now else now) - flight.started

    def learn(self) -> tuple[float, float]:
        """Learn from flights that have ended; return their expected and their actual seconds.

        By the link's clock, loads would seem slow while the engine computes, and even more requests
        would compute. While no flight is left, this need not be called.
        """
        expected_s = took_s = 0.0
        now = self._time.now
        self.pacing.look(now, is_busy=not self.is_idle)
        for flight, at in self._ended:
            seen_s = now - flight.started
            seconds = self.seconds(flight, at)
            expected = self.pacing.learn(flight.backlog, seconds, seen_s, now)
            if expected is not None:
                expected_s += expected
                took_s += seconds
        self._ended.clear()
        return expected_s, took_s

    # --- the tier's life ---

    def lose_all(self) -> list[F]:
        """Stop watching the flights of a tier that broke; return those that were watched."""
        lost = [flight for flight in self if self.is_watched(flight)]
        self._watches.clear()
        for flight in lost:
            self.lose(flight)
        return lost

    def pop_all(self) -> list[F]:
        """Forget all flights, late or not, and the tier's speed; return the flights."""
        flights = list(self._flights.values())
        self._flights.clear()
        self._watches.clear()
        self._ended.clear()
        self.outstanding = self.left = self.left_blocks = self._lost_blocks = 0
        self.pacing.restart()
        return flights


class _Watch(Generic[F]):
    """The watched flights of one peer, by number."""

    __slots__ = ("begun", "moved_at", "overtaken")

    def __init__(self) -> None:
        self.begun: dict[int, F] = {}  # in the order of sending
        self.overtaken: dict[int, F] = {}
        self.moved_at = 0.0  # when a flight last ended, or the peer got work after being idle

    @property
    def is_idle(self) -> bool:
        """Whether nothing is watched."""
        return not (self.begun or self.overtaken)

    def on_begin(self, flight: F, now: float) -> None:
        """Watch a flight."""
        if self.is_idle:
            self.moved_at = now
        self.begun[flight.number] = flight

    def on_end(self, flight: F, now: float) -> None:
        """Note that a flight has ended, watched or not, so its peer makes progress."""
        self.moved_at = now
        if flight.number in self.begun:
            while (first := next(iter(self.begun))) != flight.number:
                overtaken = self.overtaken[first] = self.begun.pop(first)
                overtaken.overtaken_at = now
        self.remove(flight)

    def remove(self, flight: F) -> None:
        """Stop watching a flight."""
        self.begun.pop(flight.number, None)
        self.overtaken.pop(flight.number, None)

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Return whether no flight has ended for ``limit_s``, though some are watched."""
        return not self.is_idle and now - self.moved_at >= limit_s

    def pop_late(self, now: float, limit_s: float) -> list[F]:
        """Return the late flights, all of them if the peer is stalled, and stop watching them."""
        if self.is_stalled(now, limit_s):
            late = [*self.overtaken.values(), *self.begun.values()]
        else:
            late = [each for each in self.overtaken.values() if now - each.overtaken_at >= limit_s]
        for flight in late:
            self.remove(flight)
        return late


class Numbers:
    """Allocates the numbers of the jobs and probes that a link sends: from 1, each once."""

    def __init__(self, counts: TierCounts) -> None:
        self.counts = counts
        self._last = 0

    def next(self) -> int:
        """Return an unused number."""
        self._last += 1
        return self._last

    def count_stray(self, number: int) -> None:
        """Count a completion that matches nothing in flight: late, duplicate or invented."""
        was_sent = 0 < number <= self._last
        self.counts.late_completions += was_sent
        self.counts.unknown_completions += not was_sent
