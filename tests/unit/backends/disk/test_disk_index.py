from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.errors import InternalError, Misuse
from kvtier_backends.disk.folder.capacity import INDEX_BYTES_PER_BLOCK
from kvtier_backends.disk.format import (
    TAG_BYTES,
    Entry,
    TablePage,
    TableWriter,
    decode_table_untrusted,
    record_struct,
)
from kvtier_backends.disk.log import index as index_module
from kvtier_backends.disk.log import index_words as words_module
from kvtier_backends.disk.log.index import SLOTS_MAX, BlockIndex, BlockRecord, BulkLoad, Dropped
from kvtier_backends.disk.log.index_words import COUNT_AT, HOME_BITS, HOME_MASK, TABLE_WORDS_MEAN
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable

REGIONS, SLOTS = 6, 8
keys = strategies.binary(min_size=1, max_size=3) | strategies.binary(min_size=250, max_size=255)
records = strategies.builds(
    BlockRecord,
    strategies.binary(min_size=16, max_size=16),
    strategies.just(7),
    strategies.just(9),
    strategies.just(b""),
)


def put_all(index: BlockIndex, first: int, given: list[bytes]) -> int:
    count = len(given)
    columns = [bytes(16)] * count, [b""] * count, [7] * count, [9] * count
    return index.insert_run(first, given, *columns)


def bulk_load(index: BlockIndex, given: list[bytes]) -> Dropped:
    """Load a fresh index with keys, which lie one behind the other from its first slot on."""
    bulk = BulkLoad(index, 1, 0)
    slots = index.slots_per_region
    for region, start in enumerate(range(0, len(given), slots)):
        here = enumerate(given[start : start + slots])
        entries = [Entry(slot, 1, key, bytes(16), b"") for slot, key in here]
        writer = TableWriter(bytes(16), 0)
        while added := writer.add(entries):
            del entries[:added]
            bulk.add_page(decode_table_untrusted(writer.encode(), bytes(16)))
            writer.start_page()
        bulk.end_region(region, region + 1)
    return bulk.finish(len(given))


def crowded(key: bytes) -> int:
    """Return a hash whose table is any, and whose home is one of three."""
    real = hash(key)
    return real >> HOME_BITS << HOME_BITS | (HOME_MASK - real % 3)


