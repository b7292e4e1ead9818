"""Names files being written, and removes those of dead writers.

A block is written under a temporary name beside its place and then renamed.
The name identifies the writer: a host id, the process and when that process
started, so that a later engine can distinguish a dead writer from a live one. Each
writer also keeps a marker in ``<namespace>/writers/`` that names the folders it
writes in (``unfinished.py``): only the folders in a dead writer's marker are listed.

The host id covers the boot and the process namespace too: two containers with
one host name do not share process numbers. A writer elsewhere cannot be checked,
so its files go when they are a day old, by the clock that sets files' times:
the server's. A marker is rewritten before each batch; one whose writer was idle for
a day goes an hour later, when the files of its last batch are as old, and is made again
(``Unfinished.is_removed``).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.fs.open_root import FOLDER_FLAGS
from kvtier_backends.fs.unfinished import folders_untrusted, marker_bytes_max
from kvtier_backends.posix import process_stat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

MARKERS_NAME: Final = "writers"
FOREIGN_AGE_S_MAX: Final = 24 * 3600.0
BATCH_S_MAX: Final = 3600.0  #: by far: an unfinished file is younger than its marker by less
_WRITER = re.compile(r"([0-9a-f]{12})-([0-9]{1,10})-([0-9]{1,20})")
_TEMPORARY = re.compile(r".+\.([0-9a-f]{12}-[0-9]{1,10}-[0-9]{1,20})-[0-9]+\.tmp")
_STAT_START_FIELD: Final = 19  # among the fields after the command's name, see proc(5)
_counter = itertools.count()  # process-wide: two tiers never share a name


class WriterProcess(NamedTuple):
    """One process that writes blocks, as parsed from a file's name."""

    host: str
    pid: int
    started: int  #: in clock ticks after the boot; 0 if the system does not report it

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.started}"

    def is_dead(self, me: WriterProcess, age_s: float) -> bool:
        """Return whether it has stopped writing, given the age of one of its files in seconds."""
        if self.host != me.host:
            return age_s > FOREIGN_AGE_S_MAX
        return _started(self.pid) != self.started


def this_writer() -> WriterProcess:
    """Return the identity of the calling process."""
    pid = os.getpid()
    return WriterProcess(_host_id(), pid, _started(pid) or 0)


def parse_writer_untrusted(name: str) -> WriterProcess | None:
    """Return the writer that a marker is named after, or None. Raises nothing."""
    found = _WRITER.fullmatch(name)
    return WriterProcess(found[1], int(found[2]), int(found[3])) if found else None


def parse_temporary_untrusted(name: str) -> WriterProcess | None:
    """Return the writer of the temporary file ``name``, or None if it is not ours."""
    found = _TEMPORARY.fullmatch(name)
    return parse_writer_untrusted(found[1]) if found else None


def temporary_path(path: str, writer: WriterProcess | str) -> str:
    """Return an unused name beside ``path``. ``writer``: itself or its text."""
    return f"{path}.{writer}-{next(_counter)}.tmp"


def add_marker(base: int, writer: WriterProcess, folder_mode: int, mode: int) -> int:
    """Create the marker of ``writer`` in the markers' folder, below the open folder. Idempotent.

    Returns the marker, open for writing.
    """
    with suppress(FileExistsError):
        os.mkdir(MARKERS_NAME, folder_mode, dir_fd=base)
    flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _markers(base) as folder:
        return os.open(str(writer), flags, mode, dir_fd=folder)


def remove_markers(base: int, names: Iterable[str]) -> None:
    """Remove the markers of these names, if they exist."""
    with suppress(OSError), _markers(base) as folder:
        for name in names:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def folder_time_s(base: int, me: WriterProcess) -> float:
    """Return the time by the clock that sets files' times: touches this writer's marker.

    This host's clock may be hours off. Without a marker, the result makes all files young.
    """
    try:
        with _markers(base) as folder:
            os.utime(str(me), dir_fd=folder, follow_symlinks=False)
            return os.stat(str(me), dir_fd=folder, follow_symlinks=False).st_mtime
    except OSError:
        return float("-inf")


