"""Reads and writes one block file at a time, and never raises when the medium fails.

All calls block and are meant for a tier's threads. A block that is not
encrypted goes to and from the slot itself: one ``pwritev`` or ``preadv`` moves the slot and the
trailer page together, so there is no copy in between. Nothing is synced: a
cache may forget on a crash, and a torn file is recognized by its size or trailer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome, StoreBlock
from kvtier_backends.fs.access_times import AccessTimes
from kvtier_backends.fs.bound.writer import NoGrant, Stage
from kvtier_backends.fs.folder import refuse_other_config, write_config
from kvtier_backends.fs.forms import TRAILER_BYTES, BlockRefused, TrailerDamaged
from kvtier_backends.fs.older_blocks import neighbours
from kvtier_backends.fs.open_root import (
    PlaceLost,
    RootHandle,
    SpecialFile,
    open_both,
    refuse_special_file,
    special_file,
)
from kvtier_backends.fs.temporary import (
    add_marker,
    dead_markers,
    remove_markers,
    sweep_after,
    temporary_path,
    this_writer,
)
from kvtier_backends.posix import GONE, NO_ROOM, O_DIRECT, no_room, padded_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier_backends.fs.bound.folder_bound import FolderBound
    from kvtier_backends.fs.forms import PlainForm, RecordForm
    from kvtier_backends.fs.layout import Layout
    from kvtier_backends.fs.open_root import OpenRoot
    from kvtier_backends.incidents import IncidentLog, TierCounters

# Errors of opening or reading a folder, a FIFO, a socket, a device or a link in a block's
# place. O_DIRECT gives EINVAL for anything but a file, before its kind is even checked.
_ODD_FILE: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENODEV,
        errno.ENXIO,
        errno.ESPIPE,
    }
)
# O_NONBLOCK: never wait for a FIFO or a device in a block's place. Regular files ignore it.
# The file's kind is checked only if something is wrong with the data read.
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _Pages(threading.local):
    """One thread's page-aligned padding and trailer; O_DIRECT needs the alignment."""

    def __init__(self, padding_bytes: int) -> None:
        self._memory = mmap.mmap(-1, padding_bytes + TRAILER_BYTES)
        whole = memoryview(self._memory)
        self.trailer = whole[padding_bytes:]
        self.views = [whole] if padding_bytes == 0 else [whole[:padding_bytes], self.trailer]


class _Batch(threading.local):
    """The folders of the blocks that one thread is storing."""

    folders: frozenset[str] = frozenset()


