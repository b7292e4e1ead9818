"""A real filesystem that runs out of room when it is told to: in memory, mounted over a folder.

It is full at the moments at which a real one is: in the midst of a write, with the first block of
a new folder, or not at all, if what is removed meanwhile was enough.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Final

from stress.filesystem.fuse_folder import LIBC, MNT_DETACH
from stress.supervisor import mount_source

if TYPE_CHECKING:
    from pathlib import Path

ROOM_BYTES: Final = 256 << 20  #: that there are, beside what is used, when nothing is wrong
ROOM_FILES: Final = 1 << 20
_MS_REMOUNT: Final = 32  # sys/mount.h
_TRIES_MAX: Final = 20


class Volume:
    """The filesystem. One thread. Needs root."""

    def __init__(self, path: Path) -> None:
        """Mount it over an empty folder."""
        self._path = path
        self._source = os.fsencode(mount_source(os.getpid()))
        self._mount(0, f"mode=0700,size={ROOM_BYTES},nr_inodes={ROOM_FILES}")

    def leave(self, *, room_bytes: int = ROOM_BYTES, files: int = ROOM_FILES) -> None:
        """Have room for so much more than there is now, and no more. Nothing is lost."""
        for tries_left in reversed(range(_TRIES_MAX)):
            now = os.statvfs(self._path)
            size = (now.f_blocks - now.f_bfree) * now.f_frsize + room_bytes
            inodes = now.f_files - now.f_ffree + files
            try:
                self._mount(_MS_REMOUNT, f"size={size},nr_inodes={inodes}")
            except OSError as problem:
                # More may be used by now: less than that is refused.
                if problem.errno != errno.EINVAL or not tries_left:
                    raise
            else:
                return

    def unmount(self) -> None:
        """Take it away, with all that is in it."""
        LIBC.umount2(os.fsencode(self._path), MNT_DETACH)

    def _mount(self, flags: int, options: str) -> None:
        path = os.fsencode(self._path)
        if LIBC.mount(self._source, path, b"tmpfs", flags, options.encode()):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {options}", str(self._path))
