"""Passes notifications of requests to a request-scoped tier. Part of a link's actor."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import structs

from kvtier.core import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Mailbox
    from kvtier.plugin_api.keys import RequestId

    OfRequests: TypeAlias = (
        wire.RequestOpened | wire.RequestClosed | wire.PrefixHits | wire.BlocksMissing
    )


class RequestRelay:
    """Sends a tier what it is to know of requests, in order."""

    def __init__(self, number: int, tier: Mailbox, primary: Mailbox) -> None:
        """``number``: the tier's."""
        self._number = number
        self._tier = tier
        self._primary = primary
        self._unsent: deque[OfRequests] = deque()  # since the tier's mailbox was full
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
        """Pass on blocks that the tier wants, if of the generation that began at ``since``."""
        if message.since == since:
            self._primary.post(structs.replace(message, tier=self._number))
        else:
            self.send(wire.BlocksMissing(message.request, message.keys))

    def go_on(self) -> None:
        """Send the unsent messages, until the tier's mailbox is full."""
        while self._unsent and self._tier.post(self._unsent[0]):
            self._unsent.popleft()
