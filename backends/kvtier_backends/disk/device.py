"""Moves bytes between buffers and the regions of segment files. Blocks are unknown here.

``Device`` is the seam: anything that implements it can replace the files, be it
another interface to the kernel, or a simulated disk that tears and loses
writes. A transfer names a region, an offset in it, and buffers whose bytes lie
there back to back.

Nothing is synced. Segment files are created when one of their regions is first
opened, for this user alone, and each region's bytes are allocated before it is
written: a full disk fails the allocation, not the middle of a store. If the
filesystem can't reserve room, only the file's length is set, and a full disk
fails a write.

The folder is kept open, and files are created and opened in it, or nowhere: once
its filesystem is unmounted, the path leads to another disk.
"""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.disk.fallocate import reserve
from kvtier_backends.disk.opened_files import NotAFile, open_file, remove_whatever
from kvtier_backends.posix import GONE, O_DIRECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Buffers = list[memoryview]

SEGMENT_NAME: Final = "segment-{:05d}.kv"
_NOT_RESERVED: Final = (
    "this filesystem cannot reserve room ({}): the tier works, but a disk that is full fails the "
    "store of a block in the middle, where elsewhere no region would have been opened"
)
PAGES_BYTES_MAX: Final = 256 << 10
"""A write of up to this size is of headers and table pages, which others wait for."""

_BUFFERS_MAX: Final = 1024  # the kernel's limit for one call


class Transfer(NamedTuple):
    """One read or write: neighbouring bytes of a region, and the buffers to fill or write."""

    region: int
    at: int  #: from the start of the region
    buffers: list[memoryview]
    on_read: Callable[[int], object] | None = None
    """Called with the number of bytes that were read, in the thread that read them."""

    @property
    def size(self) -> int:
        """Number of bytes to move."""
        return sum([buffer.nbytes for buffer in self.buffers])


class Segments(NamedTuple):
    """The folder of the segment files, and how they are divided into regions."""

    folder: str
    region_bytes: int
    regions_each: int  #: in one file


class Device(ABC):
    """Storage for regions. One thread, the event loop's, calls it; calls overlap.

    A cancelled call goes on: it owns its buffers until ``busy`` returns 0.
    """

    @abstractmethod
    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Read all; return each one's bytes read (fewer if there are no more), or its error.

        ``on_read`` is called for each that has no error, before the next one is read.
        """

    @abstractmethod
    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        """Write one after the other, up to the first that fails; return its error."""

    @abstractmethod
    async def allocate(self, region: int) -> None:
        """Make sure that the region's bytes exist. Raises ``OSError`` if there is no room."""

    @abstractmethod
    def busy(self) -> int:
        """Return how many calls run or wait, including cancelled ones. Any thread."""

    @abstractmethod
    def close(self) -> None:
        """Start no more work, and release everything once nothing is busy. Never waits."""


