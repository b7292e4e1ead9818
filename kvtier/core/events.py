"""The event stream: what became resident where, and what went.

Folding the stream of one tier gives the set of keys resident in it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key

PRIMARY: Final = -1
"""The number that stands for the primary tier where secondary tiers count from 0."""


class EventKind(IntEnum):
    """What happened to the keys of an event."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2  #: all keys of the tier are gone; ``keys`` is empty


class Event(NamedTuple):
    """One change of a tier's contents."""

    kind: EventKind
    keys: tuple[Key, ...]
    tier: int  #: the secondary tier's number, or ``PRIMARY``


class EventLog:
    """The events of one tier that nobody has taken yet. None if they are not collected."""

    def __init__(self, tier: int, *, collects: bool) -> None:
        self._tier = tier
        self._collects = collects
        self._events: list[Event] = []

    def add(self, kind: EventKind, keys: Sequence[Key] = ()) -> None:
        """Note what happened to ``keys``."""
        if self._collects:
            self._events.append(Event(kind, tuple(keys), self._tier))

    def drain(self) -> list[Event]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events
