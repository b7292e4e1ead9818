"""Encodes the small files: counts as JSON, lists of blocks as arrays with a checksum.

Anyone who can write to the folder can write them, so they are parsed with suspicion.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.errors import StoreFault

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
