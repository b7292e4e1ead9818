"""Faults of a filesystem, and how often they come."""

from __future__ import annotations

import errno
from collections import Counter
from typing import TYPE_CHECKING, Final

from stress.failure import Failure
from stress.filesystem.fuse_folder import FuseFolder
from stress.plan import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from stress.plan import Fault

CALLS: Final = (
    "*",
    "create",
    "fallocate",
    "getattr",
    "mkdir",
    "open",
    "read",
    "readdir",
    "rename",
    "truncate",
    "unlink",
    "write",
)
_ERRORS: Final = """
    EACCES EAGAIN EBADF EBUSY EDQUOT EEXIST EFBIG EINTR EINVAL EIO EISDIR ELOOP EMFILE EMLINK
    ENAMETOOLONG ENFILE ENODEV ENOENT ENOMEM ENOSPC ENOSYS ENOTCONN ENOTDIR ENOTEMPTY ENXIO
    EOPNOTSUPP EPERM EROFS ESTALE ETIMEDOUT ETXTBSY EXDEV
"""
ERRORS: Final = tuple(_ERRORS.split())
_SPELL_S: Final = (0.1, 2.0)
_EVERY_MAX: Final = 8

KINDS: Final = (
    Kind("fs_hang", CALLS, per_minute=8, spell_s=(0.1, 4.0)),
    Kind("fs_delay", CALLS, per_minute=8, spell_s=_SPELL_S),
    Kind("fs_fail", ERRORS, per_minute=40, spell_s=_SPELL_S),
    Kind("fs_full", ("*",), per_minute=4, spell_s=_SPELL_S),
    Kind("fs_lie", ("read",), per_minute=15, spell_s=_SPELL_S),
    Kind("fs_tear", ("write",), per_minute=10, spell_s=_SPELL_S),
    Kind("fs_short", ("read", "write"), per_minute=10, spell_s=_SPELL_S),
    Kind("fs_vanish", ("mount",), per_minute=2, spell_s=(0.2, 4.0)),
)


class FilesystemFaults:
    """Does them to one mounted folder, and takes them back. One thread.

    A filesystem that vanished comes back under another device number: it is a new mount.
    """

    def __init__(self, source: Path, mount: Path, injected: Counter[str]) -> None:
        self._source = source
        self._mount = mount
        self._injected = injected
        self._counted: Counter[str] = Counter()  # of this mount, taken in so far
        self._vanished_by: str | None = None  # the fault
        self._folder = FuseFolder(source, mount)

    def begin(self, fault: Fault) -> int:
        """Do a fault; what it does is counted where it is done, but a whole filesystem here."""
        if self._vanished_by is not None:
            return 0
        kind = fault.kind.removeprefix("fs_")
        if kind == "vanish":
            self._take_counts()
            self._folder.vanish()
            self._vanished_by = fault.seed
            return 1
        calls, error = (fault.target,), 0
        if kind == "fail":
            calls, error = (fault.dice.choice(CALLS),), vars(errno)[fault.target]
        self._folder.begin(
            fault.seed,
            kind,
            *calls,
            error=error,
            seconds=fault.dice.uniform(0.001, 0.3),
            every=1 if kind == "hang" else fault.dice.randrange(1, _EVERY_MAX),
        )
        return 0

    def end(self, fault: Fault) -> None:
        """Take a fault back. Raises ``Failure`` if something was written where nothing is."""
        if self._vanished_by == fault.seed:
            left = sorted(each.name for each in self._mount.iterdir())
            if left:
                raise Failure(f"written into the bare mount point: {left[:5]}")
            self._vanished_by = None
            self._counted.clear()
            self._folder = FuseFolder(self._source, self._mount)
        elif self._vanished_by is None and fault.kind != "fs_vanish":
            self._folder.end(fault.seed)
            self._take_counts()

    def is_ready(self) -> bool:
        """Tell whether the filesystem is mounted, at the start."""
        return self._folder.is_mounted()

    def unmount(self) -> None:
        """Take the filesystem away for good."""
        if self._vanished_by is None:
            self._folder.vanish()

    def _take_counts(self) -> None:
        """Take in to how many calls something was done."""
        done = Counter(self._folder.done())
        for kind, count in (done - self._counted).items():
            self._injected[f"fs_{kind}"] += count
        self._counted = done
