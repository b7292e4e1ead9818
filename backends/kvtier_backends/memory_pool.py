"""Pools page-aligned memory for blocks in transit, so that it is touched once and reused."""

from __future__ import annotations

import mmap
import threading
from typing import Final

from kvtier_backends.posix import PAGE_BYTES

_POOL_MIN: Final = 16
_POOL_BYTES_MAX: Final = 64 << 20
"""The pool keeps this much memory in any number of pieces, and a few pieces of any size."""


class MemoryPool:
    """Pieces of memory for one block or several. Any thread may call any method."""

    def __init__(self, block_bytes: int) -> None:
        # A page between any two blocks: room for a tag, and the next one is aligned again.
        self.step: Final = (block_bytes // PAGE_BYTES + 2) * PAGE_BYTES
        self._pieces: list[memoryview] = []  # the last one given back comes first
        self._bytes = 0
        self._lock = threading.Lock()

    def borrow(self, blocks: int) -> memoryview:
        """Return page-aligned memory for this many blocks or more, ``step`` bytes each."""
        # Touching new memory takes as long as encrypting it: few sizes, so that it is reused.
        size = self.step << max(0, blocks - 1).bit_length()
        with self._lock:
            for place, memory in enumerate(self._pieces):
                if len(memory) == size:
                    self._bytes -= size
                    return self._pieces.pop(place)
        return memoryview(mmap.mmap(-1, size))

    def give_back(self, memory: memoryview) -> None:
        """Keep borrowed memory for the next ``borrow``. Nothing may read or write it any more."""
        whole = memoryview(memory.obj)
        with self._lock:
            self._pieces.insert(0, whole)
            self._bytes += len(whole)
            while len(self._pieces) > _POOL_MIN and self._bytes > _POOL_BYTES_MAX:
                self._bytes -= len(self._pieces.pop())
