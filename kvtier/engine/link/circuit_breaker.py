"""Decides when a tier is given work: circuit breakers, as in Nygard's *Release It!*.

Purpose of the machine: work sent to a failing tier makes requests wait in vain, and ties up slots.
So a failing tier counts as having no block and as taking none, and only a trial now and then shows
whether it is well again.

Coupling with others: ``TierHealth`` holds the breakers of a tier. For a tier with several peers, a
failing peer counts as one failure. A lost connection (``tier_health.py``) stops work without moving
a breaker: no deadline need pass. A stall (``flights.py``) opens a breaker at once, since any work
sent next would wait behind it. A host whose cell breaks disables all breakers
(``kvtier/hosts/life.py``), and a new cell enables them.

A tier has a breaker for each kind of work, since one may go on while another fails. Legal
moves are the rows of ``BREAKER_TABLE``; ``Breaker`` adds the rest, the counting and the
pauses: after ``failures_max`` failures in a row, or as soon as the work stalls, it opens for
``pause_s``. Then it is half-open: one piece of work is tried. A failure opens it again, for
twice as long, up to ``pause_s_max``. Reaching the server again ends the pause. A trial that
was lost with the server proves nothing, so another follows. All breakers of a tier that broke are
disabled until it is restarted.

Failures are counted in a row and not as a rate: with a rate, the few jobs of a quiet hour would
decide. A slow tier is not the breaker's concern: its measured times limit how much it is given at
once (``pacing.py``).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class BreakerState(IntEnum):
    """Whether a tier is given work of one kind."""

    CLOSED = 0  #: healthy: all of it goes through
    OPEN = 1  #: sick: nothing is sent until the pause is over
    HALF_OPEN = 2  #: one piece of work is sent as a trial
    DISABLED = 3  #: its actor or backend broke; nothing is sent until it is restarted


class BreakerEvent(IntEnum):
    """An event that moves a breaker."""

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


_FROM_WORST: Final = (
    BreakerState.DISABLED,
    BreakerState.OPEN,
    BreakerState.HALF_OPEN,
    BreakerState.CLOSED,
)


def worst(states: Iterable[BreakerState]) -> BreakerState:
    """Return the most restrictive state."""
    return min(states, key=_FROM_WORST.index)


class Work(IntEnum):
    """A kind of work that a tier is given."""

    PROBE = 0
    LOAD = 1
    STORE = 2


class Breaker:
    """The breaker of one kind of work at one tier. Time is passed in, never read."""

    def __init__(self, failures_max: int, pause_s: float, pause_s_max: float) -> None:
        self.state = BreakerState.CLOSED
        self.opened_at = 0.0  #: when it last left CLOSED
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_s_max = pause_s_max
        self._pause_s = pause_s
        self._failures = 0
        self._open_until = 0.0
        self._trial_under_way = False

    @property
    def allows(self) -> bool:
        """Whether work may be sent, now or once the trial has ended."""
        return self.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN)

    @property
    def has_turn(self) -> bool:
        """Whether a piece of work may be sent now; in HALF_OPEN it would be the trial."""
        is_tried = self.state is BreakerState.HALF_OPEN and not self._trial_under_way
        return is_tried or self.state is BreakerState.CLOSED

    def try_acquire(self) -> bool:
        """Return whether a piece of work may be sent now; in HALF_OPEN it becomes the trial."""
        may = self.has_turn
        self._trial_under_way = self.state is BreakerState.HALF_OPEN
        return may

    def succeeded(self) -> None:
        """Note that the tier completed a piece of work."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self._move(BreakerEvent.SUCCEEDED)
            self._pause_s = self._first_pause_s

    def failed(self, now: float) -> None:
        """Note that the tier failed."""
        self._failures += 1
        if self._failures >= self._failures_max or self.state is BreakerState.HALF_OPEN:
            self.stalled(now)

    def stalled(self, now: float) -> None:
        """Note that the tier has stalled, or fails too often."""
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(self._pause_s * 2, self._pause_s_max)
            self._open(BreakerEvent.FAILED, now)
        elif self.state is BreakerState.CLOSED:
            self.opened_at = now
            self._open(BreakerEvent.FAILED_TOO_OFTEN, now)

    def showed_nothing(self) -> None:
        """Note that work ended without a success or a failure: if it was the trial, try again."""
        self._trial_under_way = False

    def pass_time(self, now: float) -> None:
        """Begin a trial once the pause is over."""
        if self.state is BreakerState.OPEN and now >= self._open_until:
            self._try(BreakerEvent.PAUSE_OVER)

    def reconnected(self) -> None:
        """Begin a trial at once: the server had failed, and is back."""
        if self.state is BreakerState.OPEN:
            self._try(BreakerEvent.RECONNECTED)

    def broke(self) -> None:
        """Send nothing until the tier is restarted."""
        if self.state is not BreakerState.DISABLED:
            self._move(BreakerEvent.BROKE)

    def on_restart(self) -> None:
        """Send work again: a fresh cell serves the tier."""
        self._move(BreakerEvent.RESTARTED)
        self._failures = 0
        self._pause_s = self._first_pause_s

    def _try(self, event: BreakerEvent) -> None:
        self._move(event)
        self._trial_under_way = False

    def _open(self, event: BreakerEvent, now: float) -> None:
        self._move(event)
        self._open_until = now + self._pause_s

    def _move(self, event: BreakerEvent) -> None:
        to = BREAKER_TABLE.get((self.state, event))
        if to is None:
            raise InternalError(f"breaker in state {self.state.name} cannot be {event.name}")
        self.state = to
