"""Limits the memory for encrypted blocks on their way to or from the disk."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier_backends.encryption.cipher import BlockCipher

TRANSIT_BYTES_MAX: Final = 64 << 20
"""Encrypted blocks on their way, in each direction: eight calls of 8 MiB keep a disk busy."""


class TransitMemory:
    """Memory for the encrypted blocks of the calls in one direction, up to a limit.

    Calls wait for it in order of arrival: memory beyond what the pool keeps would be faulted in
    again each time, which takes longer than encrypting a block. Event loop only.
    """

    def __init__(self, cipher: BlockCipher) -> None:
        self._cipher = cipher
        self._borrowed_bytes = 0
        self._turn = asyncio.Lock()  # of the call that waits for room: it is fair
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def borrow(self, blocks: int) -> AsyncIterator[list[memoryview]]:
        """Yield memory for each of ``count`` blocks, once there is room.

        A call that is larger than the limit waits until nothing else is lent.
        """
        size = blocks * self._cipher.borrowed_bytes
        async with self._turn:
            while self._borrowed_bytes and self._borrowed_bytes + size > TRANSIT_BYTES_MAX:
                self._given_back.clear()
                await self._given_back.wait()
            self._borrowed_bytes += size
        try:
            memory = [self._cipher.borrow() for _ in range(blocks)]
            yield memory
            for each in memory:  # not after an error: threads may still use it
                self._cipher.give_back(each)
        finally:
            self._borrowed_bytes -= size
            self._given_back.set()