class FileDevice(Device):
    """Segment files in a folder, read and written by threads.

    Readers and writers have threads of their own, so neither waits for the
    other. So have writes of few pages: they don't wait for the data of other writes, nor
    occupy its threads. Opening the folder blocks, and raises ``OSError``.

    ``direct`` bypasses the page cache if buffers and filesystem
    allow it; ``on_direct_refused`` is called if one does not, and ``on_not_reserved``
    once if the filesystem cannot reserve room.
    """

    def __init__(
        self,
        segments: Segments,
        *,
        direct: bool,
        read_threads: int,
        write_threads: int,
        name: str,
        on_direct_refused: Callable[[OSError], None],
        on_not_reserved: Callable[[OSError], None],
    ) -> None:
        self._files = _SegmentFiles(segments, on_direct_refused, on_not_reserved, direct=direct)
        self._readers = DaemonThreads(read_threads, f"{name}-read")
        self._writers = DaemonThreads(write_threads, f"{name}-write")
        self._page_writers = DaemonThreads(write_threads, f"{name}-pages")
        self._is_closed = False  # stopped threads take no more calls: these would wait forever

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Read all, in one of the reading threads."""
        if self._is_closed:
            return [_closed() for _ in transfers]
        return await self._readers.run(partial(self._files.read_all, transfers))

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        """Write all, in one of the writing threads."""
        if self._is_closed:
            return _closed()
        size = sum([transfer.size for transfer in transfers])
        threads = self._page_writers if size <= PAGES_BYTES_MAX else self._writers
        return await threads.run(partial(self._files.write_all, transfers))

    async def allocate(self, region: int) -> None:
        """Allocate in one of the writing threads."""
        if self._is_closed:
            raise _closed()
        await self._writers.run(partial(self._files.allocate, region))

    def busy(self) -> int:
        """Count the calls that may still touch a buffer or a file."""
        return self._readers.busy() + self._writers.busy() + self._page_writers.busy()

    def close(self) -> None:
        """End the threads after their current calls; the last of these closes the files."""
        self._is_closed = True
        self._readers.stop()
        self._writers.stop()
        self._page_writers.stop()
        self._files.close()


class _SegmentFiles:
    """Open descriptors of the segment files. Any thread may call any method."""

    def __init__(
        self,
        segments: Segments,
        on_direct_refused: Callable[[OSError], None],
        on_not_reserved: Callable[[OSError], None],
        *,
        direct: bool,
    ) -> None:
        self._segments = segments
        self._folder = os.open(segments.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._direct = O_DIRECT if direct else 0
        self._on_direct_refused = on_direct_refused
        self._on_not_reserved = on_not_reserved
        self._reserves = True  # until the filesystem reports that it can't
        self._lengthening = threading.Lock()
        self._lock = threading.Lock()
        self._descriptors: dict[tuple[int, int], int] = {}
        self._forgotten = [self._folder]  # closed with the last call
        self._calls = 0  # that run
        self._closed = False

    def read_all(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Read one transfer after the other."""
        with self._call():
            return [self._read(transfer) for transfer in transfers]

    def write_all(self, transfers: Sequence[Transfer]) -> OSError | None:
        """Write one transfer after the other, up to the first that fails."""
        try:
            with self._call():
                for transfer in transfers:
                    self._write(transfer)
        except OSError as problem:
            return problem
        return None

    def allocate(self, region: int) -> None:
        """Allocate a region's bytes, and create its file if needed."""
        with self._call():
            self._allocate(region)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Keep the files open for a call."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._close_if_unused()

    def _allocate(self, region: int) -> None:
        segment, at = self._place(region)
        try:
            descriptor = self._descriptor(segment, os.O_WRONLY | os.O_CREAT)
        except NotAFile:
            # It can't be served: our file replaces it.
            remove_whatever(self._path(segment, f"/proc/self/fd/{self._folder}"))
            self._forget(segment)
            descriptor = self._descriptor(segment, os.O_WRONLY | os.O_CREAT)
        status = os.fstat(descriptor)
        end = at + self._segments.region_bytes
        if status.st_blocks * 512 >= status.st_size >= end:
            return  # no holes: a call would wait for all that the filesystem writes there
        if self._reserves:
            unable = reserve(descriptor, at, self._segments.region_bytes)
            if unable is None:
                return
            self._reserves = False
            why = _NOT_RESERVED.format(unable.strerror)
            self._on_not_reserved(OSError(unable.errno, why))
        with self._lengthening:  # or one thread could cut off what another has just added
            if os.fstat(descriptor).st_size < end:
                os.ftruncate(descriptor, end)

    def _forget(self, segment: int) -> None:
        """Have a segment opened again. Calls may still use its descriptors: they stay open."""
        with self._lock:
            for place in [each for each in self._descriptors if each[0] == segment]:
                self._forgotten.append(self._descriptors.pop(place))

    def close(self) -> None:
        """Open no more files, and close those that are open once no call runs.

        Not before: a hung call's descriptor would be another file's by the time that it ends.
        Nor do they stay open: they would keep a filesystem that was lost from being detached.
        """
        with self._lock:
            self._closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._calls:
            for descriptor in (*self._descriptors.values(), *self._forgotten):
                with suppress(OSError):
                    os.close(descriptor)
            self._descriptors.clear()
            self._forgotten.clear()

    def _read(self, transfer: Transfer) -> int | OSError:
        try:
            size = self._move(os.preadv, os.O_RDONLY, transfer)
        except OSError as problem:
            return 0 if problem.errno in GONE else problem
        if transfer.on_read is not None:
            transfer.on_read(size)
        return size

    def _write(self, transfer: Transfer) -> None:
        count = self._move(os.pwritev, os.O_WRONLY, transfer)
        if count != transfer.size:
            raise OSError(errno.ENOSPC, f"wrote {count} of {transfer.size} bytes")

    def _move(
        self,
        call: Callable[[int, Buffers, int], int],
        flags: int,
        transfer: Transfer,
    ) -> int:
        """Move a transfer's bytes, bypassing the page cache if possible. Return how many."""
        segment, start = self._place(transfer.region)
        at = start + transfer.at
        if self._direct:
            try:
                return _move_all(call, self._descriptor(segment, flags | O_DIRECT), transfer, at)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise
                self._on_direct_refused(problem)
        return _move_all(call, self._descriptor(segment, flags), transfer, at)

    def _place(self, region: int) -> tuple[int, int]:
        segment, number = divmod(region, self._segments.regions_each)
        return segment, number * self._segments.region_bytes

    def _descriptor(self, segment: int, flags: int) -> int:
        """Return the segment's descriptor for this kind of access, opened if needed."""
        place = (segment, flags & ~os.O_CREAT)
        with self._lock:
            if self._closed:
                raise _closed()
            descriptor = self._descriptors.get(place)
            if descriptor is None:
                try:
                    descriptor = self._open(segment, flags)
                except OSError as problem:
                    if problem.errno == errno.EINVAL and flags & O_DIRECT:
                        self._direct = 0  # the filesystem has none: don't try again
                    raise
                self._descriptors[place] = descriptor
            return descriptor

    def _open(self, segment: int, flags: int) -> int:
        """Open the file of the segment's other descriptors, or else the one in the open folder.

        A file that is removed under an engine stays whole for open descriptors. If only reads
        opened it by its path, writes would still succeed, but reads would find no blocks.
        """
        known = next((each for (of, _), each in self._descriptors.items() if of == segment), None)
        if known is not None:
            try:
                return os.open(f"/proc/self/fd/{known}", flags & ~os.O_CREAT | os.O_CLOEXEC)
            except OSError as problem:  # no /proc here, or storage that knows files by their paths
                if problem.errno == errno.EINVAL:  # no O_DIRECT: don't try twice
                    raise
        try:
            return open_file(self._path(segment, f"/proc/self/fd/{self._folder}"), flags)
        except NotAFile:
            raise
        except OSError as problem:
            path = self._path(segment, self._segments.folder)  # as people know it
            raise OSError(problem.errno, problem.strerror, path) from problem

    def _path(self, segment: int, folder: str) -> str:
        return f"{folder}/{SEGMENT_NAME.format(segment)}"


