"""Defines the disk tier's on-disk format: superblock, region headers and table pages.

A folder holds one superblock and preallocated segment files of regions::

    region:  header page | table pages | slots of one stride each

All structures are pages of ``PAGE_BYTES``, little endian, and end in an XXH3-64
checksum over everything before it, zeros included. Magic and version come
first in every version, to distinguish a page of another version from a damaged one.

A region's header has a random ``incarnation``, and so has each of its table
pages: once the new header is written, pages of the region's previous contents no
longer match, and need no erasing.

A table page holds records of one width: the width of its longest key. Many
blocks that are written together have pages of their own. Few blocks share
a page: it is written again, longer each time, until it is full; never to
the place of its predecessor, so that a torn write loses only the newest
entries. After a power cut, an entry may exist without its block: the digest
detects that.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import xxhash

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.encryption.cipher import TAG_BYTES as TAG_BYTES
from kvtier_backends.encryption.keys import KEY_ID_BYTES
from kvtier_backends.posix import PAGE_BYTES as PAGE_BYTES
from kvtier_backends.posix import padded_bytes
from kvtier_backends.shared.namespaces import namespace_digest as namespace_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


FORMAT_VERSION: Final = 1
ID_BYTES: Final = KEY_ID_BYTES
KEY_BYTES_MAX: Final = 255
KEY_BYTES_PLANNED: Final = 68
"""Tables are laid out for keys of up to this length; longer ones fill a region's table early."""

OWN_PAGE_BYTES: Final = 2 << 20
"""Blocks of this many bytes, written together, have table pages of their own: .2 % of them."""

TIME_S_MAX: Final = (1 << 32) - 1
SEQUENCE_MAX: Final = 1 << 63
"""No folder ever gets there: a higher one was planted, and none could follow it."""

NO_KEY_ID: Final = bytes(ID_BYTES)
"""The id of the encryption key of a region that is not encrypted."""

_MAGIC_SUPERBLOCK: Final = b"kvtierD\n"
_MAGIC_REGION: Final = b"kvtierR\n"
_MAGIC_TABLE: Final = b"kvtierT\n"
_PREFIX: Final = struct.Struct("<8sI")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_BYTES: Final = PAGE_BYTES - _CHECKSUM.size
_SUPERBLOCK: Final = struct.Struct(f"<8sI{ID_BYTES}sQIQ")
_HEADER: Final = struct.Struct(f"<8sI{ID_BYTES}s{ID_BYTES}s{ID_BYTES}s{ID_BYTES}sIQQQIIQ")
_LENGTH: Final = struct.Struct("<H")
_DESCRIPTION_AT: Final = _HEADER.size + _LENGTH.size
_TABLE: Final = struct.Struct(f"<8sI{ID_BYTES}sIHBB")
_BLANK: Final = bytes(PAGE_BYTES)
_KEY_OF: Final = itemgetter(2)  # of an entry

DESCRIPTION_BYTES_MAX: Final = _CHECKED_BYTES - _DESCRIPTION_AT
"""The longest description of the namespace that fits into a region's header."""


class Refusal(Enum):
    """Reason why a page is refused."""

    BLANK = "blank"  #: nothing was ever written here
    DAMAGED = "damaged"  #: torn, foreign or flipped
    OTHER_VERSION = "other version"  #: sound, and of another format version
    OTHER_INCARNATION = "other incarnation"  #: a table page of the region's previous contents


class PageRefused(StoreFault):
    """Raised for a page that cannot be used. ``refusal`` has the reason; drop what it described."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True)
class Superblock:
    """A folder's random id, and how its segments are divided into regions."""

    folder_id: bytes
    region_bytes: int
    segment_regions: int
    created_s: int


