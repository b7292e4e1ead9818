"""Reads and changes the segment files of a folder from outside the log, for command-line tools.

Regions are accessed in the order of their numbers, so only one file is open
at a time. The engine itself moves blocks by ``device.py``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvtier_backends.disk.device import SEGMENT_NAME, Segments
from kvtier_backends.disk.fallocate import punch_hole
from kvtier_backends.disk.folder.claim import segment_numbers
from kvtier_backends.disk.opened_files import open_file

if TYPE_CHECKING:
    from typing import Self

_ZEROS_BYTES: Final = 1 << 20


class RegionFiles:
    """The regions in a folder's segment files. One thread at a time.

    All methods block, and raise ``OSError`` if the medium or its rights refuse a call.
    """

    def __init__(self, segments: Segments, *, writable: bool) -> None:
        self.region_bytes = segments.region_bytes
        self._segments = segments
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._opened: tuple[int, int] | None = None  # segment, descriptor
        self._is_changed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file that is open, once its changes are on the disk.

        It is opened again when it is needed. Raises ``OSError``.
        """
        opened, self._opened = self._opened, None
        changed, self._is_changed = self._is_changed, False
        if opened is not None:
            try:
                if changed:
                    os.fsync(opened[1])
            finally:
                os.close(opened[1])

    def numbers(self) -> list[int]:
        """Return the regions that have bytes in the files, whole or not."""
        segments = self._segments
        found: list[int] = []
        for segment in segment_numbers(segments.folder):
            try:
                size = os.lstat(self._path(segment)).st_size
            except FileNotFoundError:
                continue
            count = min(segments.regions_each, -(-size // segments.region_bytes))
            first = segment * segments.regions_each
            found.extend(range(first, first + count))
        return found

    def bytes_on_disk(self) -> int:
        """Return how many bytes the segment files take on the disk, holes left out."""
        folder = self._segments.folder
        return sum(512 * os.lstat(self._path(n)).st_blocks for n in segment_numbers(folder))

    def read(self, region: int, at: int, size: int) -> bytes:
        """Return this many bytes of a region; fewer if the file ends earlier."""
        parts = []
        try:
            descriptor, start = self._place(region)
        except FileNotFoundError:
            return b""
        while size and (part := os.pread(descriptor, size, start + at)):
            parts.append(part)
            at += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget_cached(self, region: int) -> None:
        """Have the kernel drop its cache of a region: to free memory, or to read again."""
        try:
            descriptor, start = self._place(region)
        except FileNotFoundError:
            return
        os.posix_fadvise(descriptor, start, self.region_bytes, os.POSIX_FADV_DONTNEED)

    def write(self, region: int, at: int, data: bytes) -> None:
        """Write all of ``data`` into a region."""
        descriptor, start = self._place(region)
        self._is_changed = True
        while data:
            count = os.pwrite(descriptor, data, start + at)
            at += count
            data = data[count:]

    def erase(self, region: int, at: int, size: int) -> None:
        """Zero these bytes of a region as far as its file has them, and free their disk space.

        If the filesystem can't, zeros are written.
        """
        descriptor, start = self._place(region)
        size = min(size, max(0, os.fstat(descriptor).st_size - start - at))
        if size == 0:
            return
        self._is_changed = True
        path = self._path(self._segment_of(region))
        if punch_hole(descriptor, start + at, size, path) is None:
            return
        for done in range(0, size, _ZEROS_BYTES):
            self.write(region, at + done, bytes(min(_ZEROS_BYTES, size - done)))

    def cut(self, region: int) -> None:
        """Truncate the region's file where the region starts."""
        descriptor, start = self._place(region)
        os.ftruncate(descriptor, start)

    def _segment_of(self, region: int) -> int:
        return region // self._segments.regions_each

    def _path(self, segment: int) -> str:
        return f"{self._segments.folder}/{SEGMENT_NAME.format(segment)}"

    def _place(self, region: int) -> tuple[int, int]:
        """Return the descriptor of the region's file, and where in it the region starts."""
        segment = self._segment_of(region)
        if self._opened is None or self._opened[0] != segment:
            self.close()
            self._opened = (segment, open_file(self._path(segment), self._flags))
        start = region % self._segments.regions_each * self.region_bytes
        return self._opened[1], start