def _closed() -> OSError:
    return OSError(errno.EBADF, "the tier is closed")


def _move_all(
    call: Callable[[int, Buffers, int], int], descriptor: int, transfer: Transfer, at: int
) -> int:
    """Repeat the call until all bytes have moved or none do. Return how many bytes moved."""
    buffers, size = transfer.buffers, transfer.size
    moved = 0
    while moved < size:
        count = call(descriptor, buffers[:_BUFFERS_MAX], at + moved)
        if count == 0:
            break
        moved += count
        if moved < size:
            buffers = _after(buffers, count)
    return moved


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of the buffers behind their first ``count`` bytes."""
    for place, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[place + 1 :]]
        count -= buffer.nbytes
    return []


def trim_segments(segments: Segments, regions: int, highest: int) -> int:
    """Truncate or remove files beyond ``regions``; return how many files changed.

    Checks the segments up to number ``highest``.
    """
    changed = 0
    for segment in range(highest + 1):
        path = f"{segments.folder}/{SEGMENT_NAME.format(segment)}"
        first = segment * segments.regions_each
        kept = min(segments.regions_each, max(0, regions - first)) * segments.region_bytes
        if kept == 0:
            changed += remove_whatever(path)
            continue
        try:
            descriptor = open_file(path, os.O_WRONLY)
        except FileNotFoundError:
            continue
        except NotAFile:
            changed += remove_whatever(path)
            continue
        try:
            if os.fstat(descriptor).st_size > kept:
                os.ftruncate(descriptor, kept)
                changed += 1
        finally:
            os.close(descriptor)
    return changed
