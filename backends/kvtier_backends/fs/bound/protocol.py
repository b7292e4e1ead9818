"""Defines what engines share in ``kvtier_space``: small files, their folders, and all pauses.

A block is identified by two numbers: a hash of its path below the root, and its leaf, the folder
that it is in. To find the file again, the leaf is listed, and each name hashed.

Counts are JSON, lists of blocks are arrays with a checksum. Anyone who can write to the folder can
write them, so they are parsed as untrusted. Tests have a ``Folder`` in memory.

The protocol's pauses are seconds of the waiter's clock: no two clocks are compared.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.errors import StoreFault

SPACE: Final = "kvtier_space"  #: in the root; not a namespace's name: those end in a digest
TERMS: Final = "terms"
REMOVED: Final = "removed"
MANIFEST: Final = "manifest"
LEASE: Final = "lease"
RECEIPT: Final = "receipt"
WANT: Final = "want-"
USES: Final = "uses-"

_TERM = re.compile(r"[0-9]{10}")
_GRANT = re.compile(r"grant-([0-9a-f]{12}-[0-9]+-[0-9]+-[0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,19})")
_FAN = re.compile(r"([0-9a-f_]{3})/([0-9a-f_]{2})(?:_g([0-9]{1,5}))?")
_PADDING: Final = "_"
_NAMESPACE_SHIFT: Final = 40
_DIGITS_SHIFT: Final = 37
_GROUP_SHIFT: Final = 20
_FAN_DIGITS: Final = 5


class GrantName(NamedTuple):
    """The parsed name of a grant's folder."""

    writer: str
    number: int
    size: int  #: bytes of files that may be stored with it

    def __str__(self) -> str:
        return f"grant-{self.writer}-{self.number}-{self.size}"


class Location(NamedTuple):
    """The two numbers that identify a block and find its file."""

    block: int  #: hash of its path
    leaf: int


def term_name(number: int) -> str:
    """Return the folder name of a term."""
    return f"{number:010d}"


def term_numbers(names: list[str]) -> list[int]:
    """Return the numbers of the terms among these names, in order."""
    return sorted(int(name) for name in names if _TERM.fullmatch(name))


def parse_grant_untrusted(name: str) -> GrantName | None:
    """Return the parsed name of a grant's folder, None if it is not one."""
    found = _GRANT.fullmatch(name)
    return GrantName(found[1], int(found[2]), int(found[3])) if found else None


def block_number(blocks_name: str, name: str) -> int:
    """Return the number of a block file, named below its namespace's folder."""
    return xxhash.xxh3_64_intdigest(f"{blocks_name}/{name}".encode(errors="surrogateescape"))


def namespace_number(blocks_name: str) -> int:
    """Return 24 bits that stand for a namespace's folder."""
    return (
        xxhash.xxh3_64_intdigest(blocks_name.encode(errors="surrogateescape")) >> _NAMESPACE_SHIFT
    )


def locate(blocks_name: str, name: str) -> Location | None:
    """Return a block's location, None if no layout has a folder of this name."""
    folder, _, _last = name.rpartition("/")
    leaf = leaf_number(blocks_name, folder)
    return None if leaf is None else Location(block_number(blocks_name, name), leaf)


def leaf_number(blocks_name: str, folder: str) -> int | None:
    """Return the number of a leaf, ``hhh/hh`` or ``hhh/hh_gN`` below a namespace's folder."""
    found = _FAN.fullmatch(folder)
    if found is None:
        return None
    digits = (found[1] + found[2]).rstrip(_PADDING)
    group = 0 if found[3] is None else int(found[3]) + 1
    if _PADDING in digits or (found[3] is not None and str(int(found[3])) != found[3]):
        return None
    fan = int(digits, 16) if digits else 0
    return (
        namespace_number(blocks_name) << _NAMESPACE_SHIFT
        | len(digits) << _DIGITS_SHIFT
        | group << _GROUP_SHIFT
        | fan
    )


def leaf_folder(leaf: int) -> tuple[int, str]:
    """Return a leaf's namespace number and its folder: the inverse of ``leaf_number``."""
    count = leaf >> _DIGITS_SHIFT & 7
    group = leaf >> _GROUP_SHIFT & (1 << 17) - 1
    fan = leaf & (1 << _GROUP_SHIFT) - 1
    digits = f"{fan:0{count}x}" if count else ""
    digits = digits.ljust(_FAN_DIGITS, _PADDING)
    suffix = f"_g{group - 1}" if group else ""
    return leaf >> _NAMESPACE_SHIFT, f"{digits[:3]}/{digits[3:5]}{suffix}"


BLOCKS: Final = np.dtype([("block", "<u8"), ("leaf", "<u8"), ("size", "<u8")])
"""A stored or used block, in receipts and lists of uses."""

KNOWN: Final = np.dtype([*BLOCKS.descr, ("epoch", "<u4")])
"""A block in the manifest."""

SMALL_FILE_BYTES_MAX: Final = 1 << 30
_MAGIC: Final = b"kvtierS\n"
_CHECKSUM_BYTES: Final = 8

Array = NDArray[np.void]


class RecordDamaged(StoreFault):
    """Raised for a small file that is torn or foreign. Continue without it."""


