"""Decides which peers of a tier are given work: a breaker for each address that fails.

Part of a link's actor. A request-scoped tier may load from many engines, each at its own address.
A dead or stopped engine affects only the requests that name it: its failures open a breaker of its
own. For the tier, a peer whose breaker opens counts as one failure, which a success of any other
peer cancels. So the tier's breaker opens only if several peers fail and none does any work.

Addresses come with requests, from any client, so only those that have failed are kept, and few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.engine.link.circuit_breaker import Breaker, BreakerState, Work

if TYPE_CHECKING:
    from collections.abc import Callable

PEERS_MAX: Final = 256
"""Limit on breakers kept: beyond it, the one that has been kept for longest is forgotten."""


class PeerHealth:
    """The breakers of one tier's peers."""

    def __init__(self, new_breaker: Callable[[], Breaker]) -> None:
        self._new_breaker = new_breaker
        self._failing: dict[tuple[str, Work], Breaker] = {}

    @property
    def pauses(self) -> bool:
        """Whether a breaker is to be tried once its pause is over."""
        return any(each.state is BreakerState.OPEN for each in self._failing.values())

    def allows(self, work: Work, peer: str) -> bool:
        """Return whether a piece of work may be sent. A peer that fails loads is not probed."""
        if not self._failing:  # the usual case: this is called for each job and each probe
            return True
        both = (self._failing.get((peer, each)) for each in (work, Work.LOAD))
        return all(each is None or each.has_turn for each in both)

    def on_sent(self, work: Work, peer: str) -> None:
        """Note that a piece of work is sent. It may be the trial of a breaker."""
        breaker = self._failing.get((peer, work))
        if breaker is not None:
            breaker.try_acquire()

    def succeeded(self, work: Work, peer: str) -> bool:
        """Note that a peer did some work. True: it has recovered."""
        breaker = self._failing.get((peer, work))
        if breaker is None:
            return False
        was = breaker.state
        breaker.succeeded()
        if breaker.state is BreakerState.CLOSED:
            del self._failing[peer, work]
        return was is BreakerState.HALF_OPEN

    def change(
        self, work: Work, peer: str, change: Callable[[Breaker, float], None], now: float
    ) -> bool:
        """Note a failure, by a method of its breaker. True: the breaker opens."""
        breaker = self._failing.get((peer, work))
        if breaker is None:
            if len(self._failing) >= PEERS_MAX:
                del self._failing[next(iter(self._failing))]
            breaker = self._failing[peer, work] = self._new_breaker()
        was = breaker.state
        change(breaker, now)
        return was is BreakerState.CLOSED and breaker.state is BreakerState.OPEN

    def showed_nothing(self, work: Work) -> None:
        """Note that all work sent ended without a success or a failure: try again."""
        for (_, kind), breaker in self._failing.items():
            if kind is work:
                breaker.showed_nothing()

    def pass_time(self, now: float) -> None:
        """Begin the trials of breakers whose pause is over."""
        for breaker in self._failing.values():
            breaker.pass_time(now)

    def forget(self) -> None:
        """Trust all peers again."""
        self._failing.clear()
