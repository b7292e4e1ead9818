"""Opens a folder's files, and only files: anything else under their names is never opened.

Opening a FIFO may wait forever, opening a device may do anything, and a link
leads out of the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from kvtier_backends.posix import kind_of_file, shared_mode

_OWN: Final = 0o600
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotAFile(OSError):
    """Raised for anything but a regular file. ``strerror`` names its kind."""

    def __init__(self, path: str, mode: int) -> None:
        text = f"{os.path.basename(path)} is {kind_of_file(mode)}, not a file"
        super().__init__(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENOTSUP, text, path)


def open_file(path: str, flags: int) -> int:
    """Return a descriptor of a regular file. Raises ``NotAFile`` and ``OSError``; never waits.

    A new file is for this user; the folder's group gets its rights on the folder.
    """
    mode = _OWN
    if flags & os.O_CREAT:
        mode = shared_mode(mode, os.stat(os.path.dirname(path)).st_mode)
    with suppress(FileNotFoundError):
        _check(path, os.lstat(path).st_mode)  # before: opening a device may do something
    descriptor = os.open(path, flags | _FLAGS, mode)
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_whatever(path: str) -> bool:
    """Remove whatever lies at a path, be it a file or not. Return False if there was nothing.

    A folder that is not empty is renamed: its contents are someone's. Raises ``OSError``.
    """
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(path)
            return True
    except FileNotFoundError:
        return False
    try:
        os.rmdir(path)
    except OSError:
        os.rename(path, f"{path}.moved-{os.urandom(4).hex()}")
    return True


def _check(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotAFile(path, mode)