class IndexSpec(RuleBasedStateMachine):
    """A dictionary is the model: key to location and its record."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(REGIONS, SLOTS)
        # Few homes for all, at the end of a table: walks are long, and wrap around. Tables are
        # split after a few keys, and full after some more.
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(words_module, "TABLE_WORDS_MEAN", 4))
        self.patches.enter_context(patch.object(words_module, "TABLE_WORDS_MAX", 5))
        for module in (index_module, words_module):
            self.patches.enter_context(patch.object(module, "hash", crowded, create=True))
        self.model: dict[bytes, tuple[int, BlockRecord]] = {}

    def teardown(self) -> None:
        self.patches.close()

    @rule(key=keys, record=records, data=strategies.data())
    def insert(self, key: bytes, record: BlockRecord, data: strategies.DataObject) -> None:
        taken = {location for location, _ in self.model.values()}
        free = [place for place in range(REGIONS * SLOTS) if place not in taken]
        if key in self.model or not free:
            return
        location = data.draw(strategies.sampled_from(free))
        self.index.insert(key, location, record)
        self.model[key] = (location, record)

    @rule(
        given_keys=strategies.lists(keys, min_size=1, max_size=SLOTS),
        record=records,
        region=strategies.integers(0, REGIONS - 1),
        start=strategies.integers(0, SLOTS - 1),
    )
    def insert_neighbours(
        self, given_keys: list[bytes], record: BlockRecord, region: int, start: int
    ) -> None:
        """Some of the keys may be there already, or be given twice: those are left out."""
        first = region * SLOTS + start
        taken = {location for location, _ in self.model.values()}
        free = itertools.takewhile(lambda at: at not in taken, range(first, (region + 1) * SLOTS))
        given_keys = given_keys[: len(list(free))]
        if not given_keys:
            return
        columns = [[each] * len(given_keys) for each in record]
        digests, stored_s, used_s, tags = columns
        added = self.index.insert_run(first, given_keys, digests, tags, stored_s, used_s)
        before = len(self.model)
        for location, key in enumerate(given_keys, first):
            self.model.setdefault(key, (location, record))
        assert added == len(self.model) - before

    @rule(
        some=strategies.lists(keys, max_size=3),
        places=strategies.lists(strategies.integers(0, 99), max_size=9),
    )
    def remove_all(self, some: list[bytes], places: list[int]) -> None:
        there = sorted(self.model)
        if there:
            some = [*some, *(there[place % len(there)] for place in places)]
        gone = self.index.remove_all(some)
        assert sorted(gone) == sorted(key for key in set(some) if key in self.model)
        for key in gone:
            del self.model[key]

    @rule(key=keys, place=strategies.none() | strategies.integers(0, 99))
    def remove(self, key: bytes, place: int | None) -> None:
        if self.model and place is not None:
            key = sorted(self.model)[place % len(self.model)]
        location, _ = self.model.pop(key, (None, None))
        assert self.index.remove(key) == location

    @rule(region=strategies.integers(0, REGIONS - 1))
    def release_a_region_without_blocks(self, region: int) -> None:
        if any(location // SLOTS == region for location, _ in self.model.values()):
            with pytest.raises(InternalError):
                self.index.release(region)
        else:
            self.index.release(region)

    @rule(
        now_s=strategies.integers(0, 99), longest=strategies.integers(1, 4), data=strategies.data()
    )
    def use(self, now_s: int, longest: int, data: strategies.DataObject) -> None:
        """A run of neighbours is used: all of it, and nothing before or behind it."""
        if self.model:
            key_at = {location: key for key, (location, _) in self.model.items()}
            first = data.draw(strategies.sampled_from(sorted(key_at)))
            region_end = (first // SLOTS + 1) * SLOTS
            run = list(
                itertools.takewhile(
                    key_at.__contains__, range(first, min(first + longest, region_end))
                )
            )
            self.index.use(first, now_s, len(run))
            for location in run:
                record = self.model[key_at[location]][1]
                self.model[key_at[location]] = (location, record._replace(used_s=now_s))

    @invariant()
    def every_key_is_found_where_it_was_put_and_no_other(self) -> None:
        assert len(self.index) == len(self.model)
        for key, (location, record) in self.model.items():
            assert self.index.get(key) == location
            assert self.index.key_at(location) == key
            assert self.index.record(location) == record
        assert self.index.get(b"never") is None
        assert self.index.find(self.model) == [location for location, _ in self.model.values()]
        side_by_side = sorted(self.model, key=lambda key: self.model[key][0])
        found = [self.model[key][0] for key in side_by_side]
        assert self.index.find([*side_by_side, b"never", *side_by_side]) == [*found, None, *found]
        for location, record in self.model.values():
            assert self.index.digests(location, 1) == [record.digest]

    @invariant()
    def words_and_records_fit(self) -> None:
        self.index.assert_invariants()

    @invariant()
    def each_region_lists_its_blocks(self) -> None:
        for region in range(REGIONS):
            there = sorted(
                (at, key) for key, (at, _) in self.model.items() if at // SLOTS == region
            )
            assert self.index.keys_of(region) == [key for _, key in there]
            assert self.index.live(region) == len(there)
            assert list(self.index.slots_of(region)) == [at % SLOTS for at, _ in there]


TestIndexSpec = IndexSpec.TestCase


def test_keys_that_meet_in_one_place_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints may be equal: then the keys decide. The place is the last: walks wrap around."""
    monkeypatch.setattr("builtins.hash", lambda _: 0xFFFFFFFF)
    index = BlockIndex(4, 8)
    numbered = [number.to_bytes(2, "big") for number in range(32)]
    for location, key in enumerate(numbered):
        index.insert(key, location, BlockRecord(bytes(16), 0, 0, b""))
    for key in numbered[::3]:
        index.remove(key)
    for location, key in enumerate(numbered):
        assert index.get(key) == (None if location % 3 == 0 else location)
    index = BlockIndex(4, 8)
    assert bulk_load(index, numbered) == Dropped(0, 0, 0, 0)
    assert [index.get(key) for key in numbered] == list(range(32))


