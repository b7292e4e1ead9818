"""What lies in a file's place and is none: it is named, and neither read nor waited for."""

from __future__ import annotations

import errno
import os
import stat

from kvtier_backends.posix import kind_of_file


class SpecialFile(OSError):
    """Raised for what lies in a block's place and is no file of bytes. The text says what it is."""


def refuse_special_file(descriptor: int, path: str) -> None:
    """Raise ``SpecialFile`` if what is open there is no file of bytes."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise special_file(mode, path)


def special_file(mode: int, path: str) -> SpecialFile:
    """Return the error for what is no file, given its mode."""
    return SpecialFile(errno.ESPIPE, f"{kind_of_file(mode)} lies where a file should be", path)
