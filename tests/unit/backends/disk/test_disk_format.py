from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from kvtier.errors import Misuse
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier_backends.disk import format as fmt
from tests.support.examples import examples

ids = strategies.binary(min_size=16, max_size=16)
u32 = strategies.integers(0, 2**32 - 1)
u64 = strategies.integers(0, 2**64 - 1)
keys = strategies.binary(min_size=1, max_size=fmt.KEY_BYTES_MAX)
superblocks = strategies.builds(
    fmt.Superblock,
    ids,
    strategies.integers(1, 2**40).map(lambda n: n * 4096),
    strategies.integers(1, 4096),
    u64,
)
sequences = strategies.integers(0, fmt.SEQUENCE_MAX)
descriptions = strategies.binary(max_size=fmt.DESCRIPTION_BYTES_MAX)
headers = strategies.builds(
    fmt.RegionHeader, ids, ids, ids, ids, u32, sequences, u64, u64, u32, u32, u64, descriptions
)
INCARNATION = b"i" * 16


def entries_of(tag_bytes: int) -> strategies.SearchStrategy[fmt.Entry]:
    tags = strategies.binary(min_size=tag_bytes, max_size=tag_bytes)
    return strategies.builds(fmt.Entry, u32, u32, keys, ids, tags)


def refusal_of(page: bytes, incarnation: bytes = INCARNATION) -> fmt.Refusal:
    with pytest.raises(fmt.PageRefused) as refused:
        fmt.decode_table_untrusted(page, incarnation)
    return refused.value.refusal


@given(superblocks)
def test_a_superblock_comes_back(superblock: fmt.Superblock) -> None:
    page = fmt.encode_superblock(superblock)
    assert len(page) == fmt.PAGE_BYTES
    assert fmt.decode_superblock_untrusted(page) == superblock


@given(headers)
def test_a_header_comes_back(header: fmt.RegionHeader) -> None:
    page = fmt.encode_header(header)
    assert len(page) == fmt.PAGE_BYTES
    assert fmt.decode_header_untrusted(page) == header


@given(headers, strategies.integers(fmt.SEQUENCE_MAX + 1, 2**64 - 1))
def test_a_sequence_that_leaves_no_room_behind_it_is_damage(
    header: fmt.RegionHeader, sequence: int
) -> None:
    """It was planted: after it no region could be opened any more."""
    page = fmt.encode_header(replace(header, sequence=sequence))
    with pytest.raises(fmt.PageRefused) as refused:
        fmt.decode_header_untrusted(page)
    assert refused.value.refusal is fmt.Refusal.DAMAGED


@given(strategies.data(), strategies.sampled_from([0, fmt.TAG_BYTES]))
def test_a_table_page_comes_back_each_time_it_grows(
    data: strategies.DataObject, tag_bytes: int
) -> None:
    writer = fmt.TableWriter(INCARNATION, tag_bytes)
    held: list[fmt.Entry] = []
    batches = data.draw(
        strategies.lists(strategies.lists(entries_of(tag_bytes), max_size=8), max_size=8)
    )
    for serial, batch in enumerate(batches, start=1):
        taken = writer.add(batch)
        held.extend(batch[:taken])
        if taken < len(batch):
            writer.start_page()
            held = batch[taken:]
            assert writer.add(held) == len(held)
        table = fmt.decode_table_untrusted(writer.encode(), INCARNATION)
        assert (table.serial, table.entries, table.tag_bytes) == (serial, len(held), tag_bytes)
        assert list(fmt.entries_untrusted(table, 2**32)) == held
        limit = data.draw(u32)
        assert list(fmt.entries_untrusted(table, limit)) == [e for e in held if e.slot < limit]


def test_a_page_takes_what_fits_and_not_one_more() -> None:
    entry = fmt.Entry(0, 0, bytes(36), bytes(16), b"")
    writer = fmt.TableWriter(INCARNATION, 0)
    most = fmt.records_max(36, 0)
    assert most >= 60
    assert writer.add([entry] * (most - 1)) == most - 1
    wider = entry._replace(key=bytes(255))
    assert writer.add([wider]) == 0, "with it, all others would be as wide"
    assert writer.add([entry, entry]) == 1
    assert writer.add([entry]) == 0
    assert fmt.decode_table_untrusted(writer.encode(), INCARNATION).entries == most