def test_keys_whose_bytes_are_those_of_others_side_by_side_are_told_apart() -> None:
    index = BlockIndex(1, 8)
    put_all(index, 0, [b"k00", b"k01", b"k02", b"k03"])
    assert index.find([b"k00", b"k01", b"k0", b"2k03"]) == [0, 1, None, None]
    assert index.find([b"k00", b"k0", b"1k02", b"k03"]) == [0, None, None, 3]


def test_an_index_grows_with_what_is_stored_and_finds_all_of_it() -> None:
    """One for 2^30 blocks begins as small as one for a few, and grows a table at a time."""
    index = BlockIndex(1 << 17, 1 << 13)
    assert len(index.words.tables) == 1
    numbered = [number.to_bytes(4, "big") * 4 for number in range(20_000)]
    for location, key in enumerate(numbered):
        tables = {id(table) for table in index.words.tables}
        index.insert(key, location, BlockRecord(bytes(16), 0, 0, b""))
        assert len({id(table) for table in index.words.tables} - tables) <= 2
    different = {id(table) for table in index.words.tables}
    assert len(different) == -(-20_000 // TABLE_WORDS_MEAN)
    assert index.find(numbered) == list(range(20_000))
    assert len(index.remove_all(numbered[::2])) == 10_000
    assert index.find(numbered) == [None if at % 2 == 0 else at for at in range(20_000)]
    assert not index.words.over, "by chance, a table is hardly ever full"
    each_once = {id(table): table for table in index.words.tables}
    assert sum(table[COUNT_AT] for table in each_once.values()) == 10_000


def test_a_table_that_is_too_full_keeps_an_empty_word_and_all_of_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A walk ends at an empty word. One for a key that is not there would go on for ever."""
    for module in (index_module, words_module):  # one table for all, and many homes
        monkeypatch.setattr(module, "hash", lambda key: int.from_bytes(key) % 1024, raising=False)
    given = [number.to_bytes(2) for number in range(1024)]
    index = BlockIndex(1, 1024)
    assert put_all(index, 0, given) == 1024
    index.assert_invariants()
    assert index.find([*given, b"\4\0"]) == [*range(1024), None]

    index = BlockIndex(1, 1024)
    assert bulk_load(index, given) == Dropped(0, 0, 0, 0)
    index.assert_invariants()
    assert index.find([*given, b"\4\0"]) == [*range(1024), None]
    assert len(index.remove_all(given)) == 1024
    index.assert_invariants()


def test_a_bulk_load_of_many_tables_is_found_again_also_when_the_index_grows() -> None:
    numbered = [number.to_bytes(2) for number in range(3 * TABLE_WORDS_MEAN)]
    index = BlockIndex(3, 1024)
    assert bulk_load(index, numbered) == Dropped(0, 0, 0, 0)
    assert len(index.words.tables) > 2
    index.assert_invariants()
    assert index.find([*numbered, b"never"]) == [*range(len(numbered)), None]
    more = [number.to_bytes(3) for number in range(1024)]
    assert put_all(index, 2048, more) == 1024
    index.assert_invariants()
    assert index.find([*numbered, *more]) == [*range(len(numbered)), *range(2048, 3072)]


def test_an_index_takes_no_more_memory_a_block_than_is_planned_for_it() -> None:
    index = BlockIndex(1, 1 << 14)
    assert put_all(index, 0, [number.to_bytes(36) for number in range(1 << 14)]) == 1 << 14
    slab = index.slab(0, 36)
    columns = [slab.keys, slab.lengths, slab.digests, slab.tags, slab.stored_s, slab.used_s]
    tables = {id(table): table for table in index.words.tables}.values()
    assert sum(map(sys.getsizeof, [*columns, *tables])) <= INDEX_BYTES_PER_BLOCK << 14


def test_a_region_that_has_no_block_any_more_gives_its_memory_back() -> None:
    """An index takes memory for what is stored, and not for what was once."""
    index = BlockIndex(2, 8)
    put_all(index, 0, [b"a"])
    before = index.slab(0, 1)
    with pytest.raises(InternalError):
        index.release(0)
    assert index.slab(0, 1) is before
    index.remove(b"a")
    index.release(0)
    assert index.slab(0, 1) is not before


def zero_without_moving_back(words: words_module.Words, key: bytes, location: int) -> None:
    """Remove a word as one must not: what was walked to over it is out of reach."""
    table = words.tables[0]
    word = (hash(key) & words_module.LOCATION_MASK) << words_module.HALF_BITS | (location + 1)
    table[table.index(word)] = 0
    table[COUNT_AT] -= 1


def forget_the_word(words: words_module.Words, key: bytes, location: int) -> None:
    """The block goes, and its word stays."""


def forget_the_count(words: words_module.Words, key: bytes, location: int) -> None:
    words_module.Words.remove(words, key, location)
    words.tables[0][COUNT_AT] += 1


@pytest.mark.parametrize(
    "mistake",
    [zero_without_moving_back, forget_the_word, forget_the_count],
    ids=lambda each: each.__name__,
)
def test_assertions_find_what_an_index_must_never_hold(
    mistake: Callable[[words_module.Words, bytes, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.hash", lambda _: 1023)
    index = BlockIndex(2, 8)
    for location, key in enumerate([b"a", b"b", b"c"]):
        index.insert(key, location, BlockRecord(bytes(16), 0, 0, b""))
    index.assert_invariants()
    monkeypatch.setattr(index.words, "remove", partial(mistake, index.words))
    index.remove(b"a")
    with pytest.raises(AssertionError):
        index.assert_invariants()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    index = BlockIndex(2, 4)
    record = BlockRecord(b"d" * 16, 0, 0, b"")
    index.insert(b"a", 3, record)
    with pytest.raises(InternalError):  # it has a block
        index.insert(b"b", 3, record)
    with pytest.raises(Misuse):
        index.insert(b"b", 0, record._replace(digest=b"d" * 15))
    with pytest.raises(Misuse):
        index.insert(bytes(256), 0, record)
    with pytest.raises(InternalError):  # neighbours beyond the end of their region
        put_all(index, 7, [b"b", b"c"])
    assert index.find([b"a", b"b", b"c"]) == [3, None, None]
    assert index.record(3) == record
    assert len(index) == 1
    for regions, slots in ((SLOTS_MAX, 2), (1, (1 << 30) + 1)):  # half a word names a location
        with pytest.raises(Misuse):
            BlockIndex(regions, slots)
    BlockIndex(1 << 10, 1 << 20)


def test_what_was_stored_before_a_time_is_listed() -> None:
    index = BlockIndex(2, 4)
    for number in range(4):
        index.insert(bytes([number]), 4 + number, BlockRecord(bytes(16), number, 0, b""))
    assert index.stored_before(1, 2) == [b"\0", b"\1"]
    assert index.stored_before(0, 2) == []


@pytest.mark.parametrize("encrypted", [False, True], ids=["in the clear", "encrypted"])
def test_a_bulk_load_leaves_out_what_no_region_of_this_layout_can_hold(*, encrypted: bool) -> None:
    """Pages have checksums, but who wrote them may have had another layout in mind."""
    index = BlockIndex(2, SLOTS, encrypted=encrypted)
    bulk = BulkLoad(index, 9, 0)

    def add_page(tag_bytes: int, *given: tuple[int, int, bytes]) -> None:
        pack = record_struct(2, tag_bytes).pack
        packed = b"".join(
            pack(slot, 1, length, b"d" * 16, b"t" * tag_bytes, key) for slot, length, key in given
        )
        bulk.add_page(TablePage(1, len(given), 2, tag_bytes, memoryview(packed)))

    tag_bytes = TAG_BYTES * encrypted
    add_page(tag_bytes, (0, 2, b"aa"), (1, 0, b"bb"), (2, 3, b"cc"), (SLOTS, 2, b"dd"))
    add_page(TAG_BYTES - tag_bytes, (3, 2, b"ee"))
    add_page(tag_bytes, (SLOTS - 1, 1, b"ff"))
    assert bulk.end_region(1, 1) == 2
    assert bulk.finish(99) == Dropped(beyond=4, expired=0, doubled=0, over=0)
    assert index.keys_of(1) == [b"aa", b"f"]
    assert index.find([b"aa", b"f"]) == [SLOTS, 2 * SLOTS - 1]
    index.assert_invariants()


tables = (
    strategies.lists(  # of one region after the other, some pages of each, some entries of each
        strategies.lists(
            strategies.lists(
                strategies.tuples(strategies.integers(0, SLOTS), strategies.integers(0, 9), keys),
                max_size=5,
            ),
            max_size=3,
        ),
        max_size=REGIONS,
    )
)


@settings(max_examples=examples(100))
@given(
    tables,
    strategies.integers(0, 9),
    strategies.integers(0, 9),
    strategies.integers(0, 48),
    strategies.sampled_from([0, 32]),
    strategies.data(),
)
def test_a_bulk_load_does_what_a_loop_would(
    found: list[list[list[tuple[int, int, bytes]]]],
    now_s: int,
    ttl_s: int,
    limit: int,
    tag_bytes: int,
    data: strategies.DataObject,
) -> None:
    index = BlockIndex(REGIONS, SLOTS, encrypted=tag_bytes > 0)
    bulk = BulkLoad(index, now_s, ttl_s)
    oldest_s = now_s - ttl_s if ttl_s else 0
    wanted: dict[bytes, tuple[int, Entry]] = {}
    beyond = expired = doubled = 0
    ends: list[tuple[int, dict[int, Entry]]] = []
    order = data.draw(strategies.permutations(range(REGIONS)))
    for region, pages in zip(order, found, strict=False):
        held: dict[int, Entry] = {}
        for page in pages:
            entries = [
                Entry(slot, time_s, key, key[:1] * 16 or bytes(16), bytes([slot]) * tag_bytes)
                for slot, time_s, key in page
            ]
            writer = TableWriter(bytes(16), tag_bytes)
            writer.add(entries)
            bulk.add_page(decode_table_untrusted(writer.encode(), bytes(16)))
            beyond += sum(entry.slot >= SLOTS for entry in entries)
            known = [entry._replace(stored_s=min(entry.stored_s, now_s)) for entry in entries]
            held.update({entry.slot: entry for entry in known if entry.slot < SLOTS})
        expired += sum(entry.stored_s < oldest_s for entry in held.values())
        held = {slot: entry for slot, entry in held.items() if entry.stored_s >= oldest_s}
        assert bulk.end_region(region, region + 5) == len(held)
        ends.append((region, held))
    for region, held in sorted(ends, key=lambda end: end[0]):
        for slot, entry in sorted(held.items()):
            doubled += entry.key in wanted
            wanted.pop(entry.key, None)
            wanted[entry.key] = (region * SLOTS + slot, entry)
    over = max(0, len(wanted) - limit)
    assert bulk.finish(limit) == Dropped(beyond, expired, doubled, over)
    wanted = dict(itertools.islice(wanted.items(), over, None))
    assert len(index) == len(wanted)
    index.assert_invariants()
    for key, (location, entry) in wanted.items():
        assert index.get(key) == location
        assert index.record(location) == (entry.digest, entry.stored_s, entry.stored_s, entry.tag)
    listed = sorted(key for region in range(REGIONS) for key in index.keys_of(region))
    assert listed == sorted(wanted)
    assert sum(index.live(region) for region in range(REGIONS)) == len(wanted)
    for key in wanted:
        assert index.remove(key) is not None
    assert not any(any(table) for table in index.words.tables)
