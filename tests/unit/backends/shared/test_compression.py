"""Compressed blocks are smaller, come back bit by bit, and are never wrong, whatever lies there."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given, strategies

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Loaded, Namespace, Outcome, StoreBlock
from kvtier.plugin_api.backend import block_digest as digest_of
from kvtier.tools.bench.kv_like import kv_like
from kvtier_backends.posix import PAGE_BYTES
from kvtier_backends.shared.compression import BlockCompressor
from kvtier_backends.shared.namespaces import namespace_name
from kvtier_backends.shared.plain_records import Records
from kvtier_backends.shared.record_trailer import Coding, Trailer, encode_trailer
from tests.unit.backends.shared._keys import KEY, OLD, encrypted, made, signed

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 8 * PAGE_BYTES
PLANE_BYTES = BLOCK_BYTES // 2
CONTEXT = BackendContext(
    BLOCK_BYTES, Namespace({"model_name": "org/m", "kv_dtype": "bfloat16"}), "1:x"
)
KV = kv_like(BLOCK_BYTES)
RANDOM = bytes(zstandard.ZstdCompressor(level=19).compress(kv_like(64 * BLOCK_BYTES)))[:BLOCK_BYTES]


def plain(*_keys: str, context: BackendContext, compressor: BlockCompressor) -> Records:
    return Records(context, compressor)


def of(make: Callable[..., Records]) -> Records:
    return make(OLD, context=CONTEXT, compressor=BlockCompressor(BLOCK_BYTES))


FORMS = pytest.mark.parametrize("make", [plain, signed, encrypted])


def stored(records: Records, data: bytes) -> tuple[bytearray, bytes]:
    """Return payload and trailer as they lie in storage."""
    block = StoreBlock(KEY, memoryview(data), digest_of(KEY, memoryview(data)))
    record = records.encode(block)
    assert records.is_record_length(KEY, record.payload.nbytes + len(record.trailer))
    payload = bytearray(record.payload)
    records.give_back(record.payload)
    return payload, record.trailer


def loaded(records: Records, payload: bytes | bytearray, trailer: bytes) -> bytes | None:
    """Return the bytes that are served, None for a miss: judged as the driver would."""
    buffer = memoryview(bytearray(b"\xee" * BLOCK_BYTES))
    answer = records.decode_untrusted(KEY, memoryview(payload), trailer, buffer)
    if answer.outcome is not Outcome.DONE:
        assert answer == Loaded(Outcome.DAMAGED)
        return None
    return bytes(buffer) if answer.digest == digest_of(KEY, buffer) else None


@FORMS
@given(
    word=strategies.binary(min_size=2, max_size=2),
    noise=strategies.lists(
        strategies.tuples(strategies.integers(0, BLOCK_BYTES - 1), strategies.integers(0, 255)),
        max_size=40,
    ),
)
def test_any_block_comes_back_as_it_was(
    make: Callable[..., Records], word: bytes, noise: list[tuple[int, int]]
) -> None:
    data = bytearray(word * PLANE_BYTES)
    for at, byte in noise:
        data[at] = byte
    records = of(make)
    assert loaded(records, *stored(records, bytes(data))) == data


@FORMS
def test_keys_and_values_of_bfloat16_shrink(make: Callable[..., Records]) -> None:
    size = 1 << 20
    context = replace(CONTEXT, block_bytes=size)
    records = make(OLD, context=context, compressor=BlockCompressor(size))
    data = memoryview(kv_like(size))
    payload, _ = records.encode(StoreBlock(KEY, data, digest_of(KEY, data)))
    assert payload.nbytes < 0.7 * size
    assert payload.nbytes % PAGE_BYTES == 0
    counts = records.counts()
    assert counts == {"compression_bytes_in": size, "compression_bytes_out": payload.nbytes}


@FORMS
def test_what_does_not_shrink_is_stored_as_it_is(make: Callable[..., Records]) -> None:
    records = of(make)
    payload, trailer = stored(records, RANDOM)
    assert len(payload) == BLOCK_BYTES
    assert loaded(records, payload, trailer) == RANDOM


@FORMS
@given(at=strategies.integers(0), bit=strategies.integers(0, 7))
def test_a_flipped_bit_in_a_compressed_record_is_never_a_wrong_byte(
    make: Callable[..., Records], at: int, bit: int
) -> None:
    records = of(make)
    payload, trailer = stored(records, KV)
    whole = payload + trailer
    whole[at % len(whole)] ^= 1 << bit
    found = loaded(records, whole[: len(payload)], bytes(whole[len(payload) :]))
    in_padding = make is plain and found == KV  # which nothing covers there, and nobody reads
    assert found is None or in_padding


@FORMS
@given(cut=strategies.integers(0, BLOCK_BYTES))
def test_a_compressed_record_that_is_cut_is_a_miss(make: Callable[..., Records], cut: int) -> None:
    records = of(make)
    payload, trailer = stored(records, KV)
    found = loaded(records, payload[: cut % len(payload)], trailer)
    assert found is None or (make is plain and found == KV)  # a page of padding at most


def hostile(frame: bytes, records: Records) -> tuple[bytes, bytes]:
    """Return what somebody may plant who knows the format, with a trailer that fits it."""
    payload = bytes(PLANE_BYTES) + frame
    payload = payload.ljust(-(-len(payload) // PAGE_BYTES) * PAGE_BYTES, b"\0")
    trailer = Trailer(records.form, digest_of(KEY, memoryview(KV)), coding=Coding.BITPLANE_ZSTD)
    return payload, encode_trailer(KEY, BLOCK_BYTES, trailer)


def frame_of(content: bytes, **how: Any) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(content)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no frame at all",
        frame_of(bytes(PLANE_BYTES - 1)),
        frame_of(bytes(PLANE_BYTES + 1)),
        frame_of(bytes(16 << 20)),
        frame_of(bytes(16 << 20), write_content_size=False),
        frame_of(bytes(PLANE_BYTES), write_content_size=False),
        frame_of(bytes(PLANE_BYTES))[:-1],
        frame_of(bytes(range(256)) * 16)[:40],
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",  # a frame to be skipped
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8,  # one that says it holds 2^64 - 1 bytes
    ],
    ids=lambda frame: f"{len(frame)}-{frame[:6].hex()}",
)
def test_a_frame_of_another_size_is_a_miss_and_gets_no_memory(frame: bytes) -> None:
    records = of(plain)
    planted = hostile(frame, records)
    tracemalloc.start()
    assert loaded(records, *planted) is None
    assert tracemalloc.get_traced_memory()[1] < 16 * BLOCK_BYTES
    tracemalloc.stop()


@given(junk=strategies.binary(max_size=3 * PAGE_BYTES))
def test_junk_in_place_of_the_frame_is_a_miss(junk: bytes) -> None:
    records = of(plain)
    for frame in (junk, b"\x28\xb5\x2f\xfd" + junk, frame_of(KV[1::2])[:40] + junk):
        assert loaded(records, *hostile(frame, records)) is None


def test_a_compressed_record_is_a_miss_where_nothing_is_compressed() -> None:
    payload, trailer = stored(of(plain), KV)
    assert loaded(Records(CONTEXT), payload, trailer) is None


def test_a_block_that_says_it_is_not_compressed_is_not_taken_for_one() -> None:
    records = of(plain)
    payload, _ = stored(records, KV)
    trailer = encode_trailer(KEY, BLOCK_BYTES, Trailer(records.form, bytes(16)))
    assert loaded(records, payload, trailer) is None


@FORMS
def test_engines_with_and_without_compression_are_told_apart(make: Callable[..., Records]) -> None:
    with_it, without = of(make), make(OLD, context=CONTEXT, compressor=None)
    assert namespace_name(with_it.context) != namespace_name(without.context)


@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "fp8", "fp8_e4m3", "int8"])
def test_keys_and_values_of_another_type_are_refused(kv_dtype: str) -> None:
    namespace = Namespace({"model_name": "org/m", "kv_dtype": kv_dtype})
    context = replace(CONTEXT, namespace=namespace)
    with pytest.raises(ConfigError) as refused:
        made(context, compression="bitplane-zstd")
    for word in ("compression='bitplane-zstd'", kv_dtype, "Remove it"):
        assert word in str(refused.value)


def test_compression_is_off_unless_asked_for() -> None:
    assert not made(CONTEXT).are_compressed
    assert made(CONTEXT, compression="bitplane-zstd").are_compressed
    without_an_engine = replace(CONTEXT, namespace=Namespace({}))  # `kvtier check`
    assert made(without_an_engine, compression="bitplane-zstd").are_compressed


def test_another_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compression='gzip'.*bitplane-zstd"):
        made(CONTEXT, compression="gzip")


def test_blocks_without_whole_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 4097 bytes"):
        made(replace(CONTEXT, block_bytes=4097), compression="bitplane-zstd")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install 'zstandard"):
        made(CONTEXT, compression="bitplane-zstd")
