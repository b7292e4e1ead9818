"""Relays notices that the link itself does not need: of requests, and of the use of blocks.

Part of a link's actor.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec import structs

from kvtier.core import wire
from kvtier.core.policy_actor import POLICY_TIME_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Mailbox
    from kvtier.plugin_api.keys import RequestId

    OfRequests: TypeAlias = (
        wire.RequestOpened | wire.RequestClosed | wire.PrefixHits | wire.BlocksMissing
    )

SEND_S: Final = 0.1
"""Minimum time between two ticks that send notices of use."""


class RequestRelay:
    """Sends a request-scoped tier the notices about its requests, in order."""

    def __init__(self, number: int, tier: Mailbox, primary: Mailbox) -> None:
        """``number``: the tier's."""
        self._number = number
        self._tier = tier
        self._primary = primary
        self._unsent: deque[OfRequests] = deque()  # until the tier's mailbox has room
        self._peers: dict[RequestId, str] = {}  # of the open requests that name one

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return the handler of each message type that the link delegates to this."""
        return dict.fromkeys(
            (wire.RequestOpened, wire.RequestClosed, wire.PrefixHits, wire.BlocksMissing), self.send
        )

    def send(self, message: OfRequests) -> None:
        """Notify the tier, as soon as its mailbox has room."""
        if isinstance(message, wire.RequestClosed):
            self._peers.pop(message.request, None)
            about = [each for each in self._unsent if each.request == message.request]
            if about and isinstance(about[0], wire.RequestOpened):  # the tier knows nothing of it
                # So a tier that takes none for hours has notices of running requests only.
                self._unsent = deque(each for each in self._unsent if each not in about)
                return
        elif isinstance(message, wire.RequestOpened) and message.peer:
            self._peers[message.request] = message.peer
        self._unsent.append(message)
        self.go_on()

    def peer_of(self, request: RequestId) -> str:
        """Return the address that a request loads from; empty: it names none, or is over."""
        return self._peers.get(request, "")

    @property
    def has_unsent(self) -> bool:
        """Whether some messages have not fitted into the tier's mailbox yet."""
        return bool(self._unsent)

    def want(self, message: wire.BlocksWanted, since: int) -> None:
        """Request blocks that the tier wants, if of the generation that began at ``since``."""
        if message.since == since:
            self._primary.post(structs.replace(message, tier=self._number))
        else:
            self.send(wire.BlocksMissing(message.request, message.keys))

    def go_on(self) -> None:
        """Send the unsent messages, until the tier's mailbox is full."""
        while self._unsent and self._tier.post(self._unsent[0]):
            self._unsent.popleft()


class AccessRelay:
    """Notifies a tier that evicts of the use of its blocks.

    Notices are collected, and sent before the next store, which may evict; otherwise with a tick,
    every ``SEND_S`` or so: with each tick, they would cost most steps a system call, some 15 us.
    """

    def __init__(self, tier: Mailbox) -> None:
        self._tier = tier
        self._unsent: list[wire.TouchKeys | wire.RequestEnded] = []
        self._told_time = 0.0  # the last time sent to the tier's policy
        self._next_s = -math.inf  # no tick sends anything before this

    def add(self, use: wire.TouchKeys | wire.RequestEnded) -> None:
        """Collect a notice until it is sent."""
        self._unsent.append(use)

    def tick(self, now: float) -> None:
        """Send the collected notices, unless some were sent recently."""
        if now >= self._next_s:
            self.send(now)

    def send(self, now: float) -> None:
        """Send the notices. They are dropped if the mailbox is full: the tier then evicts worse."""
        if not self._unsent:
            return
        self._next_s = now + SEND_S
        if now - self._told_time >= POLICY_TIME_S:
            self._told_time = now
            self._tier.post(wire.Tick(now=now))
        for use in self._unsent:
            self._tier.post(use)
        self._unsent.clear()