class Lease(msgspec.Struct, frozen=True):
    """The cleaner's lease of its term."""

    count: int  #: incremented with each round
    holder: str
    capacity: int
    released: bool = False  #: the cleaner has left: others need not wait


class Want(msgspec.Struct, frozen=True):
    """A writer's state and demand."""

    count: int  #: incremented with each round
    file_bytes: int  #: of one block
    wanted_bytes: int  #: that it would store in ``Timing.idle_s``
    finished: tuple[int, ...] = ()  #: numbers of grants with a receipt
    no_room: int = 0  #: total of blocks that the filesystem had no room for


class ManifestHead(msgspec.Struct, frozen=True):
    """The head of the manifest."""

    capacity: int
    epoch: int
    holds: bool  #: the folder held no more than ``capacity``, and all writers took grants


Small = TypeVar("Small", Lease, Want, ManifestHead)


def encode(small: Lease | Want | ManifestHead) -> bytes:
    """Return a small file's bytes."""
    return msgspec.json.encode(small)


def decode_untrusted(raw: bytes, kind: type[Small]) -> Small:
    """Return the decoded record. Raises ``RecordDamaged`` and nothing else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError) as problem:
        raise RecordDamaged(str(problem)) from None


def encode_array(array: Array, head: bytes = b"") -> bytes:
    """Return a list of blocks as a file's bytes. ``head``: further bytes to keep."""
    length = len(head).to_bytes(8, "little")
    body = b"".join((_MAGIC, length, head, array.tobytes()))
    return body + xxhash.xxh3_64_digest(body)


def decode_array_untrusted(raw: bytes, kind: np.dtype[np.void]) -> tuple[Array, bytes]:
    """Return the list, and the head. Raises ``RecordDamaged`` and nothing else."""
    body = memoryview(raw)[:-_CHECKSUM_BYTES]
    start = len(_MAGIC) + 8
    if len(body) < start or bytes(body[: len(_MAGIC)]) != _MAGIC:
        raise RecordDamaged("no list of blocks")
    if xxhash.xxh3_64_digest(body) != raw[-_CHECKSUM_BYTES:]:
        raise RecordDamaged("a list of blocks fails its checksum")
    length = int.from_bytes(body[len(_MAGIC) : start], "little")
    rest = len(body) - start - length
    if rest < 0 or rest % kind.itemsize:
        raise RecordDamaged("a list of blocks ends within an entry")
    head = bytes(body[start : start + length])
    return np.frombuffer(body[start + length :], kind), head


class Folder(ABC):
    """An open folder: once it is removed, every call fails, even if its name is used again.

    Calls raise ``OSError``: ``FileNotFoundError`` if the name, or the folder itself, is gone.
    """

    descriptor: int

    @abstractmethod
    async def names(self) -> list[str]:
        """Return the names in it."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """Return a small file's bytes."""

    @abstractmethod
    async def write(self, name: str, data: bytes) -> None:
        """Write a small file in one step: readers see the previous one, or this one."""

    @abstractmethod
    async def make_folder(self, name: str) -> Folder:
        """Create a folder, and open it. Raises ``FileExistsError`` if it exists."""

    @abstractmethod
    async def open_folder(self, name: str) -> Folder:
        """Open a folder."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    async def remove_folder(self, name: str) -> None:
        """Remove a folder, which must be empty."""


async def ensure_folder(folder: Folder, name: str) -> Folder:
    """Open a folder, and create it if missing."""
    with suppress(FileNotFoundError):
        return await folder.open_folder(name)
    try:
        return await folder.make_folder(name)
    except FileExistsError:
        return await folder.open_folder(name)


async def clear(parent: Folder, name: str) -> None:
    """Remove a folder and its contents, until nothing can be put there any more.

    Raises ``OSError``, also if others keep adding files.
    """
    try:
        folder = await parent.open_folder(name)
    except FileNotFoundError:
        return
    for each in await folder.names():
        try:
            await folder.remove(each)
        except FileNotFoundError:
            continue
        except (IsADirectoryError, PermissionError):
            await clear(folder, each)
    with suppress(FileNotFoundError):
        await parent.remove_folder(name)


@dataclass(frozen=True)
class Timing:
    """The pauses of the protocol."""

    busy_s: float = 0.05  #: between two rounds while blocks are stored
    idle_s: float = 1.0  #: the same while nothing happens
    lease_s: float = 10.0  #: a lease unchanged for this long has expired
    dead_s: float = 15.0  #: a writer whose count is unchanged for this long is dead
    hand_back_s: float = 10.0  #: a grant unused for this long is handed back
    uses_s: float = 5.0  #: between two lists of uses of a writer
    epoch_s: float = 5.0  #: uses within one epoch are not distinguished
    save_s: float = 30.0  #: between two copies of the manifest, unless much has changed
    rescan_s: float = 600.0  #: between two scans, unless one is needed sooner
    scan_share_max: float = 0.1  #: share of the time for scans that are needed sooner
    scan_duty: float = 0.25  #: share of the time for which a scan works if nothing waits for it
    evict_s: float = 1.0  #: an eviction that takes longer leaves the rest to the next
    hang_s: float = 20.0  #: a round that takes longer is abandoned
