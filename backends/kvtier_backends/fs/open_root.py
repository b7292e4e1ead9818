"""Holds the folder that a tier opened at its start: all reads and writes go below it, or nowhere.

A path may come to name something else while an engine runs: its filesystem is
unmounted, and writes go to the disk below; it is replaced by a link; it is
deleted and created again. So folders are kept open, and files are named
relative to them. The path is checked periodically: if it names another
folder, that one is opened only if it is known to be the same place. Otherwise
the tier has no folder: it releases the old one, and checks again later.

A special file in a file's place is refused, and named in the error: it is never read or awaited.

# Invariant: a folder is known by ``config.json``, to the nanosecond in which it was written:
#            that stays through a remount or a copy, and two folders don't share it. A new
#            folder is opened only where the old one was deleted, on the same filesystem.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier_backends.fs.unfinished import Unfinished
from kvtier_backends.posix import filesystem_of, kind_of_file, make_folders

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.fs.layout import Layout


CHECK_PAUSE_S: Final = 1.0
"""Interval between checks of the path, while the tier has work."""

CONFIG_NAME: Final = "config.json"
FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOTHING_YET: Final = "holds nothing yet that this engine could load: others have to store it first"
_GONE: Final = (FileNotFoundError, NotADirectoryError)


class PlaceLost(OSError):
    """Raised if the path no longer names the tier's folder. It may do so again later."""


class OpenRoot:
    """The open folders of a namespace. They are closed when the last user releases them."""

    def __init__(
        self, path: str, *, allow_world_writable: bool = False, read_only: bool = False
    ) -> None:
        """Open the root, following links. Raises ``OSError``."""
        self.allow_world_writable = allow_world_writable
        self.read_only = read_only  #: nothing is created there
        self.unfinished: Unfinished | None = None  #: this writer's marker, once there is one
        self.base = self.blocks = self.root = -1
        self.is_open_below = False
        self.path = path
        self.root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        for descriptor in {self.root, self.base, self.blocks} - {-1}:
            with suppress(OSError):
                os.close(descriptor)

    def is_open_to_all(self, folder: int) -> bool:
        """Return whether anyone may write to one of its folders although that is not allowed."""
        return not self.allow_world_writable and bool(os.fstat(folder).st_mode & stat.S_IWOTH)

    def keep_marker(self, descriptor: int) -> None:
        """Keep this writer's marker open as long as the folders are."""
        self.unfinished = Unfinished(descriptor)

    def open_below(self, layout: Layout, *, make: bool) -> None:
        """Open the namespace's folders, and create missing ones. Raises ``OSError``.

        ``base`` holds ``config.json``, ``blocks`` the blocks; both may be the same folder.
        """
        self.base = _open_folder(layout.base_name, self.root, layout.folder_mode, make=make)
        self.blocks = self.base
        if layout.blocks_name != layout.base_name:
            # An existing namespace may lack a rank's own folder: it is still the same place.
            make = not self.read_only
            self.blocks = _open_folder(layout.blocks_name, self.root, layout.folder_mode, make=make)
        if self.read_only and self.written_ns() is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), layout.config_path)
        self.is_open_below = True

    def stands_below(self, layout: Layout) -> bool:
        """Return whether its folders are still the namespace's. Raises ``OSError``."""
        for name, descriptor in ((layout.base_name, self.base), (layout.blocks_name, self.blocks)):
            there = os.stat(name, dir_fd=self.root, follow_symlinks=False)
            try:
                held = os.fstat(descriptor)
            except OSError as problem:
                if problem.errno == errno.ESTALE:  # NFS: another machine has recreated it
                    return False
                raise
            if not os.path.samestat(there, held):
                return False
        return True

    def written_ns(self) -> int | None:
        """Return when its ``config.json`` was written, None if there is none."""
        try:
            return os.stat(CONFIG_NAME, dir_fd=self.base, follow_symlinks=False).st_mtime_ns
        except _GONE:
            return None

    def is_named_by(self, there: os.stat_result) -> bool:
        """Return whether ``there`` is this root's status; False if it can no longer be queried."""
        try:
            return os.path.samestat(there, os.fstat(self.root))
        except OSError:
            return False

    def is_deleted(self) -> bool:
        """Return whether the root itself was removed, and not only its name from this path."""
        try:
            return os.fstat(self.root).st_nlink == 0
        except OSError as problem:
            return problem.errno == errno.ESTALE  # NFS: removed by another machine


def _open_folder(name: str, parent: int, mode: int, *, make: bool) -> int:
    """Open a folder in another; with ``make``, create it if it is missing.

    Opens it first, since most exist: each call here costs a store one more wait for the GIL.
    """
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    return os.open(name, FOLDER_FLAGS, dir_fd=parent)


