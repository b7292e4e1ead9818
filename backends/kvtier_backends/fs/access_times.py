"""Tells cleaners of others which files are in use: a hit sets the file's access time.

Mounts rarely keep it by themselves: ``noatime`` never does, ``relatime``, which is usual, once
a day. A cleaner that goes by it would remove what is read most, and keep what nobody wants.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S: Final = 60.0
"""A file's time is set so often at most: it costs a call, and cleaners reckon in hours."""

FILES_MAX: Final = 1 << 16


class AccessTimes:
    """Sets the access times of files that are read. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last_set: dict[int, float] = {}  # by the hash of a file's name, the oldest first

    def note_hit(self, name: str, descriptor: int) -> None:
        """Set the time of an open file, if that is not a minute ago. Raises nothing.

        Another user's file, or one on a read-only mount, keeps the time that it has. With
        ``relatime`` the kernel has set it at the first read since a write.
        """
        if not self._is_due(hash(name)):
            return
        try:
            status, now_ns = os.fstat(descriptor), time.time_ns()
            # A server's clock may be ahead of this one's: then its time tells nothing.
            if abs(now_ns - status.st_atime_ns) >= PAUSE_S * 1e9:
                os.utime(descriptor, ns=(now_ns, status.st_mtime_ns))
        except OSError:
            return

    def _is_due(self, file: int) -> bool:
        now_s = self._clock()
        with self._lock:
            last_s = self._last_set.pop(file, None)
            is_due = last_s is None or now_s - last_s >= PAUSE_S
            self._last_set[file] = now_s if last_s is None or is_due else last_s
            if len(self._last_set) > FILES_MAX:
                del self._last_set[next(iter(self._last_set))]
        return is_due
