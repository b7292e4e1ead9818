"""Encodes a block and its trailer page for a file: plain, or as a record.

A plain block is followed by a page that describes it, as are the files of vLLM's layout; vLLM
reads only the block before it, never this page. Its layout, little endian, ``TRAILER_BYTES`` long
in all:

    magic(8) version(u32) key_length(u32) block_bytes(u64) digest(16) key zeros checksum(u64)

The checksum is XXH3-64 over everything before it, zeros included, so that a
flipped bit anywhere in the page is detected.

A block that is compressed, signed or encrypted has the trailer of all shared storage, and zeros up
to the end of the page. A compressed block takes whole pages.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import xxhash

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.backend import DIGEST_BYTES, Outcome
from kvtier_backends.posix import PAGE_BYTES
from kvtier_backends.shared.record_trailer import Form

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import LoadBlock, StoreBlock
    from kvtier_backends.shared.records import Records


TRAILER_BYTES: Final = PAGE_BYTES
_MAGIC: Final = b"kvtierB\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_BYTES: Final = TRAILER_BYTES - _CHECKSUM.size
KEY_BYTES_MAX: Final = _CHECKED_BYTES - _HEAD.size


class TrailerDamaged(StoreFault):
    """Raised when a trailer is torn, foreign or not for this block. Drop the file."""


def encode_trailer(key: bytes, block_bytes: int, digest: bytes) -> bytes:
    """Return the trailer page of a block.

    Raises ``Misuse`` for a key of more than ``KEY_BYTES_MAX`` bytes or a digest
    that is not ``DIGEST_BYTES`` long.
    """
    if len(key) > KEY_BYTES_MAX or len(digest) != DIGEST_BYTES:
        raise Misuse(
            f"a trailer takes a key of at most {KEY_BYTES_MAX} bytes and a digest of "
            f"{DIGEST_BYTES}, not {len(key)} and {len(digest)}. Shorten the key."
        )
    head = _HEAD.pack(_MAGIC, _VERSION, len(key), block_bytes, digest) + key
    checked = head.ljust(_CHECKED_BYTES, b"\0")
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def decode_trailer_untrusted(page: bytes | memoryview, key: bytes, block_bytes: int) -> bytes:
    """Return the digest kept in ``page``, if it is the trailer of this key's block.

    Raises ``TrailerDamaged`` and nothing else, whatever the bytes are.
    """
    if len(page) != TRAILER_BYTES:
        raise TrailerDamaged(f"a trailer has {TRAILER_BYTES} bytes, not {len(page)}")
    magic, version, key_length, length, digest = _HEAD.unpack_from(page)
    if magic != _MAGIC:
        raise TrailerDamaged("no trailer where one should be")
    (checksum,) = _CHECKSUM.unpack_from(page, _CHECKED_BYTES)
    if checksum != xxhash.xxh3_64_intdigest(page[:_CHECKED_BYTES]):
        raise TrailerDamaged("the trailer fails its own checksum")
    if version != _VERSION:
        raise TrailerDamaged(f"trailer version {version} is unknown here")
    if length != block_bytes:
        raise TrailerDamaged(f"a block of {length} bytes, not {block_bytes}")
    if key_length != len(key) or page[_HEAD.size : _HEAD.size + key_length] != key:
        raise TrailerDamaged("the trailer is another key's")
    return bytes(digest)


class BlockRefused(StoreFault):
    """Raised if a block and its trailer don't match. Don't drop the file for that alone.

    Once a call is cancelled, its buffer may no longer belong to it: the tier, which knows
    that, has the block removed.
    """


class PlainForm:
    """The block itself, with its checksum. Any thread may call any method."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def is_payload_length(self, size: int) -> bool:
        """Return whether the data before the trailer page may have this size, without padding."""
        return size == self.block_bytes

    def room_for(self, buffer: memoryview) -> memoryview:
        """Return the memory to read the file's data into."""
        return buffer

    def give_back(self, payload: memoryview) -> None:
        """Note that a payload is no longer read or written."""

    def encode(self, block: StoreBlock, page: memoryview) -> memoryview:
        """Write the trailer page, and return the data to write before it. Raises ``Misuse``."""
        page[:] = encode_trailer(block.key, self.block_bytes, block.digest)
        return block.buffer

    def decode_untrusted(self, block: LoadBlock, payload: memoryview, page: memoryview) -> bytes:
        """Decode a payload into the block's buffer; return its digest.

        Raises ``TrailerDamaged`` and nothing else.
        """
        del payload  # the buffer itself
        return decode_trailer_untrusted(page, block.key, self.block_bytes)


class RecordForm:
    """A record, as in other shared storage. Any thread may call any method."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.block_bytes = records.context.block_bytes
        self.is_payload_length = records.is_payload_length
        self.room_for = records.room_for
        self.give_back = records.give_back

    def encode(self, block: StoreBlock, page: memoryview) -> memoryview:
        """Write the trailer page, and return the data to write before it. Raises ``Misuse``."""
        size = self._records.trailer_bytes(block.key)
        if size > TRAILER_BYTES:
            raise Misuse(f"a key of {len(block.key)} bytes has no room in a page. Shorten the key.")
        payload, trailer = self._records.encode(block)
        page[:] = trailer.ljust(TRAILER_BYTES, b"\0")
        return payload

    def decode_untrusted(self, block: LoadBlock, payload: memoryview, page: memoryview) -> bytes:
        """Decode a payload into the block's buffer; return its digest.

        Raises ``TrailerDamaged`` and ``BlockRefused``, and nothing else.
        """
        size = self._records.trailer_bytes(block.key)
        if bytes(page[size:]).strip(b"\0"):
            raise TrailerDamaged("there is more in the trailer's page than a trailer")
        trailer = page[:size]
        outcome, digest = self._records.decode_untrusted(block.key, payload, trailer, block.buffer)
        if outcome is not Outcome.DONE or digest is None:
            raise BlockRefused("it is torn, or no key of this tier verifies it")
        return digest


def make_form(records: Records) -> PlainForm | RecordForm:
    """Return the form in which files are written and read."""
    if records.form is Form.PLAIN and not records.are_compressed:
        return PlainForm(records.context.block_bytes)
    return RecordForm(records)
