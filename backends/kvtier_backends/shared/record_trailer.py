"""Encodes and decodes the trailer behind a block in shared storage, which describes the block.

Layout, little endian; the length follows from the key's length and the form:

    magic(8) version(u16) key_length(u16) form(u16) coding(u16) block_bytes(u64) digest(16)
    key  [key_id(16) tag(32)]  checksum(u64)

``block_bytes`` and digest are the original block's, whatever its coding.

The checksum is XXH3-64 over everything before it: it detects torn writes. Key id
and tag are those of the secret key that signed or encrypted, and are absent in
the plain form. The code that makes them documents what they cover.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.encryption.cipher import TAG_BYTES
from kvtier_backends.encryption.keys import KEY_ID_BYTES

_MAGIC: Final = b"kvtierR\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct(f"<8sHHHHQ{DIGEST_BYTES}s")
_CHECKSUM: Final = struct.Struct("<Q")


class Form(IntEnum):
    """The form in which a block is stored."""

    PLAIN = 0
    SIGNED = 1
    ENCRYPTED = 2


class Coding(IntEnum):
    """How a block's bytes are written, before they are encrypted."""

    RAW = 0
    BITPLANE_ZSTD = 1


class Trailer(NamedTuple):
    """The contents of a trailer, not yet authenticated."""

    form: Form
    digest: bytes  #: masked, if the block is encrypted
    key_id: bytes = b""
    tag: bytes = b""
    coding: Coding = Coding.RAW


def trailer_bytes(key: bytes, form: Form) -> int:
    """Return the length of the trailer of this key's block."""
    proof = 0 if form is Form.PLAIN else KEY_ID_BYTES + TAG_BYTES
    return _HEAD.size + len(key) + proof + _CHECKSUM.size


def encode_head(key: bytes, block_bytes: int, trailer: Trailer) -> bytes:
    """Return the part of a trailer that is known before the block is signed or encrypted.

    It differs for different keys, forms, codings, lengths or digests.
    """
    kind = (trailer.form, trailer.coding)
    return _HEAD.pack(_MAGIC, _VERSION, len(key), *kind, block_bytes, trailer.digest) + key


def encode_trailer(key: bytes, block_bytes: int, trailer: Trailer) -> bytes:
    """Return the trailer as it is stored."""
    checked = encode_head(key, block_bytes, trailer) + trailer.key_id + trailer.tag
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def decode_trailer_untrusted(raw: bytes, key: bytes, block_bytes: int) -> Trailer | None:
    """Return a trailer's contents if it is whole and this key's, else None. Raises nothing."""
    if len(raw) < trailer_bytes(key, Form.PLAIN):
        return None
    magic, version, key_length, form, coding, length, digest = _HEAD.unpack_from(raw)
    checked = raw[: -_CHECKSUM.size]
    (checksum,) = _CHECKSUM.unpack_from(raw, len(checked))
    proof_at = _HEAD.size + len(key)
    is_sound = (
        magic == _MAGIC
        and checksum == xxhash.xxh3_64_intdigest(checked)
        and version == _VERSION
        and form in _FORMS
        and coding in _CODINGS
        and len(raw) == trailer_bytes(key, Form(form))
        and length == block_bytes
        and key_length == len(key)
        and checked[_HEAD.size : proof_at] == key
    )
    if not is_sound:
        return None
    tag_at = proof_at + KEY_ID_BYTES
    proof = (checked[proof_at:tag_at], checked[tag_at:])
    return Trailer(Form(form), digest, *proof, Coding(coding))


_FORMS: Final = frozenset(map(int, Form))
_CODINGS: Final = frozenset(map(int, Coding))
