"""Reasons for an idle engine to keep stepping.

These are events, tiers whose state changed, and deferred stores: time advances for a tier only in
steps, so without them no block would be offered to it again before the next request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.core.events import Event
    from kvtier.engine.facade import SchedulerFacade

LOOK_S: Final = 1.0
"""Interval between two checks of the tiers: constant changes must not keep an engine stepping."""


class IdleWork:
    """Tracks changes since the engine last stepped. Scheduler thread only."""

    def __init__(self, facade: SchedulerFacade) -> None:
        self._facade = facade
        self._events: list[Event] = []
        self._tiers: object = None
        self._looked_s = 0.0

    def is_there(self, now: float) -> bool:
        """Return whether a step would publish anything, or might store deferred blocks."""
        self._events += self._facade.take_events()
        if self._events:
            return True
        if now - self._looked_s < LOOK_S:
            return False
        self._looked_s = now
        if self._facade.has_deferred_stores():
            return True
        before, self._tiers = (
            self._tiers,
            [
                (tier.breaker, tier.connection, tier.counts)
                for tier in self._facade.statistics().tiers
            ],
        )
        return before is not None and before != self._tiers

    def take_events(self) -> list[Event]:
        """Remove and return all pending events."""
        events, self._events = self._events, []
        return [*events, *self._facade.take_events()] if events else self._facade.take_events()
