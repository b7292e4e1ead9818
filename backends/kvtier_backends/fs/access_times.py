"""Shows third-party cleaners which files are in use: a hit sets the file's access time.

Mounts rarely keep it themselves: ``noatime`` never does, and ``relatime``, the usual setting,
once a day. A cleaner that relies on it would remove the most-read files and keep unused ones.

The time is the server's: cleaners compare it with when other files were written. By the clock of a
host that is hours behind, a block that was just read would look hours old.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S: Final = 60.0
"""Minimum pause between two updates of a file: each costs a call; cleaners count in hours."""

_UTIME_NOW: Final = (1 << 30) - 1  # sys/stat.h
_UTIME_OMIT: Final = (1 << 30) - 2

FILES_MAX: Final = 1 << 16


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# os.utime can't keep the modification time and set the access time to "now".
_futimens: Final = ctypes.CDLL(None).futimens
_futimens.argtypes = (ctypes.c_int, ctypes.POINTER(_TimeSpec))
_READ_NOW: Final = (_TimeSpec * 2)(_TimeSpec(0, _UTIME_NOW), _TimeSpec(0, _UTIME_OMIT))


class AccessTimes:
    """Sets the access times of files that are read. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last_set: dict[int, float] = {}  # by a file name's hash, least recently hit first

    def note_hit(self, name: str, descriptor: int) -> None:
        """Set the time of an open file, unless it was set within a minute. Raises nothing.

        Another user's file, or one on a read-only mount, keeps its time. With ``relatime`` the
        kernel has set it at the first read since a write.
        """
        if not self._is_due(hash(name)):
            return
        try:
            read_ns = os.fstat(descriptor).st_atime_ns
        except OSError:
            return
        # If the local clock is not the server's, a time set a moment ago is set once more.
        if abs(time.time_ns() - read_ns) >= PAUSE_S * 1e9:
            _futimens(descriptor, _READ_NOW)

    def _is_due(self, file: int) -> bool:
        now_s = self._clock()
        with self._lock:
            last_s = self._last_set.pop(file, None)
            is_due = last_s is None or now_s - last_s >= PAUSE_S
            self._last_set[file] = now_s if last_s is None or is_due else last_s
            if len(self._last_set) > FILES_MAX:
                del self._last_set[next(iter(self._last_set))]
        return is_due