@dataclass(frozen=True)
class RegionHeader:
    """Describes the contents of a region since it was last opened."""

    folder_id: bytes
    incarnation: bytes  #: random, so that no two openings of a region can be mixed up
    namespace: bytes  #: ``namespace_digest`` of the engine that wrote it
    key_id: bytes  #: which key its blocks are encrypted with, or ``NO_KEY_ID``
    number: int  #: its place in the folder
    sequence: int  #: grows with each opening of any region, never reused
    block_bytes: int
    stride: int  #: bytes from one slot to the next
    slots: int
    table_pages: int
    created_s: int
    description: bytes = b""  #: of the namespace (``folder/description.py``); it decides nothing


class Entry(NamedTuple):
    """One block in a table page."""

    slot: int
    stored_s: int  #: seconds since 1970
    key: bytes
    digest: bytes
    tag: bytes  #: salt and tag of its encryption; empty if there is none


EntryTuple: TypeAlias = tuple[int, int, bytes, bytes, bytes]
"""An ``Entry``, or a plain tuple of its fields, which takes a third of the time to make."""


class TablePage(NamedTuple):
    """A sound table page: records of one width, not yet checked."""

    serial: int  #: the version of the page
    entries: int
    key_width: int
    tag_bytes: int
    records: memoryview


@dataclass(frozen=True)
class RegionGeometry:
    """The layout of one region for blocks of one size."""

    region_bytes: int
    block_bytes: int
    stride: int
    slots: int
    table_pages: int
    own_page_slots: int  #: this many blocks written together have pages of their own

    @property
    def slots_at(self) -> int:
        """Offset of the first slot from the start of the region."""
        return (1 + self.table_pages) * PAGE_BYTES

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot from the start of the region."""
        return self.slots_at + slot * self.stride

    def whole_blocks(self, size: int) -> int:
        """Return how many blocks are whole in so many bytes from the start of a slot on."""
        return (size + self.stride - self.block_bytes) // self.stride


def make_region_geometry(
    region_bytes: int,
    block_bytes: int,
    tag_bytes: int = 0,
    *,
    own_page_bytes: int = OWN_PAGE_BYTES,
) -> RegionGeometry:
    """Lay a region out; ``slots`` is 0 if not even one block fits."""
    stride = padded_bytes(block_bytes)
    own_page_slots = max(1, own_page_bytes // stride)
    slots = max(0, region_bytes // PAGE_BYTES - 2) * PAGE_BYTES // stride
    pages = _table_pages(slots, tag_bytes, own_page_slots)
    while slots and (1 + pages) * PAGE_BYTES + slots * stride > region_bytes:
        slots -= 1
        pages = _table_pages(slots, tag_bytes, own_page_slots)
    return RegionGeometry(region_bytes, block_bytes, stride, slots, pages, own_page_slots)


def region_bytes_for(
    slots: int, block_bytes: int, tag_bytes: int = 0, *, own_page_bytes: int = OWN_PAGE_BYTES
) -> int:
    """Return the length of a region with room for this many blocks."""
    stride = padded_bytes(block_bytes)
    pages = _table_pages(slots, tag_bytes, max(1, own_page_bytes // stride))
    return (1 + pages) * PAGE_BYTES + slots * stride


def _table_pages(slots: int, tag_bytes: int, own_page_slots: int) -> int:
    """Return how many pages the table of this many slots takes, however they are written.

    The shared page has a place for its next version. Each time blocks have pages of
    their own, the last of these may be almost empty.
    """
    per_page = records_max(KEY_BYTES_PLANNED, tag_bytes)
    return -(-slots // per_page) + 1 + slots // own_page_slots


@cache
def record_struct(key_width: int, tag_bytes: int) -> struct.Struct:
    """Return the layout of one record: slot, stored_s, key length, digest, tag, key."""
    return struct.Struct(f"<IIB{DIGEST_BYTES}s{tag_bytes}s{key_width}s")


def records_max(key_width: int, tag_bytes: int) -> int:
    """Return how many records fit into one table page."""
    return (_CHECKED_BYTES - _TABLE.size) // record_struct(key_width, tag_bytes).size


def time_s(clock: float) -> int:
    """Return a time as it is stored: whole seconds since 1970, from 1970 to 2106.

    A clock beyond that breaks ages and ``ttl_s``, but not the store.
    """
    return min(max(int(clock), 0), TIME_S_MAX)


def check_key_lengths(lengths: Iterable[int]) -> None:
    """Raise ``Misuse`` for an invalid key length."""
    for length in set(lengths):
        if not 0 < length <= KEY_BYTES_MAX:
            raise Misuse(f"a key of {length} bytes; keys have 1 to {KEY_BYTES_MAX} bytes.")


def encode_superblock(superblock: Superblock) -> bytes:
    """Return the page of a superblock."""
    return _with_checksum(
        _SUPERBLOCK.pack(
            _MAGIC_SUPERBLOCK,
            FORMAT_VERSION,
            superblock.folder_id,
            superblock.region_bytes,
            superblock.segment_regions,
            superblock.created_s,
        )
    )


def decode_superblock_untrusted(page: bytes | memoryview) -> Superblock:
    """Return the superblock of a page. Raises ``PageRefused`` and nothing else."""
    _check(page, _MAGIC_SUPERBLOCK)
    found = Superblock(*_SUPERBLOCK.unpack_from(page)[2:])
    if found.region_bytes < PAGE_BYTES or found.region_bytes % PAGE_BYTES:
        raise PageRefused(Refusal.DAMAGED, f"regions of {found.region_bytes} bytes")
    if found.segment_regions < 1:
        raise PageRefused(Refusal.DAMAGED, "segments of no region")
    return found


def encode_header(header: RegionHeader) -> bytes:
    """Return the page of a region's header. A description that is too long is left out."""
    description = header.description
    if len(description) > DESCRIPTION_BYTES_MAX:
        description = b""
    return _with_checksum(
        _HEADER.pack(
            _MAGIC_REGION,
            FORMAT_VERSION,
            header.folder_id,
            header.incarnation,
            header.namespace,
            header.key_id,
            header.number,
            header.sequence,
            header.block_bytes,
            header.stride,
            header.slots,
            header.table_pages,
            header.created_s,
        )
        + _LENGTH.pack(len(description))
        + description
    )