@pytest.mark.parametrize("length", [0, 256])
def test_a_key_that_is_no_key_is_the_callers_mistake(length: int) -> None:
    with pytest.raises(Misuse):
        fmt.TableWriter(INCARNATION, 0).add([fmt.Entry(0, 0, bytes(length), bytes(16), b"")])


def sealed(magic: bytes, more: bytes = b"") -> strategies.SearchStrategy[bytes]:
    """Pages that are whole, though their writer was not sane: all that a checksum proves."""
    start = fmt._PREFIX.pack(magic, fmt.FORMAT_VERSION) + more
    return strategies.binary(max_size=4000).map(lambda body: fmt._with_checksum(start + body))


@settings(max_examples=examples(300))
@given(
    strategies.binary(max_size=64)
    | strategies.binary(min_size=4096, max_size=4096)
    | sealed(fmt._MAGIC_SUPERBLOCK)
    | sealed(fmt._MAGIC_REGION)
    | sealed(fmt._MAGIC_TABLE, INCARNATION)
)
def test_of_any_bytes_parsers_raise_nothing_but_page_refused(raw: bytes) -> None:
    with suppress(fmt.PageRefused):
        fmt.decode_superblock_untrusted(raw)
    with suppress(fmt.PageRefused):
        fmt.decode_header_untrusted(raw)
    with suppress(fmt.PageRefused):
        for entry in fmt.entries_untrusted(fmt.decode_table_untrusted(raw, INCARNATION), 10):
            assert entry.slot < 10
            assert len(entry.key) <= fmt.KEY_BYTES_MAX


@given(headers, strategies.integers(0, 4096 * 8 - 1))
def test_a_flipped_bit_anywhere_is_seen(header: fmt.RegionHeader, bit: int) -> None:
    page = bytearray(fmt.encode_header(header))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(fmt.PageRefused):
        fmt.decode_header_untrusted(bytes(page))


def test_each_refusal_is_told_from_the_others() -> None:
    writer = fmt.TableWriter(INCARNATION, 0)
    page = writer.encode()
    newer = page[:8] + (2).to_bytes(4, "little") + page[12:]
    assert refusal_of(bytes(4096)) is fmt.Refusal.BLANK
    assert refusal_of(newer) is fmt.Refusal.DAMAGED
    assert refusal_of(fmt._with_checksum(newer[:-8])) is fmt.Refusal.OTHER_VERSION
    assert refusal_of(page, b"j" * 16) is fmt.Refusal.OTHER_INCARNATION
    assert refusal_of(page[:-1]) is fmt.Refusal.DAMAGED
    assert refusal_of(fmt.encode_superblock(fmt.Superblock(bytes(16), 4096, 1, 0))) is (
        fmt.Refusal.DAMAGED
    )


@given(
    strategies.integers(1, 1 << 22),
    strategies.integers(0, 200),
    strategies.sampled_from([0, fmt.TAG_BYTES]),
    strategies.integers(0, 4096),
)
def test_a_region_holds_its_slots_and_their_table(
    block_bytes: int, slots: int, tag_bytes: int, more: int
) -> None:
    """However short the stores were, the table has a page to spare for the planned keys."""
    region_bytes = fmt.region_bytes_for(slots, block_bytes, tag_bytes)
    found = fmt.make_region_geometry(region_bytes + more // 4096 * 4096, block_bytes, tag_bytes)
    assert found.slots >= slots
    assert found.slot_at(found.slots) <= found.region_bytes or not found.slots
    per_page = fmt.records_max(fmt.KEY_BYTES_PLANNED, tag_bytes)
    assert (found.table_pages - 1) * per_page >= found.slots
    assert found.stride >= block_bytes
    assert found.slots_at % fmt.PAGE_BYTES == found.stride % fmt.PAGE_BYTES == 0


def test_a_namespace_is_its_facts_and_the_block_size() -> None:
    def digest(block_bytes: int, **facts: object) -> bytes:
        return fmt.namespace_digest(BackendContext(block_bytes, Namespace(facts), "1:disk"))

    assert digest(1, a=1, b=[2]) == digest(1, b=[2], a=1)
    assert len({digest(1, a=1), digest(2, a=1), digest(1, a=2), digest(1, b=1)}) == 4
