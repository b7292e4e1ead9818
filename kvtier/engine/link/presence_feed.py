"""Publishes changes of a tier's contents: to the primary tier, and as KV events.

Part of a link's actor. Changes of a generation that the engine has left are dropped: they do not
show which blocks can be found now. Blocks that others may evict are assumed present for a limited
time only, then looked up again.

A purge, an expiry or a folder that vanished removes hundreds of thousands of blocks at once. A step
reports some of them. The rest waits, and so does every later change behind it. Otherwise a block
that is stored again meanwhile would end up counted as gone, or the reverse.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.events import EventKind, EventLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.core.events import Event
    from kvtier.engine.link.tier_health import ServerConnection
    from kvtier.engine.link.waiting_probes import Probe
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key

GONE_A_STEP: Final = 1024
"""Limit on removed blocks reported in a step, plus the rest of a message: some milliseconds,
with all the work that follows."""


class _Change(NamedTuple):
    """Blocks a tier has gained or lost. ``learned``: the message for the primary tier."""

    added: Sequence[Key]
    removed: Sequence[Key]
    learned: m.PresenceLearned | None


class PresenceFeed:
    """The presence feed of one tier."""

    def __init__(
        self,
        number: int,
        connection: ServerConnection,
        primary: Mailbox,
        *,
        keys_max: int,
        collects: bool,
    ) -> None:
        """``number``: the tier's. ``keys_max``: limit on keys assumed present for a time."""
        self._number = number
        self._connection = connection
        self._primary = primary
        self._events = EventLog(number, collects=collects)
        self._presence = FadingPresence(keys_max)
        self._tells_by_itself = False  # the backend reports the blocks it gains and loses
        self.is_shared = True  #: whether all requests find the same blocks in the tier
        self.since = 0  #: the epoch in which the generation began
        self._now = 0.0
        self._untold: deque[_Change] = deque()  # oldest first
        self.gone_a_step = self._gone_left = GONE_A_STEP

    def set_traits(self, traits: BackendTraits) -> None:
        """Apply the traits of the tier's backend."""
        self._tells_by_itself = traits.capacity_blocks is not None
        self.is_shared = not traits.request_scoped
        if not self._tells_by_itself:
            self._events.tell_once()
        self._presence.last(traits.presence_ttl_s)

    def begin_generation(self, since: int) -> None:
        """Note that no block from before can be found again."""
        self.since = since
        self._presence.forget()
        self.cleared()

    def cleared(self) -> None:
        """Report that no block can be found in the tier for now."""
        self._untold.clear()
        self._events.add(EventKind.CLEARED)

    @property
    def untold(self) -> int:
        """How many changes wait for a later step."""
        return len(self._untold)

    def drain_events(self) -> list[Event]:
        """Return the events since the last call."""
        return self._events.drain()

    def changed(self, message: wire.PresenceChanged) -> None:
        """Pass on changes that the tier reports by itself."""
        if message.since == self.since:
            self._learned(message.added, message.removed, for_room=message.for_room)

    def stored(self, keys: tuple[Key, ...], epoch: int) -> None:
        """Note the blocks that the tier has stored, which were sent in that epoch."""
        if keys and epoch >= self.since and self.is_shared:
            self._learned(keys, ())

    def answered(self, probe: Probe, present: Sequence[bool]) -> None:
        """Use a probe's answer for the tier's contents, even if no request waits for it."""
        if probe.since != self.since or self._tells_by_itself or not self.is_shared:
            return
        answers = list(zip(probe.keys, present, strict=True))
        there = tuple(key for key, is_there in answers if is_there)
        learned = None
        if there and not probe.is_awaited:
            learned = m.PresenceLearned(self._number, there, (), self.since)
        if learned or self._events.collects:
            gone = [key for key, is_there in answers if not is_there]
            self._tell_in_turn(_Change(there, gone, learned))

    def pass_time(self, now: float) -> None:
        """Report more waiting changes, and stop assuming blocks that others may have evicted.

        No KV event reports the latter.
        """
        self._now = now
        self._gone_left = self.gone_a_step
        while self._untold and self._gone_left > 0:
            self._tell(self._untold.popleft())
        faded = self._presence.pop_faded(now, self.gone_a_step)
        if faded:
            self._primary.post(m.PresenceLearned(self._number, (), faded, self.since))

    def on_server_lost(self) -> None:
        """Forget the tier's contents if the server may have been restarted empty."""
        if not self._tells_by_itself:
            self.cleared()
            self.forget()

    def forget(self) -> None:
        """Assume none of the tier's earlier contents; blocks are probed for again."""
        self._presence.forget()
        self._primary.post(m.TierForgotten(tier=self._number))

    def _learned(
        self, added: tuple[Key, ...], removed: tuple[Key, ...], *, for_room: bool = False
    ) -> None:
        if not (self._connection.is_up or self._tells_by_itself):
            added = ()  # stored before the server was lost, perhaps with its contents
        learned = m.PresenceLearned(self._number, added, removed, self.since, for_room)
        self._tell_in_turn(_Change(added, removed, learned))

    def _tell_in_turn(self, change: _Change) -> None:
        if self._untold or self._gone_left <= 0:
            self._untold.append(change)
        else:
            self._tell(change)

    def _tell(self, change: _Change) -> None:
        added, removed, learned = change
        if learned is not None:
            self._primary.post(learned)
            self._presence.learn(learned.added, self._now)
        if added:
            self._events.add(EventKind.STORED, added)
        if removed:
            self._gone_left -= len(removed)
            self._events.add(EventKind.REMOVED, removed)


class FadingPresence:
    """Tracks the blocks that are assumed to be in a tier, each for ``presence_ttl_s``."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._presence_s: float | None = None
        self._learned: deque[tuple[float, tuple[Key, ...]]] = deque()
        self._count = 0

    def last(self, seconds: float | None) -> None:
        """Assume presence for this long from now on; None: permanently."""
        self._presence_s = seconds

    def learn(self, keys: tuple[Key, ...], now: float) -> None:
        """Note that these blocks are in the tier now."""
        if self._presence_s is not None and keys:
            self._learned.append((now + self._presence_s, keys))
            self._count += len(keys)

    def pop_faded(self, now: float, at_once: int) -> tuple[Key, ...]:
        """Return the keys to look up again: learned too long ago, or more than can be kept.

        About ``at_once`` at most: the others come with the next call. Keys that were learned again
        meanwhile are included: another lookup is harmless.
        """
        faded: list[Key] = []
        while self._learned and (self._learned[0][0] <= now or self._count > self._keys_max):
            if len(faded) >= at_once:
                break
            _, keys = self._learned.popleft()
            self._count -= len(keys)
            faded.extend(keys)
        return tuple(faded)

    def forget(self) -> None:
        """Assume nothing about the tier's blocks any more."""
        self._learned.clear()
        self._count = 0