def decode_header_untrusted(page: bytes | memoryview) -> RegionHeader:
    """Return the header of a page. Raises ``PageRefused`` and nothing else."""
    _check(page, _MAGIC_REGION)
    (length,) = _LENGTH.unpack_from(page, _HEADER.size)
    # Headers older than descriptions have zeros here.
    description = bytes(page[_DESCRIPTION_AT : min(_DESCRIPTION_AT + length, _CHECKED_BYTES)])
    found = RegionHeader(*(*_HEADER.unpack_from(page)[2:], description))
    if found.sequence > SEQUENCE_MAX:
        raise PageRefused(Refusal.DAMAGED, f"the sequence {found.sequence}")
    return found


class TableWriter:
    """The newest table page of a region: entries are added until it is full.

    Each entry is encoded once, though its page is written many times.
    """

    def __init__(self, incarnation: bytes, tag_bytes: int) -> None:
        self._incarnation = incarnation
        self._tag_bytes = tag_bytes
        self._serial = 0
        self._records = b""
        self._count = 0
        self._width = 0

    def add(self, entries: Sequence[EntryTuple]) -> int:
        """Add these entries, from the first on, as far as they fit; return how many.

        Raises ``Misuse`` for a key that is too long, or empty.
        """
        lengths = list(map(len, map(_KEY_OF, entries)))
        check_key_lengths(lengths)
        longest = max(lengths, default=0)
        # All records of a page are as wide as its widest.
        room = records_max(max(self._width, longest), self._tag_bytes) - self._count
        if len(entries) > room:
            entries = entries[: self._fitting(lengths)]
            longest = max(lengths[: len(entries)], default=0)
        if longest > self._width:
            self._widen(longest)
        pack = record_struct(self._width, self._tag_bytes).pack
        self._records += b"".join(
            [
                pack(slot, stored_s, len(key), digest, tag, key)
                for slot, stored_s, key, digest, tag in entries
            ]
        )
        self._count += len(entries)
        return len(entries)

    def _fitting(self, lengths: Sequence[int]) -> int:
        """Return how many keys of these lengths, which don't all fit, have room."""
        width = self._width
        for count, length in enumerate(lengths):
            width = max(width, length)
            if count >= records_max(width, self._tag_bytes) - self._count:
                return count
        return len(lengths)

    def start_page(self) -> None:
        """Begin an empty page. The full one must have been written."""
        self._records = b""
        self._count = 0
        self._width = 0

    def encode(self) -> bytes:
        """Return the page with all entries added since it was begun."""
        self._serial += 1
        head = _TABLE.pack(
            _MAGIC_TABLE,
            FORMAT_VERSION,
            self._incarnation,
            self._serial,
            self._count,
            self._width,
            self._tag_bytes,
        )
        return _with_checksum(head + self._records)

    def _widen(self, width: int) -> None:
        """Give all records room for longer keys."""
        pack = record_struct(width, self._tag_bytes).pack
        narrow = record_struct(self._width, self._tag_bytes).iter_unpack(self._records)
        self._records = b"".join([pack(*record) for record in narrow])
        self._width = width


