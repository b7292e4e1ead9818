"""What a tier's link knows of the connection between its backend and a server.

A backend that needs a server reports how it stands with it. While it has none, the link
gives the tier nothing to do: beside the circuit breaker, which learns of a sick tier by
failures only, and one deadline after the other. A backend that reports nothing has no
server, and counts as connected.

Blocks that others may evict there are believed in for a while (``BackendTraits.presence_ttl_s``),
and asked for again after that.
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
    """The connection of one tier's backend. What a person should read of it goes to ``log``."""

    def __init__(self, tier_name: str, log: Mailbox) -> None:
        self.state = Connection.UP
        self._has_reported = False
        self._tier_name = tier_name
        self._log = log

    @property
    def is_up(self) -> bool:
        """Whether the tier may be given anything."""
        return self.state is Connection.UP

    def change(self, state: Connection) -> bool:
        """Take in what the backend reports; tell whether that is news."""
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
        """Note whether the backend needs a server. It may have reported how it stands with it."""
        if connects and not self._has_reported:
            self.state = Connection.CONNECTING

    def restart(self) -> None:
        """Note that the backend is gone, and that another one will follow."""
        self.state = Connection.UP
        self._has_reported = False

    def _say(self, event: str, level: m.NoticeLevel) -> None:
        self._log.post(m.Notice(event=event, tier=self._tier_name, detail="", level=level))


class FadingPresence:
    """Which blocks are believed to be in a tier, for a while only."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._presence_s: float | None = None
        self._learned: deque[tuple[float, tuple[Key, ...]]] = deque()
        self._count = 0

    def last(self, seconds: float | None) -> None:
        """Believe for so long from now on; None: for good."""
        self._presence_s = seconds

    def learn(self, keys: tuple[Key, ...], now: float) -> None:
        """Note that these are there now."""
        if self._presence_s is not None and keys:
            self._learned.append((now + self._presence_s, keys))
            self._count += len(keys)

    def pop_faded(self, now: float, at_once: int) -> tuple[Key, ...]:
        """Return what is to be asked for again: learned too long ago, or more than can be kept.

        About ``at_once`` at most: the others come with the next call. What has been learned again
        meanwhile is among it: to ask once more is harmless.
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
        """Note that nothing is believed of the tier any more."""
        self._learned.clear()
        self._count = 0
