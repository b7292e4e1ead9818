"""Claims a folder for one engine, and decides how it is divided into regions.

A claim is an flock on the file ``lock``, which the kernel releases when its
owner ends, however it ends. Beside it lie ``superblock`` (two copies of one
page, so that one flipped bit does not cost the folder) and the segment files.

A folder that returns on another filesystem is recognized only by its superblock, and an engine
that starts in a folder without one starts empty. So an engine that has it in memory writes it
again if it was deleted or damaged.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier_backends.disk.folder.users import LOCK_NAME, user_untrusted
from kvtier_backends.disk.format import (
    ID_BYTES,
    PAGE_BYTES,
    PageRefused,
    Refusal,
    RegionGeometry,
    Superblock,
    decode_superblock_untrusted,
    encode_superblock,
    make_region_geometry,
    region_bytes_for,
    time_s,
)
from kvtier_backends.disk.opened_files import NotAFile, open_file, remove_whatever
from kvtier_backends.posix import (
    NOT_A_FOLDER,
    NOTHING_OF_OURS,
    is_elsewhere,
    make_folders,
    padded_bytes,
    unusable,
    world_writable,
)

if TYPE_CHECKING:
    from collections.abc import Callable


REGION_BYTES_USUAL: Final = 64 << 20
REGION_SLOTS_MIN: Final = 16  #: fewer only if the folder would otherwise have too few regions
REGION_SLOTS_MAX: Final = 8192  #: listing the blocks of one region stays short
REGIONS_WANTED: Final = 64
REGIONS_LOW: Final = 8
REGIONS_KEPT_MIN: Final = 6  #: a folder divided into fewer is laid out again, if that helps
REGIONS_MIN: Final = 4
SEGMENT_BYTES_USUAL: Final = 1 << 30
FOLDER_BYTES: Final = 4 * PAGE_BYTES  #: the lock and the superblock, rounded up
OVERPROVISION_FRACTION: Final = 0.1
"""Overprovisioning: the fraction of slots that is not advertised as capacity.

It absorbs dead blocks until their region is reclaimed.
"""

LOCK_WAIT_S_MAX: Final = 1.0
"""How long to wait for a held lock.

