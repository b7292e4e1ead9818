"""The views of slots that the library's threads may still read, after their call has ended too.

The library keeps a view exported for as long as it may read it, and a view that is exported
can't be released: so trying to release it tells.
"""

from __future__ import annotations

import threading


class LentBuffers:
    """Counts the views that are lent. Any thread may call ``count``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: list[memoryview] = []

    def lend(self, buffer: memoryview) -> memoryview:
        """Return a view of the buffer for one call of the library. Give it back afterwards."""
        return buffer.toreadonly()

    def give_back(self, view: memoryview) -> None:
        """Take a view back whose call has ended, however it has ended."""
        if not _is_released(view):
            with self._lock:
                self._lent.append(view)

    def count(self) -> int:
        """Return how many views may still be read though their call has ended."""
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
