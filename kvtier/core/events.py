"""Collects the event stream: blocks that became resident in a tier, and blocks that left it.

Folding the stream of one tier gives the set of keys resident in it. Keys that lapsed
were never in that set.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key

PRIMARY: Final = -1
"""The number of the primary tier; secondary tiers count from 0."""


class EventKind(IntEnum):
    """Change of the keys of an event."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2  #: all keys of the tier are gone; ``keys`` is empty
    LAPSED = 3  #: the store or load that was to fill the keys failed, and none fills them now


class Event(NamedTuple):
    """One change of a tier's contents."""

    kind: EventKind
    keys: tuple[Key, ...]
    tier: int  #: the secondary tier's number, or ``PRIMARY``


class EventLog:
    """The events of one tier not drained yet. None if they are not collected."""

    def __init__(self, tier: int, *, collects: bool) -> None:
        self.collects = collects
        self._tier = tier
        self._events: list[Event] = []
        self._told: set[Key] | None = None

    def tell_once(self) -> None:
        """Report only changes from now on: for a tier that is queried repeatedly.

        For that it remembers the tier's keys, some 100 bytes a key.
        """
        if self.collects and self._told is None:
            self._told = set()

    def add(self, kind: EventKind, keys: Sequence[Key] = ()) -> None:
        """Note a change of ``keys``."""
        if not self.collects:
            return
        if self._told is not None:
            keys = self._news(kind, keys, self._told)
            if not keys and kind is not EventKind.CLEARED:
                return
        self._events.append(Event(kind, tuple(keys), self._tier))

    def _news(self, kind: EventKind, keys: Sequence[Key], told: set[Key]) -> Sequence[Key]:
        if kind is EventKind.STORED:
            keys = [key for key in keys if key not in told]
            told.update(keys)
        elif kind is EventKind.REMOVED:
            keys = [key for key in keys if key in told]
            told.difference_update(keys)
        elif kind is EventKind.CLEARED:
            told.clear()
        return keys

    def drain(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
