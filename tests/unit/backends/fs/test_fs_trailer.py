"""The trailer says whose block it is, and no bytes make its reader raise anything else."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, strategies

from kvtier.errors import Misuse, StoreFault
from kvtier_backends.fs.forms import (
    KEY_BYTES_MAX,
    TRAILER_BYTES,
    TrailerDamaged,
    decode_trailer_untrusted,
    encode_trailer,
)
from kvtier_backends.posix import padded_bytes

KEYS = strategies.binary(max_size=KEY_BYTES_MAX)
DIGESTS = strategies.binary(min_size=16, max_size=16)
PAGE = encode_trailer(b"key", 65536, bytes(range(16)))


@given(key=KEYS, block_bytes=strategies.integers(0, 2**63), digest=DIGESTS)
def test_a_trailer_comes_back(key: bytes, block_bytes: int, digest: bytes) -> None:
    page = encode_trailer(key, block_bytes, digest)
    assert len(page) == TRAILER_BYTES
    assert decode_trailer_untrusted(page, key, block_bytes) == digest
    assert decode_trailer_untrusted(memoryview(page), key, block_bytes) == digest


@given(
    raw=strategies.binary(max_size=64),
    stem=strategies.sampled_from([b"", PAGE[:60], PAGE]),
    fill=strategies.booleans(),
)
def test_decode_trailer_untrusted_raises_nothing_but_trailer_damaged(
    raw: bytes, stem: bytes, fill: bool
) -> None:
    page = stem + raw
    page = page.ljust(TRAILER_BYTES, b"\xff")[:TRAILER_BYTES] if fill else page
    with suppress(TrailerDamaged):
        decode_trailer_untrusted(page, b"key", 65536)
    assert issubclass(TrailerDamaged, StoreFault)


@given(bit=strategies.integers(0, TRAILER_BYTES * 8 - 1))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    page = bytearray(PAGE)
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TrailerDamaged):
        decode_trailer_untrusted(bytes(page), b"key", 65536)


@pytest.mark.parametrize(("key", "block_bytes"), [(b"kez", 65536), (b"ke", 65536), (b"key", 4096)])
def test_a_sound_trailer_of_another_block_is_refused(key: bytes, block_bytes: int) -> None:
    with pytest.raises(TrailerDamaged):
        decode_trailer_untrusted(PAGE, key, block_bytes)


def test_what_does_not_fit_is_misuse() -> None:
    with pytest.raises(Misuse):
        encode_trailer(bytes(KEY_BYTES_MAX + 1), 4096, bytes(16))
    with pytest.raises(Misuse):
        encode_trailer(b"key", 4096, bytes(15))


@pytest.mark.parametrize(("size", "padded"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_the_trailer_starts_on_a_page(size: int, padded: int) -> None:
    assert padded_bytes(size) == padded
