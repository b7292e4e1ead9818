"""When a tier is given work, and when it is left alone for a while.

The table is ``BREAKER_TABLE``; this adds the counting and the pauses. Probes,
loads and stores are counted apart, since one of them may work while another
hangs: after ``failures_max`` failures of one kind in a row the tier is left
alone for ``pause_s``. Then one piece of work of that kind is tried, and the
other kinds are let through; any failure begins a pause twice as long, up to
``pause_s_max``.
"""

from __future__ import annotations

from enum import IntEnum

from kvtier.core.states import BREAKER_TABLE, BreakerEvent, BreakerState
from kvtier.errors import InternalError


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
        """Tell whether work may be sent now; in TRIAL that is one piece of the sick kind."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is not BreakerState.TRIAL:
            return False
        if work is not self._sick:
            return True
        may = not self._trial_under_way
        self._trial_under_way = True
        return may

    def succeeded(self, work: Work) -> None:
        """Note that the tier did some work."""
        self._failures[work] = 0
        if self.state is BreakerState.TRIAL and work is self._sick:
            self._move(BreakerEvent.SUCCEEDED)
            self._pause_s = self._first_pause_s

    def failed(self, work: Work, now: float) -> None:
        """Note that the tier failed, or let a deadline pass."""
        self._failures[work] += 1
        if self.state is BreakerState.TRIAL:
            self._pause_s = min(self._pause_s * 2, self._pause_s_max)
            self._open(BreakerEvent.FAILED, work, now)
        elif self.state is BreakerState.CLOSED and self._failures[work] >= self._failures_max:
            self._open(BreakerEvent.FAILED_TOO_OFTEN, work, now)

    def pass_time(self, now: float) -> None:
        """Begin a trial once the pause is over."""
        if self.state is BreakerState.OPEN and now >= self._open_until:
            self._move(BreakerEvent.PAUSE_OVER)
            self._trial_under_way = False

    def broke(self) -> None:
        """Cut the tier off, for good unless it is restarted."""
        if self.state is not BreakerState.CUT_OFF:
            self._move(BreakerEvent.BROKE)

    def restarted(self) -> None:
        """Trust a fresh cell."""
        self._move(BreakerEvent.RESTARTED)
        self._failures = [0] * len(Work)
        self._pause_s = self._first_pause_s

    def _open(self, event: BreakerEvent, work: Work, now: float) -> None:
        self._move(event)
        self._sick = work
        self._open_until = now + self._pause_s

    def _move(self, event: BreakerEvent) -> None:
        to = BREAKER_TABLE.get((self.state, event))
        if to is None:
            raise InternalError(f"breaker in state {self.state.name} cannot be {event.name}")
        self.state = to
