"""Tracks the views of slots that the library's threads may still read after their call has ended.

The library keeps a view exported for as long as it may read it, and an exported view can't be
released: so an attempt to release it shows whether it is still in use.
"""

from __future__ import annotations

import threading


class LentBuffers:
    """Counts the lent views. Any thread may call ``count``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: list[memoryview] = []

    def lend(self, buffer: memoryview) -> memoryview:
        """Return a view of the buffer for one call of the library. Give it back afterwards."""
        return buffer.toreadonly()

    def give_back(self, view: memoryview) -> None:
        """Take back a view after its call has ended in any way."""
        if not _is_released(view):
            with self._lock:
                self._lent.append(view)

    def count(self) -> int:
        """Return how many views may still be read although their call has ended."""
        if not self._lent:
            return 0
        with self._lock:
            self._lent = [view for view in self._lent if not _is_released(view)]
            return len(self._lent)


def _is_released(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True
