"""Reads and writes one block file at a time, and never raises for a sick medium.

Everything here blocks and is meant for a tier's threads. A block goes to and
from the slot itself: one ``pwritev`` or ``preadv`` moves the slot and the
trailer page together, so there is no copy in between. Nothing is synced: a
cache may forget on a crash, and a torn file is told by its size or trailer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.backend import LoadBlock, Loaded, Outcome, StoreBlock
from kvtier.errors import Misuse
from kvtier_backends.fs.folder import NO_ROOM, O_DIRECT, make_folders, write_config
from kvtier_backends.fs.temporary import (
    add_marker,
    dead_markers,
    remove_marker,
    sweep,
    temporary_path,
    this_writer,
)
from kvtier_backends.fs.trailer import (
    TRAILER_BYTES,
    TrailerDamaged,
    decode_trailer_untrusted,
    encode_trailer,
    padded_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.fs.layout import Layout
    from kvtier_backends.ledger import Ledger

_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
# What a read says of a folder, a FIFO, a socket or a link in a block's place.
_ODD_FILE: Final = frozenset({errno.EISDIR, errno.ESPIPE, errno.ENXIO, errno.ELOOP})
# No O_NONBLOCK: it would turn a hung medium into an error that looks like a verdict.
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _Pages(threading.local):
    """The page-aligned padding and trailer of one thread; O_DIRECT needs the alignment."""

    def __init__(self, padding_bytes: int) -> None:
        self._memory = mmap.mmap(-1, padding_bytes + TRAILER_BYTES)
        whole = memoryview(self._memory)
        self.trailer = whole[padding_bytes:]
        self.views = [whole] if padding_bytes == 0 else [whole[:padding_bytes], self.trailer]


class BlockFiles:
    """The block files of one namespace. Any thread may call any method.

    ``direct`` asks for O_DIRECT; a single transfer that the filesystem will
    not take that way is done again through the page cache.
    """

    def __init__(
        self,
        layout: Layout,
        block_bytes: int,
        ledger: Ledger,
        *,
        direct: bool,
        accept_unchecked: bool,
    ) -> None:
        self._layout = layout
        self._block_bytes = block_bytes
        self._trailer_at = padded_bytes(block_bytes)
        self._file_bytes = self._trailer_at + TRAILER_BYTES
        self._ledger = ledger
        self._writer = this_writer()
        # O_DIRECT moves whole disk blocks; with padding the slot's own part is none.
        self._direct = O_DIRECT if direct and self._trailer_at == block_bytes else 0
        self._accept_unchecked = accept_unchecked
        self._pages = _Pages(self._trailer_at - block_bytes)

    @property
    def _writers_folder(self) -> str:
        return f"{self._layout.base}/writers"

    def announce(self) -> list[str]:
        """Leave this process's marker and any missing folder; return dead writers' markers."""
        self._writer = this_writer()  # not before: the tier may run in a fork
        for folder in (self._layout.base, self._layout.blocks, self._writers_folder):
            make_folders(folder, self._layout.folder_mode)
        add_marker(self._writers_folder, self._writer, self._layout.file_mode)
        return dead_markers(self._writers_folder, self._writer)

    def sign_off(self) -> None:
        """Take the marker away: nothing unfinished is left behind."""
        remove_marker(self._writers_folder, self._writer)

    def sweep(self, keep_on: Callable[[], bool], dead: list[str]) -> None:
        """Remove dead writers' temporary files, then their markers if it got to the end."""
        for _ in sweep(self._layout.blocks, self._writer, keep_on):
            self._ledger.add("temporaries_swept")
        if keep_on():  # Otherwise the next engine sees the markers and goes on.
            for marker in dead:
                with suppress(OSError):
                    os.unlink(marker)

    def exists(self, key: bytes) -> bool:
        """Tell whether a load is likely to bring the block."""
        path = self._layout.path(key)
        try:
            status = os.lstat(path)
        except OSError as problem:
            if problem.errno not in _GONE:
                self._ledger.trouble("load", "probe_failed", problem, path=path)
            return False
        # What an odd file does, only a load can tell: it may hang.
        return self._is_whole(status.st_size) or not stat.S_ISREG(status.st_mode)

    def load(self, block: LoadBlock) -> Loaded:
        """Read one block into its buffer. What the buffer holds unless DONE is undefined."""
        if block.buffer.nbytes != self._block_bytes:
            raise Misuse(
                f"a buffer of {block.buffer.nbytes} bytes cannot take a block of "
                f"{self._block_bytes}. Hand in whole slots."
            )
        path = self._layout.path(block.key)
        try:
            loaded = self._read(path, block)
        except TrailerDamaged as problem:
            self._ledger.trouble("load", "blocks_damaged", problem, path=path)
            self._discard(path)
            return Loaded(Outcome.DAMAGED)
        except OSError as problem:
            return self._load_failed(path, problem)
        if loaded.outcome is Outcome.DONE:
            self._ledger.success("load")
        return loaded

    def store(self, block: StoreBlock) -> Outcome:
        """Write one block, unless a whole file is there already."""
        if block.buffer.nbytes != self._block_bytes:
            raise Misuse(
                f"a buffer of {block.buffer.nbytes} bytes is no block of {self._block_bytes}. "
                "Hand in whole slots."
            )
        path = self._layout.path(block.key)
        temporary = ""
        try:
            if self._is_stored(path):
                return Outcome.DONE
            temporary = temporary_path(path, self._writer)
            self._write(temporary, block)
            os.rename(temporary, path)
        except OSError as problem:
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)
            full = problem.errno in NO_ROOM
            self._ledger.trouble(
                "store", "stores_full" if full else "stores_failed", problem, path=path
            )
            return Outcome.FULL if full else Outcome.FAILED
        self._ledger.success("store")
        return Outcome.DONE

    def remove(self, key: bytes) -> None:
        """Remove the block's file. A folder or a FIFO in its place stays."""
        path = self._layout.path(key)
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                os.unlink(path)
        except OSError as problem:
            if problem.errno not in _GONE:
                self._ledger.trouble("store", "removes_failed", problem, path=path)

    def _is_whole(self, size: int) -> bool:
        return size == self._file_bytes or (self._accept_unchecked and size == self._block_bytes)

    def _is_stored(self, path: str) -> bool:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EEXIST, "something that is no file lies in the block's place", path)
        return self._is_whole(status.st_size)

    def _read(self, path: str, block: LoadBlock) -> Loaded:
        buffers = [block.buffer, *self._pages.views]
        descriptor = os.open(path, _READ_FLAGS | self._direct)
        try:
            count = self._transfer(os.preadv, descriptor, buffers)
            if count != self._file_bytes:
                return self._read_short(descriptor, path, count)
        finally:
            os.close(descriptor)
        digest = decode_trailer_untrusted(self._pages.trailer, block.key, self._block_bytes)
        return Loaded(Outcome.DONE, digest)

    def _read_short(self, descriptor: int, path: str, count: int) -> Loaded:
        """Judge a file that ended before its trailer did."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ESPIPE, "no regular file", path)
        if status.st_size != count:
            raise OSError(errno.EIO, f"read {count} of {status.st_size} bytes", path)
        if count != self._block_bytes:
            raise TrailerDamaged(f"torn: {count} bytes instead of {self._file_bytes}")
        if self._accept_unchecked:
            self._ledger.add("loads_unchecked")
            return Loaded(Outcome.DONE)
        # Sound for vLLM perhaps, so it is not ours to delete; a store will replace it.
        self._ledger.add("loads_unchecked_refused")
        return Loaded(Outcome.ABSENT)

    def _load_failed(self, path: str, problem: OSError) -> Loaded:
        if problem.errno in _GONE:
            return Loaded(Outcome.ABSENT)
        # O_DIRECT gives EINVAL for what is no file, before its kind is even looked at.
        if problem.errno in _ODD_FILE or (problem.errno == errno.EINVAL and _is_odd(path)):
            self._ledger.trouble("load", "blocks_damaged", problem, path=path)
            return Loaded(Outcome.DAMAGED)
        self._ledger.trouble("load", "loads_failed", problem, path=path)
        return Loaded(Outcome.FAILED)

    def _write(self, temporary: str, block: StoreBlock) -> None:
        trailer = encode_trailer(block.key, self._block_bytes, block.digest)
        self._pages.trailer[:] = trailer
        buffers = [block.buffer, *self._pages.views]
        descriptor = self._create(temporary)
        try:
            count = self._transfer(os.pwritev, descriptor, buffers)
        finally:
            os.close(descriptor)
        if count != self._file_bytes:
            # A write stops short when the room does, and says nothing.
            raise OSError(errno.ENOSPC, f"wrote {count} of {self._file_bytes} bytes", temporary)

    def _create(self, temporary: str) -> int:
        flags = _WRITE_FLAGS | self._direct
        try:
            return os.open(temporary, flags, self._layout.file_mode)
        except FileNotFoundError:
            # A new fan-out folder, or all of them were removed under us.
            if not os.path.exists(self._layout.config_path):
                self.announce()
                write_config(self._layout)
            make_folders(os.path.dirname(temporary), self._layout.folder_mode)
            return os.open(temporary, flags, self._layout.file_mode)

    def _transfer(
        self,
        move: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        buffers: list[memoryview],
    ) -> int:
        """Do one ``preadv`` or ``pwritev``, again without O_DIRECT if that was in the way."""
        try:
            return move(descriptor, buffers, 0)
        except OSError as problem:
            if not self._give_up_direct(descriptor, problem):
                raise
            return move(descriptor, buffers, 0)

    def _give_up_direct(self, descriptor: int, problem: OSError) -> bool:
        """Turn O_DIRECT off for this file if the filesystem refuses the transfer's alignment."""
        if problem.errno != errno.EINVAL or not self._direct:
            return False
        self._ledger.add("direct_refused")
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)
        return True

    def _discard(self, path: str) -> None:
        try:
            os.unlink(path)
        except OSError as problem:
            if problem.errno not in _GONE:
                self._ledger.trouble("load", "removes_failed", problem, path=path)
        else:
            self._ledger.add("blocks_discarded")


def _is_odd(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