class RootHandle:
    """Holds the place, and releases it once the path no longer leads there. Any thread."""

    def __init__(
        self,
        layout: Layout,
        place: OpenRoot,
        settle: Callable[[OpenRoot], None],
        on_return: Callable[[], None],
    ) -> None:
        """``settle`` sets up a place that was just opened.

        ``on_return`` is called when a lost place is back. A read-only place may have
        no folders below its root yet: they are opened once others have created them.
        """
        self._path = place.path
        self._real_path = os.path.realpath(place.path)
        self._layout = layout
        self._settle = settle
        self._on_return = on_return
        self._place: OpenRoot | None = place if place.is_open_below else None
        self._allow_world_writable = place.allow_world_writable
        self._read_only = place.read_only
        self._device = os.fstat(place.root).st_dev
        self._written_ns = place.written_ns() if self._place else None
        self._is_deleted = False  # the last root was deleted
        self._why = _NOTHING_YET
        self._next_check_s = time.monotonic() + CHECK_PAUSE_S
        self._checking = threading.Lock()
        self._is_closed = False

    def current(self) -> OpenRoot:
        """Return the place; keep it while in use. Raises ``PlaceLost``."""
        now_s = time.monotonic()
        # One thread checks: on storage that hangs, the others must not wait for it.
        if now_s >= self._next_check_s and self._checking.acquire(blocking=False):
            try:
                self._next_check_s = now_s + CHECK_PAUSE_S
                self._check(make=False)
            finally:
                self._checking.release()
        place = self._place
        if place is None:
            raise PlaceLost(errno.ESTALE, self._why, self._path)
        return place

    def doubt(self) -> None:
        """Have the next call check the path: one of the handles was stale."""
        self._next_check_s = 0.0

    def make_again(self) -> OpenRoot:
        """Recreate the folders if they were deleted. Raises ``OSError`` if that fails."""
        with self._checking:
            self._check(make=True)
        return self.current()

    def close(self) -> None:
        """Release it permanently. Calls in progress may go on."""
        self._is_closed = True
        self._why = "it was closed"
        self._place = None

    # --- with ``_checking`` ---

    def _check(self, *, make: bool) -> None:
        if self._is_closed:
            return
        try:
            there = os.stat(self._path)
        except _GONE:
            self._path_is_gone(make=make)
            return
        except OSError:
            return  # an error of the medium does not show what the path names
        place = self._place
        if place is not None:
            if place.is_named_by(there):
                self._check_below(place, make=make)
                return
            self._is_deleted = place.is_deleted()
        if stat.S_ISDIR(there.st_mode):
            self._reopen(make=self._may_start_over(there.st_dev))
        else:
            self._lose("it is no longer a folder")

    def _path_is_gone(self, *, make: bool) -> None:
        if self._place is not None:
            self._is_deleted = self._place.is_deleted()
        if not self._is_deleted:
            self._lose("it is no longer there")
        elif make and self._may_start_over(filesystem_of(os.path.dirname(self._real_path))):
            with suppress(FileExistsError):
                make_folders(self._real_path)
            self._reopen(make=True)

    def _may_start_over(self, device: int) -> bool:
        """Return whether the tier may start over in an empty folder: the old one was deleted."""
        return (
            self._is_deleted
            and not self._read_only
            and device == self._device
            and os.path.realpath(self._path) == self._real_path  # no link has replaced it
        )

    def _check_below(self, place: OpenRoot, *, make: bool) -> None:
        """Check the folders below the right root: they may have been recreated there."""
        try:
            stands = place.stands_below(self._layout)
            written_ns = place.written_ns()
        except _GONE:
            if make:
                self._reopen(make=True)
            return  # until then no block is found there
        except OSError:
            return  # as above
        if stands and written_ns is not None:
            self._written_ns = written_ns
        else:
            self._reopen(make=not self._read_only)

    def _reopen(self, *, make: bool) -> None:
        """Open the folder that the path names now, if it is the place or may become it."""
        try:
            place = OpenRoot(
                self._path,
                allow_world_writable=self._allow_world_writable,
                read_only=self._read_only,
            )
            root = os.fstat(place.root)
            if place.is_open_to_all(place.root):
                self._lose("anyone may write there now")
                return
            # The path may have come to name another folder since it was checked.
            is_same = self._place is not None and self._place.is_named_by(root)
            if make and not (is_same or (self._is_deleted and root.st_dev == self._device)):
                self._lose("another folder has taken its place")
                return
            place.open_below(self._layout, make=make)
            others_made_it = self._read_only and (is_same or self._written_ns is None)
            if not make and not others_made_it and place.written_ns() != self._written_ns:
                self._lose("another folder has taken its place")
                return
            self._settle(place)
        except _GONE:
            if self._written_ns is not None:
                self._lose("another folder has taken its place")
            return
        except OSError as problem:
            self._lose(f"it cannot be opened ({problem.strerror})")
            return
        was_lost = self._place is None
        self._place = None if self._is_closed else place
        self._device = root.st_dev
        self._written_ns = place.written_ns()
        self._is_deleted = False
        if was_lost:
            self._on_return()

    def _lose(self, why: str) -> None:
        # First the reason: other threads raise it as soon as there is no place.
        self._why = (
            f"{why}: was its filesystem unmounted? Nothing is stored or loaded until it is back; "
            "to use the folder that is there now, restart the engine"
        )
        self._place = None


class SpecialFile(OSError):
    """Raised if a block's place holds something other than a regular file. The text names it."""


def refuse_special_file(descriptor: int, path: str) -> None:
    """Raise ``SpecialFile`` if the descriptor is not of a regular file."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise special_file(mode, path)


def special_file(mode: int, path: str) -> SpecialFile:
    """Return the error for something that is not a file, given its mode."""
    return SpecialFile(errno.ESPIPE, f"{kind_of_file(mode)} lies where a file should be", path)


def names_in(folder: int) -> list[str]:
    """Return the names in an open folder, even one opened with ``O_PATH``. Raises ``OSError``."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def open_both(blocks: int, first: str, second: str, mode: int = 0, *, make: bool = False) -> int:
    """Open one folder in another. Raises ``OSError``, also for a symbolic link.

    ``make``: create missing ones with this ``mode``.
    """
    outer = _open_folder(first, blocks, mode, make=make)
    try:
        return _open_folder(second, outer, mode, make=make)
    finally:
        os.close(outer)