``kvtier ls`` and ``fsck`` hold it for an instant, a killed engine until the kernel
has freed its memory. An engine that starts just then must not be refused.
"""

_LOCK_POLL_S: Final = 0.02
_LOCK_POLL_S_OF_LONG_WAITS: Final = 0.25
SUPERBLOCK_NAME: Final = "superblock"
_SEGMENT_PATTERN: Final = re.compile(r"segment-(\d{5})\.kv")


class Plan(NamedTuple):
    """The layout of a folder of one capacity."""

    geometry: RegionGeometry
    regions: int
    segment_regions: int

    @property
    def capacity_blocks(self) -> int:
        """The advertised capacity: without open, kept-back and overprovisioned slots."""
        return max(1, int((self.regions - 2) * self.geometry.slots * (1 - OVERPROVISION_FRACTION)))


def plan_folder(
    capacity_bytes: int, block_bytes: int, tag_bytes: int, region_bytes: int | None
) -> Plan:
    """Divide ``capacity_bytes`` into regions, of ``region_bytes`` if given.

    The plan has fewer than ``REGIONS_MIN`` regions, or no slot, if there is too little room.
    """
    room = max(0, capacity_bytes - FOLDER_BYTES)
    if region_bytes is None:
        region_bytes = _usual_region_bytes(room, block_bytes, tag_bytes)
    geometry = make_region_geometry(region_bytes, block_bytes, tag_bytes)
    if geometry.slots > REGION_SLOTS_MAX:
        region_bytes = region_bytes_for(REGION_SLOTS_MAX, block_bytes, tag_bytes)
        geometry = make_region_geometry(region_bytes, block_bytes, tag_bytes)
    return Plan(geometry, room // region_bytes, max(1, SEGMENT_BYTES_USUAL // region_bytes))


def capacity_bytes_min(block_bytes: int, tag_bytes: int) -> int:
    """Return the smallest capacity that works at all."""
    return FOLDER_BYTES + REGIONS_MIN * region_bytes_for(1, block_bytes, tag_bytes)


def capacity_bytes_for(blocks: int, block_bytes: int) -> int:
    """Return a capacity with which a folder advertises this many blocks without tags."""
    capacity_bytes = capacity_bytes_min(block_bytes, 0)
    while (kept := plan_folder(capacity_bytes, block_bytes, 0, None).capacity_blocks) < blocks:
        capacity_bytes += (blocks - kept) * padded_bytes(block_bytes)
    return capacity_bytes


def _usual_region_bytes(room: int, block_bytes: int, tag_bytes: int) -> int:
    least = region_bytes_for(REGION_SLOTS_MIN, block_bytes, tag_bytes)
    wanted = min(REGION_BYTES_USUAL, room // REGIONS_WANTED // PAGE_BYTES * PAGE_BYTES)
    region_bytes = max(least, wanted)
    slots = REGION_SLOTS_MIN
    while room // region_bytes < REGIONS_LOW and slots > 1:
        slots -= 1
        region_bytes = region_bytes_for(slots, block_bytes, tag_bytes)
    return region_bytes


class Claim:
    """A folder that belongs to this process until ``release``, or until it ends."""

    def __init__(
        self,
        path: str,
        refuse: Callable[[str], ConfigError],
        user_pid: int | None = None,
        *,
        allow_world_writable: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        """Create the folder if it is missing, and claim it. Raises ``ConfigError``.

        ``user_pid``: the process to name to later claimants; without one, this process.
        ``wait_s``: how long to wait for an engine that has the folder, at least
        ``LOCK_WAIT_S_MAX``. One that keeps using it is a fault of the storage; it may pass.
        """
        self.path = path
        self.user_pid = os.getpid() if user_pid is None else user_pid
        self._allow_world_writable = allow_world_writable
        self._descriptor: int | None = None
        self._identity = (0, 0)  # of the lock: device and inode
        try:
            make_folders(path)
            if os.stat(path).st_mode & stat.S_IWOTH and not allow_world_writable:
                raise refuse(world_writable())
            self._descriptor = self._acquire(refuse, max(wait_s, LOCK_WAIT_S_MAX))
        except NotAFile as problem:
            raise refuse(not_ours(problem)) from None
        except (FileExistsError, NotADirectoryError):
            raise refuse(NOT_A_FOLDER) from None
        except OSError as problem:
            where = "" if problem.filename in (None, path) else str(problem.filename)
            raise refuse(unusable(problem, where=where)) from problem

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Release the folder. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def again(self) -> Claim:
        """Claim the folder again, once it is back. Raises ``ConfigError``."""
        allowed = self._allow_world_writable
        return Claim(self.path, ConfigError, self.user_pid, allow_world_writable=allowed)

    def stands(self) -> bool:
        """Return whether the folder is still the one that was claimed.

        Raises ``OSError`` if the medium fails: that is not a sign that the folder is gone.
        """
        return self._descriptor is not None and self.is_in(self.path)

    def is_in(self, folder: str) -> bool:
        """Return whether the lock lies in this folder. Raises ``OSError`` as ``stands`` does."""
        try:
            there = os.lstat(f"{folder}/{LOCK_NAME}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (there.st_dev, there.st_ino) == self._identity

    def _acquire(self, refuse: Callable[[str], ConfigError], wait_s: float) -> int:
        path = f"{self.path}/{LOCK_NAME}"
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            is_acquired = _lock(descriptor, wait_s)
        except BaseException:
            os.close(descriptor)
            raise
        if not is_acquired:
            owner = user_untrusted(descriptor, self.user_pid)
            os.close(descriptor)
            raise refuse(
                f"is in use by {owner}: a disk tier belongs to one engine. {owner.remedy}, "
                "or name another folder; data-parallel engines each need their own, with "
                "{dp_rank} in its name."
            ) from BlockingIOError(errno.EAGAIN, "another engine has its lock")
        ours = os.fstat(descriptor)
        self._identity = (ours.st_dev, ours.st_ino)
        with suppress(OSError):  # the number is for readers; a full disk is no reason to refuse
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self.user_pid}\n".encode(), 0)
        return descriptor


def refuse_bare_mount_point(
    path: str, filesystem: int | None, refuse: Callable[[str], ConfigError]
) -> None:
    """Refuse a path that a restarted tier finds on another filesystem, without a tier's folder.

    ``filesystem``: the number of the one used before; None at an engine's start. Raises
    ``ConfigError``.
    """
    try:
        if is_elsewhere(path, filesystem):
            read_superblock(path)
    except PageRefused as nothing:
        raise refuse(NOTHING_OF_OURS) from nothing
    except OSError as problem:
        raise refuse(f"cannot be looked at ({problem.strerror}).") from problem


def not_ours(problem: NotAFile) -> str:
    """Return the refusal of a folder that has something else in place of one of our files."""
    return (
        f"contains something that is not a disk tier's: {problem.strerror}. Remove it, "
        "or name another folder."
    )


def _lock(descriptor: int, wait_s: float) -> bool:
    """Take the lock within this time; False: another process keeps it. Raises ``OSError``."""
    poll_s = _LOCK_POLL_S if wait_s <= LOCK_WAIT_S_MAX else _LOCK_POLL_S_OF_LONG_WAITS
    waits = round(wait_s / poll_s)
    for wait in range(waits + 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait < waits:
                time.sleep(poll_s)
        else:
            return True
    return False


def read_superblock(path: str) -> Superblock:
    """Return the first sound copy in the folder. Raises ``PageRefused`` or ``OSError``."""
    try:
        descriptor = open_file(f"{path}/{SUPERBLOCK_NAME}", os.O_RDONLY)
    except FileNotFoundError:
        raise PageRefused(Refusal.BLANK, "there is none") from None
    try:
        raw = os.pread(descriptor, 2 * PAGE_BYTES, 0)
    finally:
        os.close(descriptor)
    try:
        return decode_superblock_untrusted(raw[:PAGE_BYTES])
    except PageRefused:
        return decode_superblock_untrusted(raw[PAGE_BYTES:])


def write_superblock(path: str, superblock: Superblock) -> None:
    """Replace any older superblock with this one, in one step. Raises ``OSError``.

    The new one is read back first: a torn one never replaces a sound one.
    """
    temporary = f"{path}/{SUPERBLOCK_NAME}.new"
    remove_whatever(temporary)
    raw = encode_superblock(superblock) * 2
    descriptor = open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, raw)
        os.fsync(descriptor)
        if os.pread(descriptor, len(raw) + 1, 0) != raw:
            raise OSError(errno.EIO, "it reads otherwise than it was written", temporary)
    finally:
        os.close(descriptor)
    os.replace(temporary, f"{path}/{SUPERBLOCK_NAME}")


def new_superblock(plan: Plan) -> Superblock:
    """Return the superblock of a new folder."""
    return Superblock(
        os.urandom(ID_BYTES), plan.geometry.region_bytes, plan.segment_regions, time_s(time.time())
    )


def segment_numbers(path: str) -> list[int]:
    """Return the numbers of the segment files in the folder."""
    found = (_SEGMENT_PATTERN.fullmatch(name) for name in os.listdir(path))
    return sorted(int(match[1]) for match in found if match)


class SuperblockCopy:
    """The expected superblock of a claimed folder. One thread at a time."""

    def __init__(self, claim: Claim, superblock: Superblock) -> None:
        self.folder_id = superblock.folder_id
        self._claim = claim
        self._superblock = superblock
        self._sound: tuple[int, ...] = ()  # identifies the file that was read and found sound

    def restore(self) -> bool:
        """Write the superblock again if it has changed. Return whether it had.

        Writes to the claimed folder or nowhere, wherever its path leads now.
        Blocks, and raises ``OSError``.
        """
        folder = os.open(self._claim.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{folder}"
            if not self._claim.is_in(path) or self._is_sound(f"{path}/{SUPERBLOCK_NAME}"):
                return False
            write_superblock(path, self._superblock)
            return True
        finally:
            os.close(folder)

    def _is_sound(self, path: str) -> bool:
        """Return whether both copies are intact. Reads them only if the file has changed."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return False
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if seen == self._sound:
            return True
        try:
            descriptor = open_file(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except NotAFile:  # someone else's; the next start reports it
            return True
        wanted = encode_superblock(self._superblock) * 2
        try:
            is_sound = os.pread(descriptor, len(wanted) + 1, 0) == wanted
        finally:
            os.close(descriptor)
        if is_sound:
            self._sound = seen
        return is_sound
