"""Gives loads priority over stores at the disk, without ever starving stores.

The tier's job runner has the same rule for the batches that it begins (``JobRunner``). This one is
for each write: of batches that began before the load, several of which are in flight per
thread, and of reinserted blocks, which belong to no job.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class LoadPriority:
    """Starts loads at once, and lets only few stores run while a load is in flight.

    Requests wait for loads but not for stores. ``stores_beside_loads`` is the share that stores
    keep: under continuous loads they continue, that many at a time, in order of arrival. One
    thread, the event loop's.
    """

    def __init__(self, stores_beside_loads: int) -> None:
        self._stores_beside_loads = max(1, stores_beside_loads)
        self._loads = 0
        self._stores = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def load(self) -> Iterator[None]:
        """Hold back stores for as long as the load takes."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1
            self._wake()

    @asynccontextmanager
    async def store(self) -> AsyncIterator[None]:
        """Wait until a store may begin, and count it for as long as it takes."""
        await self._begin_store()
        try:
            yield
        finally:
            self._end_store()

    async def _begin_store(self) -> None:
        if self._may_store() and not self._waiting:
            self._stores += 1
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            if not woken.cancelled():
                self._end_store()  # it was woken already
            raise

    def _end_store(self) -> None:
        self._stores -= 1
        self._wake()

    def _may_store(self) -> bool:
        return self._loads == 0 or self._stores < self._stores_beside_loads

    def _wake(self) -> None:
        while self._waiting and self._may_store():
            woken = self._waiting.popleft()
            if not woken.done():  # else it was cancelled
                self._stores += 1
                woken.set_result(None)
