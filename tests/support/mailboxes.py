"""Mailboxes that take the place of an actor's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.core.wire import Message


class KeptMessages:
    """A mailbox that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def post(self, message: Message) -> bool:
        """Take any number of messages."""
        self.messages.append(message)
        return True
