"""With keys, nothing is served that a holder of a key did not make; and nothing told to others."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given, strategies

from kvtier.plugin_api.backend import BackendContext, Namespace, StoreBlock, block_digest
from kvtier_backends.encryption.cipher import TAG_BYTES
from kvtier_backends.encryption.keys import KEY_ID_BYTES, parse_keys_untrusted
from kvtier_backends.shared.namespaces import describe, first_difference, namespace_name
from kvtier_backends.shared.record_trailer import Form, Trailer, encode_trailer, trailer_bytes
from kvtier_backends.shared.records import Records
from tests.unit.backends.shared._keys import (
    BLOCK_BYTES,
    CONTEXT,
    FOREIGN,
    KEY,
    NEW,
    OLD,
    block_of,
    data_of,
    encrypted,
    loaded,
    signed,
    stored,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PROTECTED = pytest.mark.parametrize("protected", [signed, encrypted])
RECORD_BYTES = BLOCK_BYTES + trailer_bytes(KEY, Form.SIGNED)
OTHER_KEY = KEY[:-1] + b"\xff"


@pytest.mark.parametrize("records", [Records(CONTEXT), signed(OLD), encrypted(OLD)])
@given(number=strategies.integers(0, 255), key=strategies.binary(min_size=1, max_size=300))
def test_a_block_comes_back_as_it_was_stored(records: Records, number: int, key: bytes) -> None:
    block = block_of(number, key)
    payload, trailer = stored(records, block)
    assert len(payload) + len(trailer) == records.record_bytes(key)
    assert loaded(records, payload, trailer, key) == block.buffer
    assert records.counts() == {}


@PROTECTED
@given(bit=strategies.integers(0, RECORD_BYTES * 8 - 1))
def test_a_flipped_bit_anywhere_in_a_record_is_a_miss(
    protected: Callable[..., Records], bit: int
) -> None:
    records = protected(OLD)
    whole = bytearray().join(stored(records, block_of(1)))
    whole[bit // 8] ^= 1 << bit % 8
    assert loaded(records, whole[:BLOCK_BYTES], whole[BLOCK_BYTES:]) is None


@PROTECTED
@given(
    at=strategies.integers(0, RECORD_BYTES - 9),
    planted=strategies.binary(min_size=1, max_size=64),
)
def test_a_change_with_its_checksum_put_right_is_a_miss(
    protected: Callable[..., Records], at: int, planted: bytes
) -> None:
    """The checksum of a trailer keeps nobody out: this one fits what was changed."""
    records = protected(OLD)
    payload, trailer = stored(records, block_of(1))
    checked = bytearray(payload + trailer[:-8])
    planted = planted[: len(checked) - at]
    before = bytes(checked)
    checked[at : at + len(planted)] = planted
    forged = _with_checksum(bytes(checked[BLOCK_BYTES:]))
    is_same = bytes(checked) == before
    assert loaded(records, checked[:BLOCK_BYTES], forged) == (data_of(1) if is_same else None)


def _with_checksum(checked: bytes) -> bytes:
    return checked + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little")


def forged(number: int, trailer: Trailer) -> tuple[bytes, bytes]:
    """Return what an attacker makes who knows all but the key: bytes, and a trailer for them."""
    return data_of(number), encode_trailer(KEY, BLOCK_BYTES, trailer)


def test_without_a_key_whoever_can_write_there_can_plant_a_block() -> None:
    """That is what the docs say, and why there are keys."""
    planted = forged(66, Trailer(Form.PLAIN, block_of(66).digest))
    assert loaded(Records(CONTEXT), *planted) == data_of(66)


@PROTECTED
def test_with_a_key_no_attacker_without_it_plants_a_block(
    protected: Callable[..., Records],
) -> None:
    records = protected(OLD)
    _, right = stored(records, block_of(1))
    key_id, tag = right[-8 - TAG_BYTES - KEY_ID_BYTES :][:KEY_ID_BYTES], right[-8 - TAG_BYTES : -8]
    wanted = block_of(66)
    attempts = [
        forged(66, Trailer(Form.PLAIN, wanted.digest)),
        forged(66, Trailer(records.form, wanted.digest, bytes(key_id), bytes(tag))),
        forged(66, Trailer(records.form, wanted.digest, bytes(key_id), os.urandom(TAG_BYTES))),
        forged(66, Trailer(records.form, wanted.digest, bytes(key_id), bytes(TAG_BYTES))),
        stored(protected(FOREIGN), wanted),
        (data_of(66), right),
    ]
    # A key of the attacker's own, under the id of ours.
    payload, trailer = stored(protected(FOREIGN), wanted)
    own = _with_checksum(bytes(trailer[: -8 - TAG_BYTES - KEY_ID_BYTES] + key_id))[:-8]
    attempts.append((payload, _with_checksum(own + trailer[-8 - TAG_BYTES : -8])))
    for number, attempt in enumerate(attempts, start=1):
        assert loaded(records, *attempt) is None, number
        assert records.counts() == {"unauthenticated": number}


@PROTECTED
def test_two_records_that_change_places_are_misses(protected: Callable[..., Records]) -> None:
    """Also half of each, and whoever puts the other key into the trailer."""
    records = protected(OLD)
    one, other = stored(records, block_of(1)), stored(records, block_of(2, OTHER_KEY))
    assert loaded(records, *other) is None
    assert loaded(records, *one, key=OTHER_KEY) is None
    assert loaded(records, other[0], one[1]) is None
    renamed = bytes(other[1][:-8]).replace(OTHER_KEY, KEY)
    assert loaded(records, other[0], _with_checksum(renamed)) is None


@PROTECTED
@pytest.mark.parametrize(
    "context",
    [
        replace(CONTEXT, namespace=Namespace({"model_name": "org/m", "dtype": "fp16"})),
        replace(CONTEXT, namespace=Namespace({})),
    ],
)
def test_a_record_of_another_namespace_is_a_miss(
    context: BackendContext, protected: Callable[..., Records]
) -> None:
    there = stored(protected(OLD, context=context), block_of(1))
    assert loaded(protected(OLD), *there) is None


@PROTECTED
def test_a_record_of_another_key_is_a_miss(protected: Callable[..., Records]) -> None:
    records = protected(OLD)
    assert loaded(records, *stored(protected(NEW), block_of(1))) is None
    assert records.counts() == {"unauthenticated": 1}


def test_a_key_that_signs_elsewhere_does_not_vouch_for_an_encrypted_block() -> None:
    """One file of keys may be named by both kinds of tiers."""
    assert loaded(signed(OLD), *stored(encrypted(OLD), block_of(1))) is None
    assert loaded(encrypted(OLD), *stored(signed(OLD), block_of(1))) is None


@PROTECTED
def test_a_rotated_key_still_reads_and_no_longer_writes(
    protected: Callable[..., Records],
) -> None:
    old, both, new = protected(OLD), protected(NEW, OLD), protected(NEW)
    before, since = stored(old, block_of(1)), stored(both, block_of(2))
    assert loaded(both, *before) == data_of(1)
    assert loaded(both, *since) == loaded(new, *since) == data_of(2)
    assert loaded(new, *before) is None
    assert loaded(old, *since) is None
    assert loaded(protected(OLD, NEW), *since) == data_of(2), "the first step of a rotation"


@pytest.mark.parametrize("records", [Records(CONTEXT), signed(OLD), encrypted(OLD)])
@given(
    payload=strategies.binary(max_size=BLOCK_BYTES + 1),
    trailer=strategies.binary(max_size=200),
    stop=strategies.integers(0, 200),
)
def test_any_bytes_are_a_miss_and_raise_nothing(
    records: Records, payload: bytes, trailer: bytes, stop: int
) -> None:
    assert loaded(records, payload, trailer) is None
    right = stored(records, block_of(1))
    assert loaded(records, payload, right[1]) is None
    assert loaded(records, right[0], trailer) is None
    torn = right[1][:stop]
    if len(torn) < len(right[1]):
        assert loaded(records, right[0], torn) is None


def test_an_encrypted_record_tells_nothing_of_the_block() -> None:
    records = encrypted(OLD)
    block = block_of(1)
    whole = b"".join(stored(records, block))
    runs = {whole[at : at + 16] for at in range(len(whole))}
    assert not any(data_of(1)[at : at + 16] in runs for at in range(BLOCK_BYTES - 15))
    assert block.digest not in whole
    assert bytes.fromhex(OLD) not in whole


def test_the_same_block_is_encrypted_anew_each_time() -> None:
    records = encrypted(OLD)
    one, other = stored(records, block_of(1)), stored(records, block_of(1))
    assert one[0] != other[0]
    masked = [trailer[24:40] for _, trailer in (one, other)]
    assert masked[0] != masked[1]
    assert block_of(1).digest not in masked
    assert loaded(records, *one) == loaded(records, *other) == data_of(1)


def test_a_signed_block_lies_there_as_it_is() -> None:
    assert signed(OLD).are_plain
    assert stored(signed(OLD), block_of(1))[0] == data_of(1)
    assert not encrypted(OLD).are_plain


def test_a_payload_may_be_the_buffer_itself() -> None:
    """A backend that reads into the slot: it holds the block, or a miss."""
    for records in (Records(CONTEXT), signed(OLD), encrypted(OLD)):
        payload, trailer = stored(records, block_of(1))
        buffer = memoryview(payload)
        assert records.decode_untrusted(KEY, buffer, bytes(trailer), buffer).digest
        assert buffer == data_of(1)


def test_engines_that_differ_in_protection_share_no_name() -> None:
    """Otherwise each would remove what the other stores; a rotation changes no name."""
    every = [Records(CONTEXT), signed(OLD), encrypted(OLD)]
    names = {namespace_name(records.context) for records in every}
    assert len(names) == 3
    assert namespace_name(CONTEXT) in names, "what was there before there were keys"
    assert namespace_name(signed(NEW, OLD).context) == namespace_name(signed(OLD).context)
    plain, with_keys = (describe("x", 1, records.context) for records in every[:2])
    difference = first_difference(plain, with_keys)
    assert difference is not None
    assert difference.name == "facts.protection"
    assert difference.here == "signed"


def test_a_plain_record_is_what_it_has_been() -> None:
    block = StoreBlock(b"key", memoryview(bytes(BLOCK_BYTES)), bytes(range(16)))
    _, trailer = stored(Records(CONTEXT), block)
    head = b"kvtierR\n" + struct.pack("<HHIQ", 1, 3, 0, BLOCK_BYTES)
    assert trailer == _with_checksum(head + bytes(range(16)) + b"key")


def test_no_text_of_records_or_keys_has_the_key_in_it() -> None:
    keyring = parse_keys_untrusted(OLD)
    for each in (keyring, signed(OLD), encrypted(OLD), signed(OLD).context):
        shown = f"{each!r} {each}"
        assert OLD not in shown
        assert repr(bytes.fromhex(OLD))[2:-1] not in shown


def test_memory_that_is_given_back_is_used_again_and_else_never() -> None:
    """After a call that was cancelled somebody may still write it to the storage."""
    records = encrypted(OLD)
    kept, _ = records.encode(block_of(1))
    before = bytes(kept)
    given_back, _ = records.encode(block_of(2))
    again = given_back.obj
    records.give_back(given_back)
    assert records.room_for(memoryview(bytes(BLOCK_BYTES))).obj is again
    for number in range(3, 20):
        records.encode(block_of(number))
    assert kept == before


def test_memory_that_is_kept_is_bounded() -> None:
    """A burst of large blocks must not stay in memory for good."""
    context = replace(CONTEXT, block_bytes=4 << 20)
    records = encrypted(OLD, context=context)
    data = memoryview(bytes(4 << 20))
    payloads = [records.room_for(data) for _ in range(20)]
    for payload in payloads:
        records.give_back(payload)
    before = {id(payload.obj) for payload in payloads}
    again = [records.room_for(data) for _ in range(20)]
    assert sum(id(payload.obj) in before for payload in again) == 16
    small = encrypted(OLD)
    payloads = [small.room_for(memoryview(data_of(1))) for _ in range(200)]
    for payload in payloads:
        small.give_back(payload)
    before = {id(payload.obj) for payload in payloads}
    again = [small.room_for(memoryview(data_of(1))) for _ in range(200)]
    assert {id(payload.obj) for payload in again} == before, "as many as some batches have"


def test_plain_payloads_are_read_where_they_belong() -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for records in (Records(CONTEXT), signed(OLD)):
        assert records.room_for(buffer) is buffer
        records.give_back(buffer)
    assert encrypted(OLD).room_for(buffer).nbytes == BLOCK_BYTES


def test_the_drivers_check_stays_the_checksum() -> None:
    """So a block of an older key passes it too."""
    payload, trailer = stored(signed(OLD), block_of(1))
    buffer = memoryview(bytearray(BLOCK_BYTES))
    answer = signed(NEW, OLD).decode_untrusted(KEY, memoryview(payload), trailer, buffer)
    assert answer.digest == block_digest(KEY, buffer)
