"""Stands where a tier's link is: what its cell reports, in order."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

from kvtier.core import wire
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from kvtier.core.wire import Message

BLOCK = 4096


class LinkEnd:
    """Stands where the link's inbox is."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Message] = queue.Queue()
        self.counted: queue.Queue[wire.Counted] = queue.Queue()  # comes between all others
        self.opened = 0

    def post(self, message: Message) -> bool:
        if isinstance(message, wire.Counted):
            self.counted.put(message)
        elif isinstance(message, wire.TierOpened):
            self.opened += 1
        else:
            self._messages.put(message)
        return True

    def next(self) -> Any:
        return self._messages.get(timeout=PATIENCE_S)

    def is_empty(self) -> bool:
        return self._messages.empty()
