"""Pools page-aligned memory for blocks in transit, so that it is touched once and reused."""

from __future__ import annotations

import mmap
import threading
from typing import Final

from kvtier_backends.posix import PAGE_BYTES

_KEPT_MIN: Final = 16
KEPT_BYTES_MAX: Final = 64 << 20
"""A pool keeps this much memory by default, and a few pieces of any size."""


class MemoryPool:
    """Pieces of memory for one block each. Any thread may call any method.

    Touching new memory takes as long as encrypting it. Pieces for several blocks, of a size for
    each power of two, were often missing in the size that was wanted.
    """

    def __init__(self, block_bytes: int, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        # A page behind the block: room for a tag.
        self.step: Final = (block_bytes // PAGE_BYTES + 2) * PAGE_BYTES
        self._kept_max = max(_KEPT_MIN, kept_bytes_max // self.step)
        self._kept: list[memoryview] = []
        self._lock = threading.Lock()

    def borrow(self) -> memoryview:
        """Return page-aligned memory of ``step`` bytes."""
        with self._lock:
            if self._kept:
                return self._kept.pop()  # given back last: it may still be in a cache
        return memoryview(mmap.mmap(-1, self.step))

    def give_back(self, memory: memoryview) -> None:
        """Keep borrowed memory for the next ``borrow``. Nothing may read or write it any more."""
        whole = memoryview(memory.obj)
        with self._lock:
            if len(self._kept) < self._kept_max:
                self._kept.append(whole)
