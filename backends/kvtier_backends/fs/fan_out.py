"""Opens and makes the two folders that a block lies in, ``hhh/hh``, below an open one."""

from __future__ import annotations

import os
from contextlib import suppress

from kvtier_backends.fs.open_root import FOLDER_FLAGS


def open_both(blocks: int, first: str, second: str) -> int:
    """Open one folder in another. Raises ``OSError``, for a link as well."""
    outer = os.open(first, FOLDER_FLAGS, dir_fd=blocks)
    try:
        return os.open(second, FOLDER_FLAGS, dir_fd=outer)
    finally:
        os.close(outer)


def make_both(blocks: int, first: str, second: str, mode: int) -> int:
    """Make one folder in another, if they are not there, and open it as ``open_both`` does."""
    with suppress(FileExistsError):
        os.mkdir(first, mode, dir_fd=blocks)
    outer = os.open(first, FOLDER_FLAGS, dir_fd=blocks)
    try:
        with suppress(FileExistsError):
            os.mkdir(second, mode, dir_fd=outer)
        return os.open(second, FOLDER_FLAGS, dir_fd=outer)
    finally:
        os.close(outer)
