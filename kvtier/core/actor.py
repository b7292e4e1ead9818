"""Defines actors: a name, and a handler for each message type the actor understands.

An actor is a plain state machine. Its handlers change its state and send
messages; they never wait, lock, read a clock or do I/O. Which thread runs
them, and when, is its cell's business (``kvtier/engine/cell.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.wire import Message


class Mailbox(Protocol):
    """Destination of the messages for one actor."""

    def post(self, message: Message) -> bool:
        """Take the message for later delivery. Return False if full: the message is not taken."""
        ...


class Actor:
    """Base of all actors: dispatches on the message's type."""

    def __init__(self, name: str, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        self.name = name
        self.handlers = _Handlers(name, handlers)

    def receive(self, message: Message) -> None:
        """Handle one message, to completion."""
        self.handlers[type(message)](message)

    def stop(self) -> None:
        """Ignore every message from now on."""
        self.handlers = _Deaf(self.name, {})


class _Handlers(dict["type[Any]", "Callable[[Any], None]"]):
    """The handlers of one actor, by message type."""

    def __init__(self, name: str, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        super().__init__(handlers)
        self._name = name

    def __missing__(self, kind: type[Any]) -> Callable[[Any], None]:
        """Refuse a message that the actor has no handler for."""
        raise InternalError(f"{self._name} does not understand {kind.__name__}")


class _Deaf(_Handlers):
    """Handlers that do nothing, whatever the message."""

    def __missing__(self, kind: type[Any]) -> Callable[[Any], None]:
        """Ignore the message."""
        return lambda _message: None
