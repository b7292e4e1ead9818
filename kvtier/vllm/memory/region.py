"""Maps the shared host memory of one engine on the CPU platform.

Every worker rank and the scheduler map one file in ``/dev/shm``:

    row 0 | row 1 | ... | row slot_count-1 | header

A row is one block: the parts of all ranks side by side, then padding to a
page. ``memory/region_header.py`` defines the header.

No file may outlive its engine, however that ends. So the scheduler, which maps
last, removes the name as soon as all ranks have mapped it; the memory is then
freed with the last process. For an engine killed before that, each participant
holds a shared ``flock`` while the name exists, and a process that opens a region
first removes the files that no process holds. (``flock`` works between containers
that share ``/dev/shm``; process ids do not.) vLLM's own regions, on platforms with
a device, are removed too: there a lease serves the purpose that a lock has here.

Rule for opening: lock, then check whether the name still leads to the locked
file. A sweep may have removed the file in between, as a dead engine's: then retry.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.errors import ConfigError, InternalError
from kvtier.plugin_api.log import log
from kvtier.plugin_api.slot_memory import MADV_POPULATE_WRITE
from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER, HostMemory
from kvtier.vllm.memory.region_header import HEADER_BYTES, RegionHeader

if TYPE_CHECKING:
    from collections.abc import Callable

NAME_PREFIX: Final = "kvtier_"
VLLMS_NAME: Final = "vllm_offload_{}.mmap"
"""vLLM's name for an engine's region, used on platforms with a device."""
OPEN_TIMEOUT_S: Final = 60.0

SAME_ENGINE_ID: Final = (
    "All connectors of a MultiConnector have one engine_id, so only one of them can be kvtier's: "
    "put the tiers of all into its secondary_tiers. If two engines with one engine_id run on this "
    "host, give each its own, or leave engine_id out of the KV transfer configuration. Otherwise "
    "the ranks disagree: give all ranks the same configuration."
)

_POLL_S = 0.005
_POPULATE_STEP_BYTES = 1 << 30  # so that a signal gets through between two steps
_PATTERNS: Final = (f"{NAME_PREFIX}*", VLLMS_NAME.format("*"))
_SECTOR_BYTES: Final = 512  # the unit of st_blocks


class Region(Protocol):
    """The shared memory as the manager uses it, on either kind of platform."""

    @property
    def rows(self) -> memoryview:
        """All slots, one after the other."""

    header: RegionHeader

    def fileno(self) -> int | None:
        """Return the open file that another process can map, if there is one."""

    def try_unlink(self) -> bool:
        """Remove the name once all ranks have mapped it; return True once it is gone."""

    def close(self) -> None:
        """Release the memory. Safe to call twice."""


class HostRegion:
    """One process's mapping of the region. ``rank`` is None in the scheduler.

    Built once a process, on the thread that starts the engine. Raises ``ConfigError``
    if the memory is not available, or another process with this engine_id uses the
    rank or needs another size; ``InternalError`` if the file is not ready within ``timeout_s``.
    """

    def __init__(  # noqa: PLR0913 - the shape of the memory and its place
        self,
        engine_id: str,
        *,
        slot_count: int,
        row_bytes: int,
        world_size: int,
        rank: int | None,
        cpu_bytes_to_use: int | None = None,
        folder: str = SHARED_MEMORY_FOLDER,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        if slot_count < 1 or row_bytes < 1 or row_bytes % mmap.PAGESIZE:
            raise InternalError(f"region of {slot_count} rows of {row_bytes} bytes")
        self.slot_count = slot_count
        self.row_bytes = row_bytes
        self.rank = rank
        self.path = Path(folder) / _file_name(engine_id)
        self._engine_id = engine_id
        self._rows_bytes = slot_count * row_bytes
        self._total_bytes = self._rows_bytes + HEADER_BYTES
        self._memory = HostMemory(cpu_bytes_to_use, self._total_bytes)
        self._map: mmap.mmap | None = None
        self._closed = False
        sweep(folder)
        self._fd, created = self._open(time.monotonic() + timeout_s)
        self._is_participant = created  # else not before its rank is accepted
        try:
            if created:
                self._memory.require_shared(folder)
                # One call sizes the file, so a joining process sees none or all of it.
                os.ftruncate(self._fd, self._total_bytes)
            else:
                self._wait_for_size(time.monotonic() + timeout_s)
            mapping = mmap.mmap(self._fd, self._total_bytes)
            whole = memoryview(mapping)
            self.header = RegionHeader(whole[self._rows_bytes :], world_size)
            self._rows = whole[: self._rows_bytes]
            self._map = mapping  # last: close() takes it as "all three exist"
            whole.release()
            self._populate(world_size)
            self._announce()
            self._is_participant = True
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> memoryview:
        """All rows, writable, without a copy. Valid until ``close``."""
        return self._rows

    def fileno(self) -> int:
        """Return the open file, for another process that maps the region."""
        return self._fd

    def try_unlink(self) -> bool:
        """Remove the name once every rank has mapped it; return True once it is gone.

        For the scheduler: call it until it returns True. Never waits.
        """
        if self._closed or not self._has_name():
            return True
        if not self.header.all_mapped():
            return False
        self._unlink_if_ours()
        return True

    def close(self) -> None:
        """Unmap, and remove the name if it is still there. Safe to call twice.

        If views still exist (a tensor, a ``SlotMemory``), the memory is freed with
        the last of them; no reader loses its memory.
        """
        if self._closed:
            return
        # The engine ends with its first participant, so no process joins after this.
        self._unlink_if_ours()
        self._closed = True
        if self._map is not None:
            self._rows.release()
            self.header.release()
            with suppress(BufferError):
                self._map.close()
            self._map = None
        os.close(self._fd)

    def _announce(self) -> None:
        if self.rank is not None and not self.header.mark_mapped(self.rank):
            raise doubled_rank(self._engine_id, self.rank, self.path)

    def _open(self, deadline: float) -> tuple[int, bool]:
        """Return the locked file and whether this call created it."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            created = True
            try:
                fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                created = False
                try:
                    fd = os.open(self.path, flags)
                except FileNotFoundError:
                    continue  # its owner, or a sweep, was quicker
            if _lock(fd, fcntl.LOCK_SH) and _leads_to(self.path, fd):
                return fd, created
            os.close(fd)
            if time.monotonic() > deadline:
                raise InternalError(f"{self.path} stayed locked by another process")
            time.sleep(_POLL_S)

    def _wait_for_size(self, deadline: float) -> None:
        while (size := os.fstat(self._fd).st_size) == 0:
            if not self._has_name():
                raise InternalError(f"the worker that created {self.path} failed; see its log")
            if time.monotonic() > deadline:
                raise InternalError(f"{self.path} was not sized in time by its creator")
            time.sleep(_POLL_S)
        if size != self._total_bytes:
            raise ConfigError(
                f"engine_id={self._engine_id!r}: {self.path} has {size} bytes, and "
                f"rank {self.rank} needs {self._total_bytes} ({self.slot_count} rows of "
                f"{self.row_bytes}, cpu_bytes_to_use={self._memory.value!r}): another engine with "
                f"this engine_id needs another size. {SAME_ENGINE_ID}"
            )

    def _populate(self, world_size: int) -> None:
        """Fault in this rank's share of the rows, so that no transfer pays for it.

        The scheduler comes last and takes all rows: the pages exist by then, and
        only its own page table is filled.
        """
        first, last = 0, self.slot_count
        if self.rank is not None:
            first = self.slot_count * self.rank // world_size
            last = self.slot_count * (self.rank + 1) // world_size
        try:
            _in_steps(self._advise, first * self.row_bytes, last * self.row_bytes)
            if self.rank in (None, 0):
                _in_steps(self._advise, self._rows_bytes, self._total_bytes)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
                raise self._memory.refusal(f"the kernel had no more pages ({error})") from error
            raise

    def _advise(self, start: int, length: int) -> None:
        assert self._map is not None
        try:
            self._map.madvise(MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A kernel before 5.14. This allocates the pages without touching a peer's data.
            os.posix_fallocate(self._fd, start, length)

    def _has_name(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def _unlink_if_ours(self) -> None:
        # An engine that is refused since another has its engine_id leaves that one's name.
        if self._is_participant and _leads_to(self.path, self._fd):
            self.path.unlink(missing_ok=True)


def sweep(folder: str = SHARED_MEMORY_FOLDER) -> list[Path]:
    """Remove the regions of engines that died while they started, and log it; return their paths.

    These are kvtier's and vLLM's, of this user. A region stays if it may be in use, or if the
    kernel can't tell; so do vLLM's empty files, which may be in creation.
    """
    removed: dict[Path, int] = {}
    for path in sorted(each for pattern in _PATTERNS for each in Path(folder).glob(pattern)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if _is_left(path, fd):
                # In this order: while the first has its name, no engine creates others.
                for file in [*_more_of(path), path]:
                    with suppress(OSError):
                        held = file.lstat().st_blocks * _SECTOR_BYTES
                        file.unlink()
                        removed[file] = held
        finally:
            os.close(fd)  # ends the lock and the lease, too
    if removed:
        log.info(
            "removed shared memory of engines that died while they started",
            folder=folder,
            files=", ".join(path.name for path in removed),
            bytes=sum(removed.values()),
        )
    return list(removed)


def _is_left(path: Path, fd: int) -> bool:
    """Return whether no process uses the region that is open, for reading, as ``fd``."""
    file = os.fstat(fd)
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid():
        return False
    if not _lock(fd, fcntl.LOCK_EX) or not names(path, file):
        return False
    return path.name.startswith(NAME_PREFIX) or (file.st_size > 0 and _has_no_writer(path, fd))


def _has_no_writer(path: Path, fd: int) -> bool:
    """Return whether no process has the file open for writing, or still maps it from such an open.

    vLLM locks nothing, so this requests a lease, which the kernel grants only on such files. The
    kernel also covers processes in containers with their own process ids, which /proc does not
    show. A process that opens the file from now on waits until it is closed here.
    """
    try:
        # A waiting process is announced by SIGIO, which would end this one; SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning(
            "shared memory of vLLM's may be left over from an engine that died; the kernel cannot "
            "tell whether it is in use",
            file=str(path),
            error=str(error),
            remedy="if no engine of vLLM's runs on this host, remove the file",
        )
        return False
    return True


def _more_of(path: Path) -> list[Path]:
    """Return the further files of a large region, which vLLM creates for its own specs."""
    if path.name.startswith(NAME_PREFIX):
        return []  # beside engine "prod", "prod.1" is an engine, too
    return [
        each
        for each in path.parent.iterdir()
        if each.stem == path.name and each.suffix[1:].isdecimal() and not each.is_symlink()
    ]


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def doubled_rank(engine_id: str, rank: int, path: Path) -> ConfigError:
    """Return the refusal for a rank whose memory another rank of this number uses already."""
    return ConfigError(
        f"engine_id={engine_id!r}: rank {rank} has mapped {path} before. {SAME_ENGINE_ID}"
    )


def names(path: Path, file: os.stat_result) -> bool:
    """Return whether ``path`` is a name of this file, and not of a later one."""
    try:
        return os.path.samestat(path.lstat(), file)
    except FileNotFoundError:
        return False


def _leads_to(path: Path, fd: int) -> bool:
    """Return whether ``path`` names the file that is open as ``fd``."""
    return names(path, os.fstat(fd))


def _file_name(engine_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._-]{1,200}", engine_id):
        return NAME_PREFIX + engine_id
    return NAME_PREFIX + hashlib.sha256(engine_id.encode()).hexdigest()


def _in_steps(call: Callable[[int, int], None], start: int, end: int) -> None:
    while start < end:
        length = min(_POPULATE_STEP_BYTES, end - start)
        call(start, length)
        start += length
