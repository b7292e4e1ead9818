"""Removes block files, and scans for them, in a thread for the cleaner.

All calls block, and work below the open root. A leaf is listed to find a file by its number,
because the manifest has no names. Folders stay unless the filesystem has no room: a writer may
be about to use one. Other threads of the process wait for the interpreter while this one works,
so ``Pace`` slows it down.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier_backends.fs.bound.account import Scanned
from kvtier_backends.fs.bound.protocol import (
    KNOWN,
    SPACE,
    block_number,
    leaf_folder,
    leaf_number,
    namespace_number,
)
from kvtier_backends.fs.open_root import names_in
from kvtier_backends.posix import GONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvtier_backends.fs.bound.protocol import Array


WORK_S: Final = 0.005
"""One stretch of work: about as long as Python lets a thread keep the interpreter."""


class Pace:
    """Limits one thread to a share of the time. Call it from that thread only."""

    def __init__(self, duty: float) -> None:
        """``duty``: the share, above 0; with 1 it never rests. Waiting for storage is not work."""
        self._rest_share = 1 / duty - 1
        self._worked_s = time.thread_time()

    def rest(self) -> None:
        """Wait, if enough work was done. Call it often, for example between two folders."""
        worked_s = time.thread_time() - self._worked_s
        if self._rest_share and worked_s >= WORK_S:
            time.sleep(worked_s * self._rest_share)
            self._worked_s = time.thread_time()


BLOCK_SUFFIXES: Final = (".kv", ".bin")
_DEPTH: Final = 3  #: of block files below the root: namespace, two folders
_LIST_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScanGivenUp(OSError):
    """Raised when a scan is no longer needed."""


@dataclass
class Evicted:
    """The result of an eviction."""

    numbers: list[int] = field(default_factory=list)  #: all blocks that are gone, by us or before
    names: list[str] = field(default_factory=list)  #: below the root, of the removed files
    bytes: int = 0  #: of the removed files
    failed: OSError | None = None


def evict(
    root: int,
    victims: Array,
    keep_on: Callable[[], bool] = lambda: True,
    *,
    folders: bool = False,
) -> Evicted:
    """Remove these blocks. Those that cannot be removed are left, and ``failed`` has the reason.

    Once ``keep_on()`` is false, the rest is left: storage may be slow. ``folders``: also their
    folders, if they are empty then. A store that is about to use one fails.
    """
    evicted = Evicted()
    namespaces: dict[int, list[str]] = {}
    try:
        for name in names_in(root):
            namespaces.setdefault(namespace_number(name), []).append(name)
    except OSError as problem:  # they may be there
        return Evicted(failed=problem)
    for victim in victims:
        if not keep_on():
            break
        number = int(victim["block"])
        namespace, folder = leaf_folder(int(victim["leaf"]))
        try:
            for name in namespaces.get(namespace, ()):
                _evict_one(root, f"{name}/{folder}", number, evicted)
                if folders:
                    _remove_empty(root, f"{name}/{folder}")
            evicted.numbers.append(number)
        except OSError as problem:
            evicted.failed = problem
    return evicted


def _evict_one(root: int, path: str, number: int, evicted: Evicted) -> None:
    blocks_name, _, folder = path.partition("/")
    try:
        with _opened(path, root) as leaf:
            for name in os.listdir(leaf):
                if block_number(blocks_name, f"{folder}/{name}") == number:
                    status = os.stat(name, dir_fd=leaf, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        os.unlink(name, dir_fd=leaf)
                        evicted.bytes += status.st_size
                        evicted.names.append(f"{path}/{name}")
    except OSError as problem:
        if problem.errno not in GONE:
            raise


def _remove_empty(root: int, path: str) -> None:
    """Remove a leaf and its parent folder, if they are empty."""
    with suppress(OSError):
        os.rmdir(path, dir_fd=root)
        os.rmdir(os.path.dirname(path), dir_fd=root)


def scan(files: Iterable[tuple[str, os.stat_result]], epoch: int, epoch_s: float) -> Scanned:
    """Count all files below the root, as ``walk_files`` finds them.

    Raises ``OSError`` as that does: an incomplete count is not used.

    Blocks without reported uses get an epoch from their files' times, which are compared only
    with one another.
    """
    found: list[tuple[int, int, int]] = []
    times: list[float] = []
    others = 0
    for path, status in files:
        blocks_name, _, name = path.partition("/")
        leaf = leaf_number(blocks_name, name.rpartition("/")[0])
        if leaf is None or not name.endswith(BLOCK_SUFFIXES):
            others += status.st_size
            continue
        found.append((block_number(blocks_name, name), leaf, status.st_size))
        times.append(max(status.st_mtime, status.st_atime))
    known = np.zeros(len(found), KNOWN)
    if found:
        known["block"], known["leaf"], known["size"] = np.array(found, np.uint64).T
        age = (max(times) - np.array(times)) / epoch_s
        known["epoch"] = np.maximum(0, epoch - np.minimum(age, epoch)).astype(np.uint32)
    return Scanned(known, others)


def walk_files(
    folder: int, path: str, depth: int, keep_on: Callable[[], bool]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield files below an open folder, not the protocol's. Raises ``ScanGivenUp``, ``OSError``."""
    with _opened(path or ".", folder) as opened, os.scandir(opened) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in names:
            below = f"{path}/{name}" if path else name
            if is_folder:
                if not keep_on():
                    raise ScanGivenUp("the scan was given up")
                if below != SPACE:
                    with suppress(FileNotFoundError):
                        yield from walk_files(folder, below, depth + 1, keep_on)
                continue
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not _is_ours(name, depth):
                    yield below, status


def _is_ours(name: str, depth: int) -> bool:
    """Return whether a file is a description or a marker, and holds no block's bytes."""
    return depth < _DEPTH and not name.endswith((*BLOCK_SUFFIXES, ".tmp"))


@contextmanager
def _opened(path: str, folder: int) -> Iterator[int]:
    descriptor = os.open(path, _LIST_FLAGS, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