def decode_table_untrusted(page: bytes | memoryview, incarnation: bytes) -> TablePage:
    """Return the records of a region's table page. Raises ``PageRefused`` and nothing else."""
    _check(page, _MAGIC_TABLE)
    _, _, found, serial, count, width, tag_bytes = _TABLE.unpack_from(page)
    if found != incarnation:
        raise PageRefused(Refusal.OTHER_INCARNATION, "of what the region held before")
    if width > KEY_BYTES_MAX or tag_bytes not in (0, TAG_BYTES):
        raise PageRefused(Refusal.DAMAGED, f"keys of {width} bytes, tags of {tag_bytes}")
    if count > records_max(width, tag_bytes):
        raise PageRefused(Refusal.DAMAGED, f"{count} records in one page")
    end = _TABLE.size + count * record_struct(width, tag_bytes).size
    return TablePage(serial, count, width, tag_bytes, memoryview(page)[_TABLE.size : end])


def entries_untrusted(table: TablePage, slots: int) -> Iterator[Entry]:
    """Yield the records that a region of this many slots can hold. Raises nothing."""
    layout = record_struct(table.key_width, table.tag_bytes)
    for slot, stored_s, length, digest, tag, key in layout.iter_unpack(table.records):
        if slot < slots and 0 < length <= table.key_width:
            yield Entry(slot, stored_s, key[:length], digest, tag)


def _with_checksum(body: bytes) -> bytes:
    checked = body.ljust(_CHECKED_BYTES, b"\0")
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def _check(page: bytes | memoryview, magic: bytes) -> None:
    """Raise ``PageRefused`` unless the page is sound, of this kind and this version."""
    if len(page) != PAGE_BYTES:
        raise PageRefused(Refusal.DAMAGED, f"{len(page)} bytes are no page of {PAGE_BYTES}")
    if page == _BLANK:
        raise PageRefused(Refusal.BLANK, "never written")
    found, version = _PREFIX.unpack_from(page)
    if found != magic:
        raise PageRefused(Refusal.DAMAGED, "another kind of page, or none of ours")
    (checksum,) = _CHECKSUM.unpack_from(page, _CHECKED_BYTES)
    if checksum != xxhash.xxh3_64_intdigest(page[:_CHECKED_BYTES]):
        raise PageRefused(Refusal.DAMAGED, "fails its checksum")
    if version != FORMAT_VERSION:
        raise PageRefused(Refusal.OTHER_VERSION, f"version {version} is unknown here")
