"""Whether a tier is given work: its circuit breaker and its connection, and who hears of them.

Part of a link's actor. The primary tier is told when the tier becomes usable, or no
longer is; a person reads of the breaker in the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.engine.circuit_breaker import Breaker, BreakerState, Work

if TYPE_CHECKING:
    from kvtier.core.actor import Mailbox
    from kvtier.core.statistics import TierCounts
    from kvtier.engine.connection import ServerConnection


class TierHealth:
    """Of one tier."""

    def __init__(
        self,
        number: int,
        name: str,
        breaker: Breaker,
        connection: ServerConnection,
        counts: TierCounts,
        primary: Mailbox,
        log: Mailbox,
    ) -> None:
        """``number``, ``name``: the tier's."""
        self._number = number
        self._name = name
        self._breaker = breaker
        self._connection = connection
        self._counts = counts
        self._primary = primary
        self._log = log
        self._is_usable = True
        self._now = 0.0

    def pass_time(self, now: float) -> None:
        """Learn the time, in seconds of the runtime's clock."""
        self._now = now

    def end_pause(self) -> None:
        """Go on once a pause of the breaker is over."""
        self._breaker.pass_time(self._now)
        self.tell_usable()

    def succeeded(self, work: Work) -> None:
        """Note that the tier did some work."""
        was = self._breaker.state
        self._breaker.succeeded(work)
        if was is BreakerState.HALF_OPEN and self._breaker.state is BreakerState.CLOSED:
            self._log.post(m.Notice(event="tier is back", tier=self._name, detail=""))
        self.tell_usable()

    def failed(self, work: Work, how: str) -> None:
        """Note that the tier failed, or let a deadline pass."""
        was = self._breaker.state
        self._breaker.failed(work, self._now)
        if was is BreakerState.CLOSED and self._breaker.state is BreakerState.OPEN:
            self._counts.breaker_opened += 1
            self._log.post(m.Notice(event="tier bypassed", tier=self._name, detail=how))
        self.tell_usable()

    def tell_usable(self) -> None:
        """Tell the primary tier whether the tier may be asked for anything, if that is news."""
        trusted = self._breaker.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN)
        usable = trusted and self._connection.is_up
        if usable is not self._is_usable:
            self._is_usable = usable
            self._primary.post(m.TierUsable(tier=self._number, usable=usable))
