"""Refuses special files in a file's place: they are named in the error, never read or awaited."""

from __future__ import annotations

import errno
import os
import stat

from kvtier_backends.posix import kind_of_file


class SpecialFile(OSError):
    """Raised if a block's place holds something other than a regular file. The text names it."""


def refuse_special_file(descriptor: int, path: str) -> None:
    """Raise ``SpecialFile`` if the descriptor is not of a regular file."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise special_file(mode, path)


def special_file(mode: int, path: str) -> SpecialFile:
    """Return the error for something that is not a file, given its mode."""
    return SpecialFile(errno.ESPIPE, f"{kind_of_file(mode)} lies where a file should be", path)
