"""Tracks the connection between a tier's backend and its server, for the tier's link.

A backend that needs a server reports the state of its connection. While it has none, the link
gives the tier nothing to do. This complements the circuit breaker, which detects a sick tier by
failures only, one deadline after the other. A backend that reports nothing has no
server, and counts as connected.

Blocks that others may evict there are assumed present for ``BackendTraits.presence_ttl_s``,
then looked up again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.plugin_api.backend import Connection

if TYPE_CHECKING:
    from kvtier.core.actor import Mailbox
    from kvtier.plugin_api.keys import Key


class ServerConnection:
    """The connection of one tier's backend. Its notices go to ``log``."""

    def __init__(self, tier_name: str, log: Mailbox) -> None:
        self.state = Connection.UP
        self._has_reported = False
        self._tier_name = tier_name
        self._log = log

    @property
    def is_up(self) -> bool:
        """Whether the tier may be given work."""
        return self.state is Connection.UP

    def change(self, state: Connection) -> bool:
        """Apply the state that the backend reports; return whether it has changed."""
        self._has_reported = True
        was, self.state = self.state, state
        if state is was:
            return False
        if state is Connection.GONE:
            self._say("tier lost its server", "warning")
        if state is Connection.UP:
            is_first = was is Connection.CONNECTING  # no fault has ended
            self._say("tier has reached its server", "info" if is_first else "warning")
        return True

    def set_connects(self, *, connects: bool) -> None:
        """Note whether the backend needs a server. It may have reported its state already."""
        if connects and not self._has_reported:
            self.state = Connection.CONNECTING

    def restart(self) -> None:
        """Note that the backend is gone, and that another will follow."""
        self.state = Connection.UP
        self._has_reported = False

    def _say(self, event: str, level: m.NoticeLevel) -> None:
        self._log.post(m.Notice(event=event, tier=self._tier_name, detail="", level=level))


class FadingPresence:
    """Tracks the blocks that are assumed to be in a tier, each for a limited time."""

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
