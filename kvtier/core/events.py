"""The event stream: what became resident where, and what went.

Folding the stream of one tier gives the set of keys resident in it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
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
