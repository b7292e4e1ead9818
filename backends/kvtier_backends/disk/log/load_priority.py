"""Whose turn it is at the disk: loads go before stores, and stores are never starved."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Turns:
    """A load begins at once. While one is under way, few stores are: the rest waits.

    Somebody waits for a load, and nobody for a store. ``stores_beside_loads`` is
    the share that stores keep: under loads without end they go on, that many at
    a time, in the order they came. One thread, the event loop's.
    """

    def __init__(self, stores_beside_loads: int) -> None:
        self._stores_beside_loads = max(1, stores_beside_loads)
        self._loads = 0
        self._stores = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def load(self) -> Iterator[None]:
        """Hold stores back for as long as the load takes."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1
            self._let_go_on()

    @asynccontextmanager
    async def store(self) -> AsyncIterator[None]:
        """Wait for a turn, and keep it for as long as the store takes."""
        await self._turn()
        try:
            yield
        finally:
            self._end_store()

    async def _turn(self) -> None:
        if self._may_store() and not self._waiting:
            self._stores += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._end_store()  # it was this one's turn already
            raise

    def _end_store(self) -> None:
        self._stores -= 1
        self._let_go_on()

    def _may_store(self) -> bool:
        return self._loads == 0 or self._stores < self._stores_beside_loads

    def _let_go_on(self) -> None:
        while self._waiting and self._may_store():
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                self._stores += 1
                turn.set_result(None)
