"""Maintains a folder's superblock while an engine runs: without it, a folder is unrecognizable.

A folder that returns on another filesystem is recognized only by its superblock, and an engine
that starts in a folder without one starts empty. So an engine that has it in memory writes it
again if it was deleted or damaged.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvtier_backends.disk.folder.claim import SUPERBLOCK_NAME, write_superblock
from kvtier_backends.disk.format import encode_superblock
from kvtier_backends.disk.opened_files import NotAFile, open_file

if TYPE_CHECKING:
    from kvtier_backends.disk.folder.claim import Claim
    from kvtier_backends.disk.format import Superblock


class SuperblockCopy:
    """The expected superblock of a claimed folder. One thread at a time."""

    def __init__(self, claim: Claim, superblock: Superblock) -> None:
        self.folder_id = superblock.folder_id
        self._claim = claim
        self._superblock = superblock
        self._sound: tuple[int, ...] = ()  # identifies the file that was read and found sound

    def restore(self) -> bool:
        """Write the superblock again if it has changed. Return whether it had.

        Writes to the claimed folder or nowhere, wherever its path leads now.
        Blocks, and raises ``OSError``.
        """
        folder = os.open(self._claim.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{folder}"
            if not self._claim.is_in(path) or self._is_sound(f"{path}/{SUPERBLOCK_NAME}"):
                return False
            write_superblock(path, self._superblock)
            return True
        finally:
            os.close(folder)

    def _is_sound(self, path: str) -> bool:
        """Return whether both copies are intact. Reads them only if the file has changed."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return False
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if seen == self._sound:
            return True
        try:
            descriptor = open_file(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except NotAFile:  # someone else's; the next start reports it
            return True
        wanted = encode_superblock(self._superblock) * 2
        try:
            is_sound = os.pread(descriptor, len(wanted) + 1, 0) == wanted
        finally:
            os.close(descriptor)
        if is_sound:
            self._sound = seen
        return is_sound
