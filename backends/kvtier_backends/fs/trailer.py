"""The page that follows a block in its file and describes the block.

Layout, little endian, ``TRAILER_BYTES`` long in all:

    magic(8) version(u32) key_length(u32) block_bytes(u64) digest(16) key zeros checksum(u64)

The checksum is XXH3-64 over everything before it, zeros included, so that a
flipped bit anywhere in the page is detected. vLLM reads only the block before
it, never this page.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.posix import PAGE_BYTES

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
