"""Sees to it that an actor handles each message that it is given once.

A handler that waits for something leaves a message of its own for what is to be done then;
it is not run a second time, as what it counts and notes would be counted and noted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message

HANDLED_MAX = 1000


def watch(actor: Actor) -> dict[int, Message]:
    """Have a second handling of any message fail; return those that were handled lately.

    They are kept here, so that no other message has the same address.
    """
    handled: dict[int, Message] = {}

    def once(handle: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle_once(message: Message) -> None:
            assert id(message) not in handled, f"{actor.name} handles twice: {message}"
            if len(handled) >= HANDLED_MAX:
                del handled[next(iter(handled))]
            handled[id(message)] = message
            handle(message)

        return handle_once

    for kind, handle in actor.handlers.items():
        actor.handlers[kind] = once(handle)
    return handled
