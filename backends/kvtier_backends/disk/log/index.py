"""The disk tier's index: maps keys to locations, compactly and without pauses.

A location is one number: ``region * slots_per_region + slot``. The record
of a block (key, digest, times) lies in flat arrays of its region, at its slot (``Slab``),
so a region's blocks are listed and forgotten without a search. Tables of
64-bit words (``index_words.py``) lead from a key to its location. They grow with the
stored blocks, a table at a time, and so do the arrays, a region at a time: the index
of a large tier with few blocks is small. The garbage collector sees nothing of it
except one small object per region.

``BulkLoad`` fills an empty index from table pages, a million blocks in about a second.
Regions come in any order; the sequence of each shows its age. The newest copy of
a key is kept; if more blocks are left than the tier has room for, the oldest are
dropped. The words of the index are laid out all at once: sorted by home, each goes
to its home or right behind its predecessor.
"""

from __future__ import annotations

from array import array
from functools import cache
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvtier.errors import InternalError, Misuse
from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.disk.format import TAG_BYTES, check_key_lengths
from kvtier_backends.disk.log.index_words import (
    HALF_BITS,
    HOME_BITS,
    HOME_MASK,
    LOCATION_MASK,
    Words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvtier_backends.disk.format import TablePage


class Slab:
    """The blocks of one region. A length of 0 marks a slot without a block."""

    __slots__ = ("digests", "key_width", "keys", "lengths", "stored_s", "tags", "used_s")

    def __init__(self, slots: int, key_width: int, *, encrypted: bool) -> None:
        self.key_width = key_width
        self.keys = bytearray(slots * key_width)
        self.lengths = bytearray(slots)  # of the key
        self.digests = bytearray(slots * DIGEST_BYTES)
        self.tags = bytearray(slots * TAG_BYTES if encrypted else 0)
        self.stored_s = array("I", bytes(4 * slots))
        self.used_s = array("I", bytes(4 * slots))

    def key(self, slot: int) -> bytes:
        """Return the key at a slot that has a block."""
        start = slot * self.key_width
        return bytes(self.keys[start : start + self.lengths[slot]])

    def holds(self, slot: int, key: bytes) -> bool:
        """Return whether the slot has this key's block."""
        return self.lengths[slot] == len(key) and self.keys.startswith(key, slot * self.key_width)

    def count_held(self, slot: int, keys: Sequence[bytes], start: int) -> int:
        """Return how many keys, from ``start`` on, have the blocks from ``slot`` on."""
        count = min(len(keys) - start, len(self.lengths) - slot)
        if count <= 0 or not self.holds(slot, keys[start]):
            return 0
        width = self.key_width
        keys = keys[start : start + count]
        if (
            all(map(width.__eq__, map(len, keys)))
            and self.lengths.startswith(bytes((width,)) * count, slot)
            and self.keys.startswith(b"".join(keys), slot * width)
        ):
            return count
        held = 1
        while held < count and self.holds(slot + held, keys[held]):
            held += 1
        return held

    def put(
        self,
        start: int,
        keys: Sequence[bytes],
        digests: Sequence[bytes],
        tags: Sequence[bytes],
        stored_s: Sequence[int],
        used_s: Sequence[int],
    ) -> None:
        """Put blocks at neighbouring slots, which must be free."""
        stop = start + len(keys)
        lengths = tuple(map(len, keys))
        check_key_lengths(lengths)
        if stop > len(self.lengths) or any(self.lengths[start:stop]):
            raise InternalError(f"slots {start} to {stop} are not all free")
        if max(lengths) > self.key_width:
            self.widen(max(lengths))
        width = self.key_width
        if min(lengths) < width:
            keys = [key.ljust(width, b"\0") for key in keys]
        _overwrite(self.keys, start * width, b"".join(keys), stop * width)
        _overwrite(self.digests, start * DIGEST_BYTES, b"".join(digests), stop * DIGEST_BYTES)
        if self.tags:
            _overwrite(self.tags, start * TAG_BYTES, b"".join(tags), stop * TAG_BYTES)
        self.stored_s[start:stop] = array("I", stored_s)
        self.used_s[start:stop] = array("I", used_s)
        self.lengths[start:stop] = bytes(lengths)

    def forget(self, slot: int) -> None:
        """Free a slot."""
        self.lengths[slot] = 0

    def use(self, slot: int, count: int, now_s: int) -> None:
        """Note that the blocks at neighbouring slots were read."""
        self.used_s[slot : slot + count] = array("I", [now_s]) * count

    def widen(self, key_width: int) -> None:
        """Make room for longer keys."""
        old, width = self.keys, self.key_width
        self.keys = bytearray(len(self.lengths) * key_width)
        for slot, length in enumerate(self.lengths):
            if length:
                start = slot * width
                self.keys[slot * key_width : slot * key_width + length] = old[
                    start : start + length
                ]
        self.key_width = key_width

    # --- a whole region at once ---

    def put_page(self, records: NDArray[Any], now_s: int) -> None:
        """Put records of a table page (``record_dtype``) at their slots, overwriting any there."""
        slots = records["slot"]
        keys = self._rows_of_keys()
        keys[slots, : records["key"].shape[1]] = records["key"]
        np.frombuffer(self.lengths, np.uint8)[slots] = records["length"]
        np.frombuffer(self.digests, f"V{DIGEST_BYTES}")[slots] = records["digest"]
        stored_s = np.minimum(records["stored_s"], np.uint32(now_s))
        np.frombuffer(self.stored_s, np.uint32)[slots] = stored_s
        np.frombuffer(self.used_s, np.uint32)[slots] = stored_s
        if self.tags:
            np.frombuffer(self.tags, f"V{TAG_BYTES}")[slots] = records["tag"]

    def expire(self, before_s: int) -> int:
        """Forget the blocks that were stored before a time; return how many."""
        lengths = np.frombuffer(self.lengths, np.uint8)
        expired = (lengths > 0) & (np.frombuffer(self.stored_s, np.uint32) < before_s)
        lengths[expired] = 0
        return int(expired.sum())

    def forget_all(self, slots: NDArray[np.int64]) -> None:
        """Free these slots."""
        np.frombuffer(self.lengths, np.uint8)[slots] = 0

    def slots(self) -> NDArray[np.int64]:
        """Return the slots that have a block, in order."""
        return np.flatnonzero(np.frombuffer(self.lengths, np.uint8))

    def keys_at(self, slots: NDArray[np.int64]) -> list[bytes]:
        """Return the keys at slots that have a block."""
        lengths = np.frombuffer(self.lengths, np.uint8)[slots]
        if not len(slots) or int(lengths.min()) != int(lengths.max()):
            return [self.key(slot) for slot in slots.tolist()]
        length = int(lengths[0])
        flat = self._rows_of_keys()[slots, :length].tobytes()
        return [flat[start : start + length] for start in range(0, len(flat), length)]

    def _rows_of_keys(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.keys, np.uint8).reshape(-1, self.key_width)


@cache
def record_dtype(key_width: int, tag_bytes: int) -> np.dtype[Any]:
    """Return the layout of a record (``format.record_struct``) as a numpy dtype."""
    fields: list[tuple[str, str]] = [("slot", "<u4"), ("stored_s", "<u4"), ("length", "u1")]
    fields.append(("digest", f"V{DIGEST_BYTES}"))
    if tag_bytes:
        fields.append(("tag", f"V{tag_bytes}"))
    return np.dtype([*fields, ("key", f"({key_width},)u1")])


def _overwrite(column: bytearray, start: int, data: bytes, stop: int) -> None:
    """Overwrite a stretch of a column; data of another length would move the rest."""
    if len(data) != stop - start:
        raise Misuse(f"{len(data)} bytes for {stop - start}: digests and tags have one length.")
    column[start:stop] = data


SLOTS_MAX: Final = 1 << 30


class BlockRecord(NamedTuple):
    """The data that the index has of one block besides its location."""

    digest: bytes
    stored_s: int
    used_s: int
    tag: bytes


class BlockIndex:
    """Maps keys to locations, for ``regions`` regions of ``slots_per_region`` slots each.

    ``encrypted`` keeps room for an encryption tag per block. One thread at a time.
    """

    def __init__(self, regions: int, slots_per_region: int, *, encrypted: bool = False) -> None:
        slots = regions * slots_per_region
        if slots > SLOTS_MAX:
            raise Misuse(f"{slots} slots are more than {SLOTS_MAX}. Make the tier smaller.")
        self.slots_per_region = slots_per_region
        self.encrypted = encrypted
        self.words = Words()
        self._slabs: list[Slab | None] = [None] * regions
        self._live = array("I", bytes(4 * regions))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def live(self, region: int) -> int:
        """Return how many blocks of a region are in the index."""
        return self._live[region]

    def get(self, key: bytes) -> int | None:
        """Return the location of a key's block."""
        return self.find((key,))[0]

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the location of each key's block, None for those not in the index."""
        tables, high, over = self.words.tables, self.words.high, self.words.over
        slots, slabs = self.slots_per_region, self._slabs
        found: list[int | None] = []
        keys = list(keys)
        while len(found) < len(keys):
            key = keys[len(found)]
            print_ = hash(key) & LOCATION_MASK
            words = tables[print_ >> HOME_BITS & high]
            at = print_ & HOME_MASK
            location = None
            while word := words[at]:
                if word >> HALF_BITS == print_:
                    location = (word & LOCATION_MASK) - 1
                    slab = slabs[location // slots]
                    if slab is not None and slab.holds(location % slots, key):
                        break
                    location = None
                at = (at + 1) & HOME_MASK
            if over and location is None:
                location = over.get(key)
            found.append(location)
            if location is not None:
                # Blocks stored together are looked up together, and lie side by side.
                behind = self._count_behind(location, keys, len(found))
                found += range(location + 1, location + 1 + behind)
        return found

    def _count_behind(self, location: int, keys: Sequence[bytes], start: int) -> int:
        """Return how many keys from ``start`` on have their blocks right behind a location."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        assert slab is not None, "a block without its region"
        return slab.count_held(slot + 1, keys, start)

    def insert(self, key: bytes, location: int, record: BlockRecord) -> None:
        """Add a block. Neither its key nor a block at its location may exist yet."""
        digest, stored_s, used_s, tag = record
        if not self.insert_run(location, (key,), (digest,), (tag,), (stored_s,), (used_s,)):
            raise InternalError("the key is in the index already")

    def insert_run(
        self,
        first: int,
        keys: Sequence[bytes],
        digests: Sequence[bytes],
        tags: Sequence[bytes],
        stored_s: Sequence[int],
        used_s: Sequence[int],
    ) -> int:
        """Add blocks at neighbouring locations of one region; return how many.

        The slots must be empty. A key that is already elsewhere stays there, and
        the slot intended for it stays empty.
        """
        region, start = divmod(first, self.slots_per_region)
        slab = self.slab(region, len(keys[0]))
        # Before the words: a key that is given twice is detected the second time.
        slab.put(start, keys, digests, tags, stored_s, used_s)
        self.words.grow_for(self._count + len(keys))
        refused = self.words.put(first, keys, self._holds)
        for location in refused:
            slab.forget(location - first + start)
        added = len(keys) - len(refused)
        self._live[region] += added
        self._count += added
        return added

    def _holds(self, location: int, key: bytes) -> bool:
        slab = self._slabs[location // self.slots_per_region]
        return slab is not None and slab.holds(location % self.slots_per_region, key)

    def remove(self, key: bytes) -> int | None:
        """Forget a key. Return its block's location."""
        location = self.get(key)
        self.remove_all((key,))
        return location

    def remove_all(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget keys; return those that were there, each once."""
        keys = list(dict.fromkeys(keys))
        slots, slabs, live = self.slots_per_region, self._slabs, self._live
        remove_word = self.words.remove
        gone = []
        # Removing one key moves words, but no blocks: the others' locations stay valid.
        for key, location in zip(keys, self.find(keys), strict=True):
            if location is not None:
                remove_word(key, location)
                region = location // slots
                slab = slabs[region]
                assert slab is not None, "a location without its region"
                slab.forget(location % slots)
                live[region] -= 1
                gone.append(key)
        self._count -= len(gone)
        return gone

    def key_at(self, location: int) -> bytes | None:
        """Return the key of the block at a location, None if there is none."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        return slab.key(slot) if slab is not None and slab.lengths[slot] else None

    def record(self, location: int) -> BlockRecord:
        """Return the record of the block at a location. There must be one."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        if slab is None or not slab.lengths[slot]:
            raise InternalError(f"slot {slot} of region {region} has no block")
        return BlockRecord(
            bytes(slab.digests[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES]),
            slab.stored_s[slot],
            slab.used_s[slot],
            bytes(slab.tags[slot * TAG_BYTES : (slot + 1) * TAG_BYTES]),
        )

    def digests(self, first: int, count: int) -> list[bytes]:
        """Return the digests of blocks at neighbouring locations of one region."""
        region, slot = divmod(first, self.slots_per_region)
        slab = self._slabs[region]
        if slab is None or not all(slab.lengths[slot : slot + count]):
            raise InternalError(f"one of {count} slots from {slot} of region {region} has no block")
        start = slot * DIGEST_BYTES
        joined = bytes(slab.digests[start : start + count * DIGEST_BYTES])
        return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]

    def use(self, first: int, now_s: int, count: int = 1) -> None:
        """Note that the blocks at neighbouring locations of one region were read."""
        region, slot = divmod(first, self.slots_per_region)
        slab = self._slabs[region]
        if slab is not None:
            slab.use(slot, count, now_s)

    def slots_of(self, region: int, first: int = 0) -> Iterator[int]:
        """Yield the slots of a region that have a block, from ``first`` on."""
        slab = self._slabs[region]
        if slab is not None and self._live[region]:
            for slot in range(first, len(slab.lengths)):
                if slab.lengths[slot]:
                    yield slot

    def stored_before(self, region: int, before_s: int) -> list[bytes]:
        """Return the keys of a region's blocks that were stored before a time."""
        slab = self._slabs[region]
        if slab is None:
            return []
        return [slab.key(s) for s in self.slots_of(region) if slab.stored_s[s] < before_s]

    def keys_of(self, region: int) -> list[bytes]:
        """Return the keys of a region's blocks, in the order of their slots."""
        slab = self._slabs[region]
        return [] if slab is None else [slab.key(slot) for slot in self.slots_of(region)]

    def release(self, region: int) -> None:
        """Free the memory of a region that has no blocks any more."""
        if self._live[region]:
            raise InternalError(f"region {region} has {self._live[region]} blocks")
        self._slabs[region] = None

    def keys(self, regions: Sequence[int]) -> Iterator[list[bytes]]:
        """Yield the keys of these regions, one list per region."""
        return (self.keys_of(region) for region in regions if self._live[region])

    def assert_invariants(self) -> None:
        """Assert that words and records match: each block has one word, and nothing else has any.

        Checks all blocks.
        """
        first = range(0, len(self._slabs) * self.slots_per_region, self.slots_per_region)
        there = [
            [at + slot for slot in slab.slots().tolist()] if slab is not None else []
            for at, slab in zip(first, self._slabs, strict=True)
        ]
        assert [*self._live] == [*map(len, there)], "a region's count is not that of its blocks"
        assert sorted(self.words.assert_invariants()) == [*chain(*there)], "words and blocks differ"
        assert self._count == sum(self._live), "the count is not that of all blocks"

    def fill(self, hashes: NDArray[np.uint64], locations: NDArray[np.int64]) -> None:
        """Write the words of blocks whose records are in their slabs; see ``Words.fill``."""
        self.words.fill(hashes, locations, self.key_at)
        counts = np.bincount(locations // self.slots_per_region)
        for region in np.flatnonzero(counts).tolist():
            self._live[region] += int(counts[region])
        self._count += len(locations)

    def slab(self, region: int, key_width: int) -> Slab:
        """Return a region's arrays, created if missing and with room for keys of this length."""
        slab = self._slabs[region]
        if slab is None:
            slab = Slab(self.slots_per_region, key_width, encrypted=self.encrypted)
            self._slabs[region] = slab
        elif slab.key_width < key_width:
            slab.widen(key_width)
        return slab


_LAYOUT_OF: Final = attrgetter("key_width", "tag_bytes")  # of a page's records


class Dropped(NamedTuple):
    """Counts of the entries that a bulk load left out, by reason."""

    beyond: int  #: entries that no region of this layout can hold
    expired: int
    doubled: int  #: older copies of a key
    over: int  #: more than the tier has room for


class BulkLoad:
    """Collects table pages region by region, then fills the index in ``finish``."""

    def __init__(self, index: BlockIndex, now_s: int, ttl_s: int) -> None:
        """Entries older than ``ttl_s`` are expired; 0: none are.

        Those from a clock that ran ahead count as stored now.
        """
        self.index = index
        self._now_s = now_s
        self._stored_s_min = now_s - ttl_s if ttl_s else 0
        self._regions: list[tuple[int, NDArray[np.uint64], NDArray[np.int64]]] = []
        self._pages: list[TablePage] = []
        self._beyond = 0
        self._expired = 0

    def add_page(self, table: TablePage) -> None:
        """Add the entries of one page of the region that ``end_region`` will name.

        A later page's entries replace earlier ones.
        """
        self._pages.append(table)

    def end_region(self, region: int, sequence: int) -> int:
        """End a region, whose pages are those since the last call; return how many blocks it has.

        No two regions may have one sequence.
        """
        for (key_width, tag_bytes), same in groupby(self._pages, _LAYOUT_OF):
            pages = list(same)
            if (tag_bytes > 0) is not self.index.encrypted:
                self._beyond += sum(page.entries for page in pages)
            elif key_width:
                joined = b"".join([page.records for page in pages])
                records = np.frombuffer(joined, dtype=record_dtype(key_width, tag_bytes))
                self._add_records(region, key_width, records)
        self._pages.clear()
        slab = self.index.slab(region, 1)
        self._expired += slab.expire(self._stored_s_min)
        slots = slab.slots()
        hashes = np.fromiter(map(hash, slab.keys_at(slots)), np.int64, len(slots))
        locations = slots + region * self.index.slots_per_region
        self._regions.append((sequence, hashes.view(np.uint64), locations))
        return len(slots)

    def _add_records(self, region: int, key_width: int, records: NDArray[Any]) -> None:
        index = self.index
        sound = records["slot"] < index.slots_per_region
        sound &= (records["length"] > 0) & (records["length"] <= key_width)
        if not sound.all():
            self._beyond += len(records) - int(sound.sum())
            records = records[sound]
        index.slab(region, key_width).put_page(records, self._now_s)

    def finish(self, blocks_max: int) -> Dropped:
        """Fill the index with at most this many blocks, and return the counts of those left out."""
        if not self._regions:
            return Dropped(self._beyond, self._expired, 0, 0)
        self._regions.sort(key=lambda region: region[0])
        hashes = np.concatenate([hashes for _, hashes, _ in self._regions])
        locations = np.concatenate([locations for _, _, locations in self._regions])
        self._regions.clear()
        sorted_by = self.index.words.begin_for(hashes)
        order = np.argsort(sorted_by, kind="stable")
        alive = np.ones(len(locations), dtype=bool)
        older = self._older_copies(sorted_by[order], order, locations)
        alive[older] = False
        rest = np.flatnonzero(alive)
        over = max(0, len(rest) - blocks_max)
        alive[rest[:over]] = False
        self._forget(locations[~alive])
        order = order[alive[order]]
        self.index.fill(hashes[order], locations[order])
        return Dropped(self._beyond, self._expired, len(older), over)

    def _older_copies(
        self, hashes: NDArray[np.uint64], order: NDArray[np.int64], locations: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the places, in ``locations``, of all but the newest copy of each key.

        ``hashes`` are sorted, and ``order`` has the place of each.
        """
        same = hashes[1:] == hashes[:-1]
        alike = np.zeros(len(order), dtype=bool)
        alike[1:] |= same
        alike[:-1] |= same
        older: list[int] = []
        newest: dict[bytes | None, int] = {}
        # Equal hashes hardly ever belong to different keys, but they may.
        for place in sorted(order[alike].tolist()):
            key = self.index.key_at(int(locations[place]))
            if key in newest:
                older.append(newest[key])
            newest[key] = place
        return np.array(older, dtype=np.int64)

    def _forget(self, locations: NDArray[np.int64]) -> None:
        regions, slots = np.divmod(locations, self.index.slots_per_region)
        for region in np.unique(regions).tolist():
            self.index.slab(region, 1).forget_all(slots[regions == region])