class BlockFiles:
    """The block files of one namespace. Any thread may call any method.

    ``direct`` requests O_DIRECT; a single transfer that the filesystem refuses
    that way is repeated through the page cache.
    """

    def __init__(
        self,
        layout: Layout,
        place: OpenRoot,
        form: PlainForm | RecordForm,
        counters: TierCounters,
        incidents: IncidentLog,
        *,
        direct: bool,
        accept_unchecked: bool,
    ) -> None:
        """``place``: the layout's opened folders."""
        self._folder_bound: FolderBound | None = None
        self._root_handle = RootHandle(layout, place, self._settle, self._report_returned)
        self._layout = layout
        self._form = form
        self._block_bytes = block_bytes = form.block_bytes
        self._trailer_at = padded_bytes(block_bytes)
        self._file_bytes = self._trailer_at + TRAILER_BYTES
        self._counters = counters
        self._incidents = incidents
        self._writer = this_writer()
        self._signature = str(self._writer)
        # O_DIRECT moves whole disk blocks; with padding the slot itself is not a whole number.
        self._direct = O_DIRECT if direct and self._trailer_at == block_bytes else 0
        self._accept_unchecked = accept_unchecked
        self._read_only = place.read_only
        self._pages = _Pages(self._trailer_at - block_bytes)
        self._access_times = AccessTimes()
        self._batch = _Batch()
        self._marking = threading.Lock()

    def keep_within_bound(self, keeper: FolderBound) -> None:
        """Store only what the keeper has room for, and report uses to it. Call before all else."""
        self._folder_bound = keeper

    def current_place(self) -> OpenRoot:
        """Return the place; keep it while in use. Raises ``PlaceLost``. Touches storage."""
        return self._root_handle.current()

    def announce(self) -> list[str]:
        """Leave this process's marker; return the names of dead writers' markers."""
        self._writer = this_writer()  # not earlier: the tier may run in a fork
        self._signature = str(self._writer)
        place = self._root_handle.make_again()
        self._settle(place)
        return dead_markers(place.base, self._writer)

    def neighbours(self) -> list[str]:
        """Return the names of the model's other namespaces; none if they can't be listed."""
        with suppress(OSError):  # a folder may be usable but not listable
            return neighbours(self._root_handle.current().root, self._layout)
        return []

    def sign_off(self) -> None:
        """Remove the marker, since nothing unfinished is left behind. Release the folders."""
        with suppress(OSError):
            if not self._read_only:
                remove_markers(self._root_handle.current().base, [self._signature])
        self._root_handle.close()

    def sweep(self, keep_on: Callable[[], bool], dead: list[str]) -> None:
        """Remove the unfinished files of these dead writers, and their markers."""
        with suppress(PlaceLost):
            place = self._root_handle.current()
            for _ in sweep_after(dead, place.base, place.blocks, self._writer, keep_on):
                self._counters.add("temporaries_swept")

    @property
    def file_bytes(self) -> int:
        """Size of a block's file; the maximum if blocks are compressed."""
        return self._file_bytes

    def exists(self, key: bytes) -> bool:
        """Return whether a load is likely to find the block."""
        name = self._layout.name(key)
        try:
            place = self._root_handle.current()
            status = os.stat(name, dir_fd=place.blocks, follow_symlinks=False)
        except OSError as problem:
            if not self._note_if_gone(problem):
                self._report("load", "probe_failed", problem, key)
            return False
        # A load counts anything that is not a file as damaged.
        return self._is_whole(status.st_size) or not stat.S_ISREG(status.st_mode)

    def load(self, block: LoadBlock) -> Loaded:
        """Read one block into its buffer, whose contents are undefined unless DONE."""
        if block.buffer.nbytes != self._block_bytes:
            raise Misuse(
                f"a buffer of {block.buffer.nbytes} bytes cannot take a block of "
                f"{self._block_bytes}. Hand in whole slots."
            )
        name = self._layout.name(block.key)
        try:
            loaded = self._read(self._root_handle.current(), name, block)
        except TrailerDamaged as problem:
            odd = self._what_is_odd(name)
            self._report("load", "blocks_damaged", odd or problem, block.key)
            if odd is None:
                self._discard(name, block.key)
            return Loaded(Outcome.DAMAGED)
        except BlockRefused as problem:
            self._report("load", "blocks_damaged", problem, block.key)
            return Loaded(Outcome.DAMAGED)
        except OSError as problem:
            return self._load_failed(name, block.key, problem)
        if loaded.outcome is Outcome.DONE:
            self._incidents.success("load")
            self._note_use(name)
        return loaded

    def begin_stores(self, keys: Iterable[bytes]) -> None:
        """Name all blocks that this thread will store: one record in the marker covers them."""
        names = map(self._layout.name, keys)
        self._batch.folders = frozenset([name.rpartition("/")[0] for name in names])

    def store(self, block: StoreBlock) -> Outcome:
        """Write one block, unless its whole file is already there.

        Raises ``NoGrant`` if the folder has a bound and there is no room right now.
        """
        if block.buffer.nbytes != self._block_bytes:
            raise Misuse(
                f"a buffer of {block.buffer.nbytes} bytes is no block of {self._block_bytes}. "
                "Hand in whole slots."
            )
        name = self._layout.name(block.key)
        try:
            place = self._root_handle.current()
            if self._is_stored(place, name):
                self._note_use(name)
                return Outcome.DONE
            try:
                self._put_in_place(place, name, block)
            except FileNotFoundError:  # a cleaner removed the empty folder before it was used
                self._put_in_place(place, name, block)
        except NoGrant:
            raise
        except OSError as problem:
            self._note_if_gone(problem)
            full = problem.errno in NO_ROOM
            if full:
                problem = self._note_full(problem)
            self._report("store", "stores_full" if full else "stores_failed", problem, block.key)
            return Outcome.FULL if full else Outcome.FAILED
        self._incidents.success("store")
        return Outcome.DONE

    def remove(self, key: bytes) -> None:
        """Remove the block's file. A folder or a FIFO in its place stays."""
        name = self._layout.name(key)
        try:
            place = self._root_handle.current()
            status = os.stat(name, dir_fd=place.blocks, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                self._unlink(place, name)
        except OSError as problem:
            if not self._note_if_gone(problem):
                self._report("store", "removes_failed", problem, key)

    def _note_if_gone(self, problem: OSError) -> bool:
        """Return whether a file is gone. On NFS another host may have removed it."""
        if problem.errno == errno.ESTALE and not isinstance(problem, PlaceLost):
            self._root_handle.doubt()  # or the folder was removed: then its handle is stale
            return True
        return problem.errno in GONE

    def _note_full(self, problem: OSError) -> OSError:
        """Have the cleaner make room, if there is one. Return the error to log."""
        if self._folder_bound is not None:
            self._folder_bound.note_no_room()
        with suppress(PlaceLost):
            return no_room(problem, self._root_handle.current().root)
        return problem

    def _report(self, side: str, kind: str, problem: Exception, key: bytes) -> None:
        if isinstance(problem, PlaceLost):  # reported once for both sides, not per file
            self._incidents.report("store", "folder_lost", problem.strerror)
        else:
            self._incidents.report(side, kind, problem, path=self._layout.path(key))

    def _settle(self, place: OpenRoot) -> None:
        """Set up a place that was just opened."""
        if self._read_only:
            refuse_other_config(place, self._layout)
            return
        if place.written_ns() is None:
            write_config(place.base, self._layout)
        self._leave_marker(place)

    def _leave_marker(self, place: OpenRoot) -> None:
        """Leave this writer's marker in a place. Without room, the first store leaves it."""
        layout = self._layout
        try:
            marker = add_marker(place.base, self._writer, layout.folder_mode, layout.file_mode)
        except OSError as problem:
            if problem.errno not in NO_ROOM:
                raise
        else:
            place.keep_marker(marker)

    def _report_returned(self) -> None:
        self._counters.add("folder_returned")
        self._incidents.end("store", "folder_lost")

    def _is_whole(self, size: int) -> bool:
        return (
            size == self._file_bytes
            or (self._accept_unchecked and size == self._block_bytes)
            or self._is_compressed(size)
        )

    def _is_compressed(self, size: int) -> bool:
        """Return whether a file of this size may hold a compressed block and its trailer."""
        payload_bytes = size - TRAILER_BYTES
        return size <= self._block_bytes and self._form.is_payload_length(payload_bytes)

    def _is_stored(self, place: OpenRoot, name: str) -> bool:
        try:
            status = os.stat(name, dir_fd=place.blocks, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise special_file(status.st_mode, name)
        return self._is_whole(status.st_size)

    def _read(self, place: OpenRoot, name: str, block: LoadBlock) -> Loaded:
        room = self._form.room_for(block.buffer)
        payload, page = room, self._pages.trailer
        descriptor = os.open(name, _READ_FLAGS | self._direct, dir_fd=place.blocks)
        try:
            count = self._transfer(os.preadv, descriptor, [room, *self._pages.views])
            if self._is_compressed(count) and os.fstat(descriptor).st_size == count:
                payload, page = room[: count - TRAILER_BYTES], room[count - TRAILER_BYTES : count]
            elif count != self._file_bytes:
                return self._read_short(descriptor, name, count)
            self._access_times.note_hit(name, descriptor)
        finally:
            os.close(descriptor)
        digest = self._form.decode_untrusted(block, payload, page)
        self._form.give_back(room)
        return Loaded(Outcome.DONE, digest)

    def _read_short(self, descriptor: int, path: str, count: int) -> Loaded:
        """Classify a file that ended before its trailer did."""
        refuse_special_file(descriptor, path)
        status = os.fstat(descriptor)
        if status.st_size != count:
            raise OSError(errno.EIO, f"read {count} of {status.st_size} bytes", path)
        if count != self._block_bytes:
            raise TrailerDamaged(f"torn: {count} bytes instead of {self._file_bytes}")
        if self._accept_unchecked:
            self._access_times.note_hit(path, descriptor)
            self._counters.add("loads_unchecked")
            return Loaded(Outcome.DONE)
        # It may be sound for vLLM, so it is not ours to delete; a store will replace it.
        self._counters.add("loads_unchecked_refused")
        return Loaded(Outcome.ABSENT)

    def _load_failed(self, name: str, key: bytes, problem: OSError) -> Loaded:
        if self._note_if_gone(problem):
            return Loaded(Outcome.ABSENT)
        if problem.errno in _ODD_FILE:
            odd = self._what_is_odd(name)
            if odd is not None:
                self._report("load", "blocks_damaged", odd, key)
                return Loaded(Outcome.DAMAGED)
        self._report("load", "loads_failed", problem, key)
        return Loaded(Outcome.FAILED)

    def _what_is_odd(self, name: str) -> SpecialFile | None:
        """Return the error for a special file in a block's place; None if it is a regular file."""
        with suppress(OSError):
            place = self._root_handle.current()
            mode = os.stat(name, dir_fd=place.blocks, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode):
                return special_file(mode, name)
        return None

    def _note_use(self, name: str) -> None:
        if self._folder_bound is not None:
            self._folder_bound.note_use(name)

    def _stage(self, folder: int, name: str) -> AbstractContextManager[Stage]:
        """Return where a block is written first: beside its place, or where the bound counts it."""
        return (
            nullcontext(Stage(folder))
            if self._folder_bound is None
            else self._folder_bound.stage(name)
        )

    def _put_in_place(self, place: OpenRoot, name: str, block: StoreBlock) -> None:
        first, second, last = name.split("/")
        self._note_unfinished(place, f"{first}/{second}")
        folder = self._open_fan_out(place, first, second)
        try:
            with self._stage(folder, name) as stage:
                self._put(folder, last, block, stage)
        finally:
            os.close(folder)

    def _put(self, folder: int, name: str, block: StoreBlock, stage: Stage) -> None:
        """Write a block in the stage's folder, and rename it into the open folder in one step."""
        temporary = temporary_path(name, self._signature)
        try:
            size = self._write(stage.folder, temporary, block)
            stage.begin_renaming(size)
            os.rename(temporary, name, src_dir_fd=stage.folder, dst_dir_fd=folder)
        except OSError:
            try:
                os.unlink(temporary, dir_fd=stage.folder)
            except OSError as problem:
                if problem.errno not in GONE:
                    stage.note_left()
            raise

    def _write(self, folder: int, temporary: str, block: StoreBlock) -> int:
        """Write a block's file, and return its size."""
        payload = self._form.encode(block, self._pages.trailer)
        is_whole = payload.nbytes == self._block_bytes  # a compressed block needs no padding
        buffers = [payload, *(self._pages.views if is_whole else [self._pages.trailer])]
        size = sum(buffer.nbytes for buffer in buffers)
        mode = self._layout.file_mode
        descriptor = os.open(temporary, _WRITE_FLAGS | self._direct, mode, dir_fd=folder)
        try:
            count = self._transfer(os.pwritev, descriptor, buffers)
        finally:
            os.close(descriptor)
        self._form.give_back(payload)
        if count != size:
            # Without room a write stops short and reports no error.
            raise OSError(errno.ENOSPC, f"wrote {count} of {size} bytes", temporary)
        return size

    def _open_fan_out(self, place: OpenRoot, first: str, second: str) -> int:
        """Open the folder of a block, and create it if missing. Follows no links."""
        mode = self._layout.folder_mode
        try:
            return open_both(place.blocks, first, second, mode, make=True)
        except FileNotFoundError:  # all folders were removed meanwhile
            place = self._root_handle.make_again()
            self._note_unfinished(place, f"{first}/{second}")
            return open_both(place.blocks, first, second, mode, make=True)

    def _note_unfinished(self, place: OpenRoot, folder: str) -> None:
        """Name the folder in this place's marker. With a bound, unfinished files are elsewhere."""
        if self._folder_bound is not None:
            return
        seen = place.unfinished
        if seen is None or seen.is_removed():
            # One thread at a time, or two would write one record. Missing folders are made later.
            with self._marking, suppress(FileNotFoundError):
                if place.unfinished is seen:
                    self._leave_marker(place)
        if place.unfinished is None:
            return
        if folder not in self._batch.folders:
            self._batch.folders = frozenset([folder])
        place.unfinished.note(self._batch.folders)

    def _unlink(self, place: OpenRoot, name: str) -> None:
        first, second, last = name.split("/")
        folder = open_both(place.blocks, first, second)
        try:
            os.unlink(last, dir_fd=folder)
        finally:
            os.close(folder)

    def _transfer(
        self,
        move: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        buffers: list[memoryview],
    ) -> int:
        """Do one ``preadv`` or ``pwritev``; repeat it without O_DIRECT if that was refused."""
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
        self._counters.add("direct_refused")
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)
        return True

    def _discard(self, name: str, key: bytes) -> None:
        if self._read_only:
            return
        try:
            self._unlink(self._root_handle.current(), name)
        except OSError as problem:
            if problem.errno not in GONE:
                self._report("load", "removes_failed", problem, key)
        else:
            self._counters.add("blocks_discarded")
