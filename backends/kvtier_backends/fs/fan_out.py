"""Opens and creates the two nested folders of a block, ``hhh/hh``, below an open folder."""

from __future__ import annotations

import os
from contextlib import suppress

from kvtier_backends.fs.open_root import FOLDER_FLAGS


def open_both(blocks: int, first: str, second: str) -> int:
    """Open one folder in another. Raises ``OSError``, also for a symbolic link."""
    outer = os.open(first, FOLDER_FLAGS, dir_fd=blocks)
    try:
        return os.open(second, FOLDER_FLAGS, dir_fd=outer)
    finally:
        os.close(outer)


def make_both(blocks: int, first: str, second: str, mode: int) -> int:
    """Create one folder in another if missing, and open it as ``open_both`` does."""
    with suppress(FileExistsError):
        os.mkdir(first, mode, dir_fd=blocks)
    outer = os.open(first, FOLDER_FLAGS, dir_fd=blocks)
    try:
        with suppress(FileExistsError):
            os.mkdir(second, mode, dir_fd=outer)
        return os.open(second, FOLDER_FLAGS, dir_fd=outer)
    finally:
        os.close(outer)
