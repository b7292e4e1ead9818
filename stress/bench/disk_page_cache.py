"""What of a folder's files is in the page cache, and how to have it forgotten."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def drop(folder: Path) -> None:
    """Have the kernel forget the files' pages. What is not on the disk yet stays: sync first."""
    for descriptor in _descriptors(folder):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(folder: Path) -> int:
    """Return how many bytes of the folder's files are in the page cache."""
    return sum(_resident_pages(descriptor) for descriptor in _descriptors(folder)) * mmap.PAGESIZE


def _resident_pages(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as pages:
        mapped = np.frombuffer(pages, dtype=np.uint8)
        found = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        failed = _libc.mincore(mapped.ctypes.data, size, found.ctypes.data)
        del mapped  # releases the map
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((found & 1).sum())


def _descriptors(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
