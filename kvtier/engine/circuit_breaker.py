"""When a tier is given work: a circuit breaker, as in Nygard's *Release It!*.

Legal moves are the rows of ``BREAKER_TABLE``; ``Breaker`` adds what is no row, the
counting and the pauses. Probes, loads and stores are counted apart, since one of
them may work while another hangs: after ``failures_max`` failures of one kind in a
row the breaker opens for ``pause_s``. Then it is half-open: one piece of work of
that kind is tried, and the other kinds are let through. Any failure opens it
again, for twice as long, up to ``pause_s_max``. A server that is reached again ends the
pause, and a trial that was lost with it shows nothing: another follows. A tier that broke is
disabled until it is restarted.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping


class BreakerState(IntEnum):
    """Whether a tier is given work."""

    CLOSED = 0  #: healthy: all work goes through
    OPEN = 1  #: sick: nothing is sent until the pause is over
    HALF_OPEN = 2  #: one piece of work is sent, to see
    DISABLED = 3  #: its actor or backend broke; nothing is sent until it is restarted


class BreakerEvent(IntEnum):
    """What moves a breaker."""

    FAILED_TOO_OFTEN = 0
    PAUSE_OVER = 1
    SUCCEEDED = 2
    FAILED = 3
    BROKE = 4
    RESTARTED = 5
    RECONNECTED = 6


BREAKER_TABLE: Final[Mapping[tuple[BreakerState, BreakerEvent], BreakerState]] = {
    (BreakerState.CLOSED, BreakerEvent.FAILED_TOO_OFTEN): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PAUSE_OVER): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, BreakerEvent.RECONNECTED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.SUCCEEDED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.BROKE): BreakerState.DISABLED,
    (BreakerState.OPEN, BreakerEvent.BROKE): BreakerState.DISABLED,
    (BreakerState.HALF_OPEN, BreakerEvent.BROKE): BreakerState.DISABLED,
    (BreakerState.DISABLED, BreakerEvent.RESTARTED): BreakerState.CLOSED,
}


class Work(IntEnum):
    """What a tier is asked to do."""

    PROBE = 0
    LOAD = 1
    STORE = 2


class Breaker:
    """One tier's breaker. Time is given, never read."""

    def __init__(self, failures_max: int, pause_s: float, pause_s_max: float) -> None:
        self.state = BreakerState.CLOSED
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_s_max = pause_s_max
        self._pause_s = pause_s
        self._failures = [0] * len(Work)
        self._sick = Work.PROBE  # the kind of work that failed too often
        self._open_until = 0.0
        self._trial_under_way = False

    def may_send(self, work: Work) -> bool:
        """Tell whether work may be sent now; in HALF_OPEN that is one piece of the sick kind."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is not BreakerState.HALF_OPEN:
            return False
        if work is not self._sick:
            return True
        may = not self._trial_under_way
        self._trial_under_way = True
        return may

    def succeeded(self, work: Work) -> None:
        """Note that the tier did some work."""
        self._failures[work] = 0
        if self.state is BreakerState.HALF_OPEN and work is self._sick:
            self._move(BreakerEvent.SUCCEEDED)
            self._pause_s = self._first_pause_s

    def failed(self, work: Work, now: float) -> None:
        """Note that the tier failed, or let a deadline pass."""
        self._failures[work] += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(self._pause_s * 2, self._pause_s_max)
            self._open(BreakerEvent.FAILED, work, now)
        elif self.state is BreakerState.CLOSED and self._failures[work] >= self._failures_max:
            self._open(BreakerEvent.FAILED_TOO_OFTEN, work, now)

    def showed_nothing(self, work: Work) -> None:
        """Note that work ended without a success or a failure: if it was the trial, try again."""
        if work is self._sick:
            self._trial_under_way = False

    def pass_time(self, now: float) -> None:
        """Begin a trial once the pause is over."""
        if self.state is BreakerState.OPEN and now >= self._open_until:
            self._try(BreakerEvent.PAUSE_OVER)

    def reconnected(self) -> None:
        """Begin a trial at once: what failed was the server, and it is back."""
        if self.state is BreakerState.OPEN:
            self._try(BreakerEvent.RECONNECTED)

    def broke(self) -> None:
        """Disable the tier, for good unless it is restarted."""
        if self.state is not BreakerState.DISABLED:
            self._move(BreakerEvent.BROKE)

    def restarted(self) -> None:
        """Trust a fresh cell."""
        self._move(BreakerEvent.RESTARTED)
        self._failures = [0] * len(Work)
        self._pause_s = self._first_pause_s

    def _try(self, event: BreakerEvent) -> None:
        self._move(event)
        self._trial_under_way = False

    def _open(self, event: BreakerEvent, work: Work, now: float) -> None:
        self._move(event)
        self._sick = work
        self._open_until = now + self._pause_s

    def _move(self, event: BreakerEvent) -> None:
        to = BREAKER_TABLE.get((self.state, event))
        if to is None:
            raise InternalError(f"breaker in state {self.state.name} cannot be {event.name}")
        self.state = to
