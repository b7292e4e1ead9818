"""Blocks on their way into the log, and what has become of them when they are there."""

from __future__ import annotations

import pytest

from kvtier.plugin_api.backend import StoreBlock
from kvtier_backends.disk.log.batches import AppendBatch, Reinsertion
from kvtier_backends.disk.log.index import BlockIndex, BlockRecord

SLOTS = 8
BUFFER = memoryview(bytes(16))
KEYS = [b"a", b"b", b"c", b"d"]


def index_of(*keys: bytes) -> BlockIndex:
    """Return an index with these keys side by side in its first region, a second apart."""
    index = BlockIndex(3, SLOTS, encrypted=True)
    for slot, key in enumerate(keys):
        index.insert(key, slot, BlockRecord(key * 16, 10 + slot, 20 + slot, key * 32))
    return index


def reinserted(index: BlockIndex) -> AppendBatch:
    """Return what is on its way to another place: all blocks of the first region."""
    items = [
        Reinsertion(key, BUFFER, index.record(source), source)
        for source, key in enumerate(index.keys_of(0))
    ]
    return AppendBatch.reinserted(items)


def new(*keys: bytes) -> AppendBatch:
    blocks = [StoreBlock(key, BUFFER, key * 16) for key in keys]
    return AppendBatch.new(blocks, [key * 32 for key in keys], 99)


def test_new_blocks_are_stored_and_used_now() -> None:
    index = index_of()
    new(*KEYS).put_into(index, SLOTS)
    assert index.find(KEYS) == list(range(SLOTS, SLOTS + 4))
    assert index.record(SLOTS + 1) == BlockRecord(b"b" * 16, 99, 99, b"b" * 32)


def test_a_new_block_that_was_stored_twice_at_once_stays_where_it_is() -> None:
    index = index_of(b"b")
    new(*KEYS).put_into(index, SLOTS)
    assert index.find(KEYS) == [SLOTS, 0, SLOTS + 2, SLOTS + 3]
    assert index.record(0).stored_s == 10


def test_reinserted_blocks_move_and_keep_their_records() -> None:
    index = index_of(*KEYS)
    records = [index.record(slot) for slot in range(4)]
    reinserted(index).put_into(index, SLOTS)
    assert index.find(KEYS) == list(range(SLOTS, SLOTS + 4))
    assert [index.record(SLOTS + slot) for slot in range(4)] == records
    assert index.live(0) == 0


@pytest.mark.parametrize("gone", KEYS)
def test_a_block_that_was_removed_while_it_was_reinserted_stays_removed(gone: bytes) -> None:
    """Its removal was answered already. Back in the index, it would be served again."""
    index = index_of(*KEYS)
    batch = reinserted(index)
    index.remove(gone)
    batch.put_into(index, SLOTS)
    there = [None if key == gone else SLOTS + at for at, key in enumerate(KEYS)]
    assert index.find(KEYS) == there
    assert index.live(0) == 0
    assert index.live(1) == 3


@pytest.mark.parametrize("anew", KEYS)
def test_a_block_that_was_stored_anew_while_it_was_reinserted_stays_the_new_one(
    anew: bytes,
) -> None:
    index = index_of(*KEYS)
    batch = reinserted(index)
    index.remove(anew)
    newer = BlockRecord(b"n" * 16, 50, 50, b"n" * 32)
    index.insert(anew, 2 * SLOTS, newer)
    batch.put_into(index, SLOTS)
    there = [2 * SLOTS if key == anew else SLOTS + at for at, key in enumerate(KEYS)]
    assert index.find(KEYS) == there
    assert index.record(2 * SLOTS) == newer
    for at, key in enumerate(KEYS):
        if key != anew:
            assert index.record(SLOTS + at) == (key * 16, 10 + at, 20 + at, key * 32)
    index.assert_invariants()


def test_a_cut_has_all_columns_of_its_blocks() -> None:
    cut = reinserted(index_of(*KEYS)).cut(1, 3)
    assert cut.is_reinserted
    assert cut == AppendBatch(
        [b"b", b"c"],
        [BUFFER] * 2,
        [b"b" * 16, b"c" * 16],
        [b"b" * 32, b"c" * 32],
        [11, 12],
        [21, 22],
        [1, 2],
    )
    assert not new(*KEYS).cut(1, 3).is_reinserted


def test_a_table_says_where_each_block_lies() -> None:
    entries = new(b"a", b"b").entries(5)
    assert entries == [(5, 99, b"a", b"a" * 16, b"a" * 32), (6, 99, b"b", b"b" * 16, b"b" * 32)]
