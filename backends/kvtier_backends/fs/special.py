"""What lies in a file's place and is none: it is named, and neither read nor waited for."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


class SpecialFile(OSError):
    """Raised for what lies in a block's place and is no file of bytes. The text says what it is."""


def refuse_special_file(descriptor: int, path: str) -> None:
    """Raise ``SpecialFile`` if what is open there is no file of bytes."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise special_file(mode, path)


def special_file(mode: int, path: str) -> SpecialFile:
    """Return the error for what is no file, given its mode."""
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    return SpecialFile(errno.ESPIPE, f"{kind} lies where a file should be", path)
