"""Calls fallocate(2) itself: reserves room in a file, or punches a hole in it.

Not ``posix_fallocate``: if a filesystem has no such call, the C library reads and writes a
byte of every page instead. That needs a readable descriptor, fails with EBADF without one,
costs forty writes for each of kvtier's, and reserves nothing on a filesystem that compresses.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_NOT_HERE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of filesystems that have no such call; Lustre's old releases return EINVAL."""

_fallocate: Final = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve(descriptor: int, at: int, size: int) -> OSError | None:
    """Reserve room for these bytes, and lengthen the file to hold them.

    Returns the error if the filesystem can't do that for any file. Raises ``OSError`` if full.
    """
    return _call(descriptor, 0, at, size)


def punch_hole(descriptor: int, at: int, size: int, path: str) -> OSError | None:
    """Zero these bytes, and free their room; the length stays. Errors as in ``reserve``.

    ``path`` is the file's, for the error.
    """
    return _call(descriptor, _PUNCH_HOLE | _KEEP_SIZE, at, size, path)


def _call(
    descriptor: int, mode: int, at: int, size: int, path: str | None = None
) -> OSError | None:
    while _fallocate(descriptor, mode, at, size):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        problem = OSError(number, os.strerror(number), path)
        if number in _NOT_HERE:
            return problem
        raise problem
    return None
