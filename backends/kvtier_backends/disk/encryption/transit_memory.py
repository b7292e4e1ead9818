"""Limits the memory for encrypted blocks on their way to or from the disk."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier_backends.encryption.cipher import BlockCipher

TRANSIT_BYTES_MAX: Final = 64 << 20
"""Encrypted blocks on their way, in each direction: eight calls of 8 MiB keep a disk busy."""


class TransitMemory:
    """Memory for the encrypted blocks of the calls in one direction, up to a limit.

    Calls wait for it in the order in which they came: more memory than the pool keeps would be
    touched anew each time, which takes longer than encrypting it. Event loop only.
    """

    def __init__(self, cipher: BlockCipher) -> None:
        self._cipher = cipher
        self._borrowed_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def borrow(self, blocks: int) -> AsyncIterator[list[memoryview]]:
        """Yield memory for each of so many blocks, once there is room.

        A call that is larger than the limit waits until nothing else is lent.
        """
        size = blocks * self._cipher.borrowed_bytes
        await self._reserve(size)
        try:
            memory = [self._cipher.borrow() for _ in range(blocks)]
            yield memory
            for each in memory:  # not after an error: threads may still use it
                self._cipher.give_back(each)
        finally:
            self._borrowed_bytes -= size
            self._wake()

    async def _reserve(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._borrowed_bytes += size
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, woken))
        try:
            await woken
        except asyncio.CancelledError:
            if not woken.cancelled():
                self._borrowed_bytes -= size  # it was woken already
            self._wake()
            raise

    def _fits(self, size: int) -> bool:
        return not self._borrowed_bytes or self._borrowed_bytes + size <= TRANSIT_BYTES_MAX

    def _wake(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            size, woken = self._waiting.popleft()
            if not woken.done():  # else it was cancelled
                self._borrowed_bytes += size
                woken.set_result(None)
