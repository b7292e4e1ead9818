"""POSIX helpers that the ``fs`` and ``disk`` backends share: folders, errors, O_DIRECT, pages.

Any of these functions may hang if the storage hangs.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.errors import ConfigError

O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
PAGE_BYTES: Final = 4096  #: the smallest O_DIRECT transfer, and the unit of both on-disk formats
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR})

NO_FOLDER: Final = (
    "is not there, and with read_only no folder is made. Mount or create it, or name another."
)
NOT_A_FOLDER: Final = "is not a folder, or lies below something that is not. Name a folder."
_REMEDIES: Final = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Give this user the rights to it"),
    **dict.fromkeys(NO_ROOM, "Free space"),
    errno.ENOENT: "Create it for this user",
    errno.EROFS: "Mount it for writing; one that turned read-only had errors: see the kernel's log",
}
"""Remedies for folders that cannot be used, by error."""
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


def padded_bytes(size: int) -> int:
    """Return ``size`` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def kind_of_file(mode: int) -> str:
    """Return the kind of a file by its mode, in words: "a FIFO", "a folder"."""
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def process_stat(pid: int) -> list[bytes]:
    """Return a process's status fields, those behind its name; see proc(5).

    Raises ``FileNotFoundError`` or ``ProcessLookupError`` without such a process, and ``OSError``.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


# --- folders ---


def make_folders(path: str, mode: int = 0o700) -> None:
    """Create ``path`` and its missing parents, each with ``mode`` (umask applies).

    Raises ``FileExistsError`` if the path exists and is not a folder, and ``OSError``.
    """
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        make_folders(os.path.dirname(path), mode)
        with suppress(FileExistsError):
            os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def filesystem_of(path: str) -> int:
    """Return the number of the filesystem that the path is, or would be, on.

    Raises ``OSError``.
    """
    while True:
        try:
            return os.stat(path).st_dev
        except FileNotFoundError:
            path = os.path.dirname(path)


def filesystem_bytes(path: str) -> int | None:
    """Return the size of a path's filesystem; None if it reports none (ramfs, many FUSE servers).

    Raises ``OSError``.
    """
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize or None


def is_elsewhere(path: str, filesystem: int | None) -> bool:
    """Return whether a path leads to a filesystem other than the one the tier has used.

    Raises ``OSError``.
    """
    return filesystem is not None and filesystem_of(path) != filesystem


NOTHING_OF_OURS: Final = (
    "is on another filesystem than before, and nothing of this tier is there: was its filesystem "
    "unmounted? Mount it again; to use the folder that is there now, restart the engine."
)


def shared_mode(mode: int, folder_mode: int) -> int:
    """Return the mode for a new entry in a folder: its group gets the folder's group rights.

    ``mode``: the mode in a folder of a single user; the umask applies, too.
    """
    group = folder_mode & stat.S_IRWXG
    return mode | (group if mode & stat.S_IXUSR else group & ~stat.S_IXGRP)


def world_writable(path: str = "") -> str:
    """Return the refusal of a folder that anyone may write to, with the remedy.

    ``path`` is the folder if it is not the one that the option names.
    """
    where = f"write to {path}" if path else "write there"
    return (
        f"is open to planted blocks: anyone may {where}. Run chmod o-w on it, or name a "
        "folder of this user's own. Where a mount gives all folders this mode, whatever chmod "
        "says (SMB, Azure Files, gcsfuse), mount it with dir_mode=0770, or set "
        "allow_world_writable to true, best beside a key that signs or encrypts."
    )


def fault_of_rights(folder: int, path: str, *, read_only: bool = False) -> str | None:
    """Return why this user can't use an open folder's contents, with the remedy; None if it can."""
    if os.access(".", _rights(read_only=read_only), dir_fd=folder):
        return None
    if os.fstatvfs(folder).f_flag & os.ST_RDONLY:
        return None  # a write there reports this better
    found = os.fstat(folder)
    return (
        f"cannot be used: in {path}, which belongs to user {found.st_uid} and group "
        f"{found.st_gid} and has mode {stat.S_IMODE(found.st_mode):04o}, this user may not "
        f"{'read' if read_only else 'read and write'}. If several users of one group share the "
        "folder, run chmod -R g+rwX on it, and start all engines with umask 007; or name another."
    )


def check_folder(
    path: str,
    refuse: Callable[[str], ConfigError],
    *,
    allow_world_writable: bool = False,
    read_only: bool = False,
) -> None:
    """Raise a refusal with the remedy if ``path`` cannot be a tier's folder.

    One that may pass is raised from its ``OSError``, as at an engine's start. Changes nothing.
    A missing folder will be created, so the nearest one above it is checked; with ``read_only``
    it is a fault.
    """
    try:
        above, found = nearest(path)
    except NotADirectoryError:
        raise refuse("lies below something that is not a folder. Name a folder.") from None
    except OSError as problem:
        raise refuse(unusable(problem)) from problem
    if not stat.S_ISDIR(found.st_mode):
        what = "is not a folder" if above == path else "lies below something that is not a folder"
        raise refuse(f"{what}. Name a folder.")
    if above == path and found.st_mode & stat.S_IWOTH and not allow_world_writable:
        raise refuse(world_writable())
    if read_only and above != path:
        raise refuse(NO_FOLDER) from FileNotFoundError(errno.ENOENT, "it is not there", path)
    # Instead of creating a file, and with the ids that an engine would have: this process's.
    if os.access(above, _rights(read_only=read_only), effective_ids=True):
        return
    fault, cannot = OSError(errno.EACCES, "this user may not write there"), "cannot be written"
    if read_only:
        fault, cannot = OSError(errno.EACCES, "this user may not read it"), "cannot be read"
    elif os.statvfs(above).f_flag & os.ST_RDONLY:
        fault = OSError(errno.EROFS, "its filesystem is read-only")
    raise refuse(
        unusable(fault, cannot if above == path else f"cannot be created in {above}")
    ) from fault


def unusable(problem: OSError, cannot: str = "cannot be used", where: str = "") -> str:
    """Return the fault of a folder that ``problem`` keeps from use, and its remedy.

    ``cannot``: the words before the reason; ``where``: the path within the folder.
    """
    at = f": {where}" if where else ""
    remedy = _REMEDIES.get(problem.errno or 0, "See to its storage, and to the kernel's log")
    return f"{cannot} ({problem.strerror}{at}). {remedy}, or name another folder."


def _rights(*, read_only: bool) -> int:
    return os.R_OK | os.X_OK | (0 if read_only else os.W_OK)


def try_folder(path: str) -> str:
    """Write an unnamed file in a folder and read it back; return the result in words.

    Raises ``OSError``.
    """
    if not os.path.isdir(path):
        return "its folder is not there yet, so nothing was tried"
    page = os.urandom(PAGE_BYTES)
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(page)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        if file.read() != page:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    return "a file was written in its folder, read and removed"


def clock_ahead_s(path: str) -> float:
    """Return how far the clock behind this folder's file times is ahead of this host's.

    Creates an unnamed file there. Raises ``OSError``.
    """
    with tempfile.TemporaryFile(dir=path) as file:
        return os.fstat(file.fileno()).st_mtime - time.time()


def no_room(problem: OSError, folder: int) -> OSError:
    """Return an out-of-space error in an open folder as the log shows it: once, until it ends.

    The system's own text is the same for bytes and inodes.
    """
    why = problem.strerror
    with suppress(OSError):
        left = os.fstatvfs(folder)
        if left.f_files and not left.f_favail:
            why = "no inodes are left"
    return OSError(problem.errno, f"full since {time.strftime('%F %T %z')}: {why}")


def not_working(problem: OSError) -> str:
    """Return the message for a folder in which ``try_folder`` failed with this error."""
    return f"was tried: writing and reading a file failed ({problem.strerror}). See to the storage."


def nearest(path: str) -> tuple[str, os.stat_result]:
    """Return a path that exists, with its stat: the path itself, or the nearest folder above it.

    Raises ``OSError``.
    """
    try:
        return path, os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path) or os.path.dirname(path) == path:
            raise
        return nearest(os.path.dirname(path))
