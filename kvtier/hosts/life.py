"""Defines the life of a tier's host, as a table that both kinds of host move by.

Purpose of the machine: a backend's thread may hang in the kernel while it holds a slot, and neither
a thread nor a process in such a call can be ended. So three events are separate, possibly by hours:
a tier breaks; nothing of it can touch a slot any more; a new cell serves.

Coupling with others: the link disables the tier's breakers when it breaks (``TierBroke``),
takes back every slot once it is fenced (``TierFenced``), and trusts it again when a new cell serves
(``TierRestarted``).

A host carries one cell after the other. While one serves, messages are accepted for
it. When it breaks, the tier is disabled, and the next cell must wait: threads of the
broken one may still read or write slots. Once none can (the tier is *fenced*), a
backend is made, and a new cell opens it.

Not in the table: a host moves on ``FENCED`` when no thread of the broken cell can touch
a slot, and never because time has passed. A failed attempt at a new cell counts as a cell that
broke. A host can be told to end in any state.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping


class LifeState(IntEnum):
    """State of a tier's cells."""

    SERVING = 0  #: a cell runs, or is about to; its messages are accepted
    BROKEN = 1  #: the cell broke, but may still touch a slot
    AWAY = 2  #: nothing of the tier can touch a slot; a backend is made, or will be
    REOPENING = 3  #: a new cell opens its backend
    ENDING = 4  #: running work is ended, and no cell will follow
    ENDED = 5  #: nothing of the tier can touch a slot any more


class LifeEvent(IntEnum):
    """Event that moves a host."""

    BROKE = 0  #: the cell, or an attempt at the next one
    FENCED = 1
    MADE = 2  #: a backend for a new cell
    OPENED = 3
    ASKED_TO_END = 4
    ALL_GONE = 5  #: the last cell's threads, or its process


LIFE_TABLE: Final[Mapping[tuple[LifeState, LifeEvent], LifeState]] = {
    (LifeState.SERVING, LifeEvent.BROKE): LifeState.BROKEN,
    (LifeState.SERVING, LifeEvent.ASKED_TO_END): LifeState.ENDING,
    (LifeState.BROKEN, LifeEvent.BROKE): LifeState.BROKEN,
    (LifeState.BROKEN, LifeEvent.FENCED): LifeState.AWAY,
    (LifeState.BROKEN, LifeEvent.ASKED_TO_END): LifeState.ENDING,
    (LifeState.AWAY, LifeEvent.BROKE): LifeState.BROKEN,
    (LifeState.AWAY, LifeEvent.MADE): LifeState.REOPENING,
    (LifeState.AWAY, LifeEvent.ASKED_TO_END): LifeState.ENDED,
    (LifeState.REOPENING, LifeEvent.BROKE): LifeState.BROKEN,
    (LifeState.REOPENING, LifeEvent.OPENED): LifeState.SERVING,
    (LifeState.REOPENING, LifeEvent.ASKED_TO_END): LifeState.ENDING,
    (LifeState.ENDING, LifeEvent.BROKE): LifeState.ENDING,
    (LifeState.ENDING, LifeEvent.FENCED): LifeState.ENDING,
    (LifeState.ENDING, LifeEvent.OPENED): LifeState.ENDING,
    (LifeState.ENDING, LifeEvent.ASKED_TO_END): LifeState.ENDING,
    (LifeState.ENDING, LifeEvent.ALL_GONE): LifeState.ENDED,
    (LifeState.ENDED, LifeEvent.BROKE): LifeState.ENDED,
    (LifeState.ENDED, LifeEvent.FENCED): LifeState.ENDED,
    (LifeState.ENDED, LifeEvent.MADE): LifeState.ENDED,
    (LifeState.ENDED, LifeEvent.ASKED_TO_END): LifeState.ENDED,
    (LifeState.ENDED, LifeEvent.ALL_GONE): LifeState.ENDED,
}


class Life:
    """State of one host's life. Any thread; its owner guards what must not move meanwhile.

    It begins SERVING, or AWAY if there is no backend yet.
    """

    def __init__(self, *, has_backend: bool) -> None:
        self.state = LifeState.SERVING if has_backend else LifeState.AWAY
        self.ending = threading.Event()  #: set permanently once the host was asked to end
        self.reason: str | None = None  #: why the tier is disabled; None while it serves
        self._moving = threading.Lock()

    def move(self, event: LifeEvent) -> LifeState:
        """Return the state after an event. Raises ``InternalError`` if there is no such row."""
        with self._moving:
            to = LIFE_TABLE.get((self.state, event))
            if to is None:
                raise InternalError(f"host in state {self.state.name} cannot be {event.name}")
            self.state = to
            if event is LifeEvent.ASKED_TO_END:
                self.ending.set()
            elif event is LifeEvent.OPENED:
                self.reason = None
        return to

    def begin_away(self, reason: str) -> None:
        """Note why there is no backend yet."""
        self.reason = reason

    def broke(self, reason: str) -> bool:
        """Move, and return whether the reason is new: an unchanged one is not logged again."""
        self.move(LifeEvent.BROKE)
        is_news = reason != self.reason
        self.reason = reason
        return is_news

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the tier can touch a slot any more, permanently."""
        return self.state is LifeState.ENDED

    @property
    def accepts_messages(self) -> bool:
        """Whether the tier's actor accepts messages."""
        return self.state is LifeState.SERVING
