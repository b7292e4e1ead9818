"""Faults of a filesystem, and how often they come."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stress.failure import Failure
from stress.filesystem.fuse_folder import FuseFolder, hold, release
from stress.filesystem.volume import Volume
from stress.plan import Kind
from stress.runtime.processes import ProcessFaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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
    ENAMETOOLONG ENFILE ENODEV ENOENT ENOMEM ENOSPC ENOTCONN ENOTDIR ENOTEMPTY ENXIO
    EOPNOTSUPP EPERM EROFS ESTALE ETIMEDOUT ETXTBSY EXDEV
"""
ERRORS: Final = tuple(_ERRORS.split())
"""Without ENOSYS: the kernel takes that for a call that the mount never has, and asks no more."""

OFTEN: Final = ("*", "create", "getattr", "open", "read", "write")
"""What tiers call all the time: a short spell hits something."""

OFTEN_FRACTION: Final = 0.6
KILLED_FRACTION: Final = 0.5
DELAYS_S: Final = (0.001, 0.1)
_SPELL_S: Final = (0.05, 1.0)
_SHORT_S: Final = (0.02, 0.4)
_EVERY_MAX: Final = 6
_LEFT_BYTES_MAX: Final = 64 << 10
_LEFT_FILES_MAX: Final = 8

# Many short spells and few long ones: breakers open, and close again before the next.
KINDS: Final = (
    Kind("fs_hang", CALLS, per_minute=10, spell_s=(0.05, 2.0)),
    Kind("fs_delay", CALLS, per_minute=40, spell_s=_SHORT_S),
    Kind("fs_fail", ERRORS, per_minute=150, spell_s=_SHORT_S),
    Kind("fs_full", ("ENOSPC", "EDQUOT"), per_minute=15, spell_s=_SHORT_S),
    Kind("fs_no_room", ("bytes", "files"), per_minute=20, spell_s=_SPELL_S),
    Kind("fs_lie", ("read",), per_minute=60, spell_s=_SPELL_S),
    Kind("fs_tear", ("write",), per_minute=40, spell_s=_SPELL_S),
    Kind("fs_short", ("read", "write"), per_minute=40, spell_s=_SPELL_S),
    Kind("fs_vanish", ("mount",), per_minute=2, spell_s=(0.2, 5.0)),
)


class FilesystemFaults:
    """Does them to one mounted folder, and takes them back. One thread.

    Below it is a filesystem of its own, which really runs out of room (``fs_no_room``). The
    mounted one that vanished comes back under another device number: it is a new mount.
    """

    def __init__(
        self, source: Path, mount: Path, injected: Counter[str], tiers: Sequence[str] = ()
    ) -> None:
        """``tiers``: whose processes may be killed while nothing is mounted."""
        self._tiers = tiers
        self._processes = ProcessFaults()
        self._held = mount.with_name("held")
        self._held.mkdir()
        self._source = source
        self._mount = mount
        self._injected = injected
        self._counted: Counter[str] = Counter()  # of this mount, taken in so far
        self._vanished_by: str | None = None  # the fault
        self._without_room: set[str] = set()  # the faults
        self._volume = Volume(source)
        self._folder = FuseFolder(source, mount)

    def begin(self, fault: Fault) -> int:
        """Do a fault; what it does is counted where it is done, but a whole filesystem here."""
        if self._vanished_by is not None:
            return 0
        kind = fault.kind.removeprefix("fs_")
        if kind == "vanish":
            self._take_counts(self._folder.done())
            hold(self._mount, self._held)
            self._folder.vanish()
            self._vanished_by = fault.seed
            return 1 + (self._kill(fault) if fault.dice.random() < KILLED_FRACTION else 0)
        if kind == "no_room":
            self._without_room.add(fault.seed)
            if fault.target == "bytes":
                self._volume.leave(room_bytes=fault.dice.randrange(1, _LEFT_BYTES_MAX))
            else:
                self._volume.leave(files=fault.dice.randrange(_LEFT_FILES_MAX))
            return 0
        call, error = fault.target, 0
        if kind == "fail":
            calls = OFTEN if fault.dice.random() < OFTEN_FRACTION else CALLS
            call, error = fault.dice.choice(calls), vars(errno)[fault.target]
        elif kind == "full":
            call, error = "*", vars(errno)[fault.target]
        self._folder.begin(
            fault.seed,
            kind,
            call,
            error=error,
            seconds=fault.dice.uniform(*DELAYS_S),
            every=1 if kind == "hang" else fault.dice.randrange(1, _EVERY_MAX),
        )
        return 0

    def _kill(self, fault: Fault) -> int:
        """Kill a tier's process meanwhile: the next one starts where nothing is."""
        target = fault.dice.choice(self._tiers)
        return self._processes.begin(replace(fault, kind="kill", target=target, for_s=0.0))

    def end(self, fault: Fault) -> None:
        """Take a fault back. Raises ``Failure`` if something was written where nothing is."""
        if fault.seed in self._without_room:
            self._without_room.remove(fault.seed)
            if not self._without_room:
                self._volume.leave()
        if self._vanished_by == fault.seed:
            left = sorted(each.name for each in self._mount.iterdir())
            if left:
                raise Failure(f"written into the bare mount point: {left[:5]}")
            self._vanished_by = None
            self._counted.clear()
            self._folder = FuseFolder(self._source, self._mount)
        elif self._vanished_by is None and fault.kind != "fs_vanish":
            self._take_counts(self._folder.end(fault.seed))

    @property
    def is_away(self) -> bool:
        """Whether nothing is mounted just now."""
        return self._vanished_by is not None

    def is_ready(self) -> bool:
        """Tell whether the filesystem is mounted, at the start."""
        return self._folder.is_mounted()

    def unmount(self) -> None:
        """Take the filesystem away for good."""
        if self._vanished_by is None:
            self._folder.vanish()
        release(self._held)
        self._volume.unmount()

    def _take_counts(self, calls: Mapping[str, int]) -> None:
        """Take in to how many calls something was done."""
        done = Counter(calls)
        for kind, count in (done - self._counted).items():
            self._injected[f"fs_{kind}"] += count
        self._counted = done