def dead_markers(base: int, me: WriterProcess) -> list[str]:
    """Return the names of the markers of writers that have stopped writing."""
    dead = []
    now_s = folder_time_s(base, me)
    with suppress(OSError), _markers(base) as folder:
        for name in _names(folder):
            writer = parse_writer_untrusted(name)
            age_s = _age_s(name, folder, now_s) - BATCH_S_MAX
            if writer is not None and writer.is_dead(me, age_s):
                dead.append(name)
    return dead


def folders_of_dead(base: int, names: Iterable[str]) -> set[str] | None:
    """Return the folders that these markers name; None if one of them is unreadable."""
    found: set[str] = set()
    for name in names:
        try:
            with (
                _markers(base) as folder,
                _opened(name, folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as marker,
            ):
                folders = folders_untrusted(os.read(marker, marker_bytes_max()))
        except OSError:
            return None
        if folders is None:
            return None
        found |= folders
    return found


def sweep_after(
    dead: Iterable[str], base: int, blocks: int, me: WriterProcess, keep_on: Callable[[], bool]
) -> Iterator[str]:
    """Remove the temporary files of writers with these markers, and yield their names.

    Then remove the markers, if the sweep was completed: otherwise the next engine continues.
    """
    folders, now_s = folders_of_dead(base, dead), folder_time_s(base, me)
    yield from _sweep_files(base, _names(base), me, now_s)  # of descriptions
    if folders is None:
        yield from sweep(blocks, me, now_s, keep_on)
    else:
        yield from sweep_only(blocks, folders, me, now_s, keep_on)
    if keep_on():  # it may have taken long: a writer that was idle for a day may write again
        remove_markers(base, {*dead} & {*dead_markers(base, me)})


def sweep_only(
    folder: int, names: Iterable[str], me: WriterProcess, now_s: float, keep_on: Callable[[], bool]
) -> Iterator[str]:
    """Remove as ``sweep`` does, but only in the open folder itself and in these below it."""
    yield from _sweep_files(folder, _names(folder), me, now_s)
    for name in sorted(names):
        if not keep_on():
            return
        first, _, second = name.partition("/")
        with suppress(OSError), _opened(first, folder) as outer, _opened(second, outer) as below:
            yield from _sweep_files(below, _names(below), me, now_s)


def sweep(
    folder: int, me: WriterProcess, now_s: float, keep_on: Callable[[], bool]
) -> Iterator[str]:
    """Remove the temporary files of dead writers below the open folder, and yield their names.

    ``now_s``: as returned by ``folder_time_s``.
    Walks all fan-out folders, so it belongs in a thread of its own; ends early once
    ``keep_on()`` is false. Skips what cannot be listed or removed, and follows no links.
    """
    names = _names(folder)
    for name, is_folder in names.items():
        if not keep_on():
            return
        if is_folder:
            with suppress(OSError), _opened(name, folder) as below:
                yield from sweep(below, me, now_s, keep_on)
    yield from _sweep_files(folder, names, me, now_s)


def _sweep_files(
    folder: int, names: Mapping[str, bool], me: WriterProcess, now_s: float
) -> Iterator[str]:
    for name, is_folder in names.items():
        writer = None if is_folder else parse_temporary_untrusted(name)
        if writer is not None and writer.is_dead(me, _age_s(name, folder, now_s)):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
                yield name


@contextmanager
def _opened(name: str, folder: int, flags: int = FOLDER_FLAGS) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _markers(base: int) -> AbstractContextManager[int]:
    return _opened(MARKERS_NAME, base)


def _names(folder: int) -> dict[str, bool]:
    """Return the names in an open folder, each with whether it is a folder.

    If a filesystem lists names alone (FUSE, some network filesystems), each type is queried
    through the listing's descriptor, which must still be open.
    """
    try:
        with (
            _opened(".", folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as listed,
            os.scandir(listed) as entries,
        ):
            return {entry.name: _is_folder(entry) for entry in entries}
    except OSError:
        return {}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _age_s(name: str, folder: int, now_s: float) -> float:
    try:
        return now_s - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _started(pid: int) -> int | None:
    """Return when the process started, None if there is no such process."""
    try:
        return int(process_stat(pid)[_STAT_START_FIELD])
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.isdir("/proc/self") or not _alive(pid) else 0
    except (OSError, ValueError, IndexError):
        return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _host_id() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
