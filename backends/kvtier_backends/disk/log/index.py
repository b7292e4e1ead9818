"""The disk tier's index: maps keys to locations, compactly and without pauses.

A location is one number: ``region * slots_per_region + slot``. The record
of a block (key, digest, times) lies in flat arrays of its region, at its slot,
so a region's blocks are listed and forgotten without a search. Tables of
64-bit words (``index_words.py``) lead from a key to its location. They grow with the
stored blocks, a table at a time, and so do the arrays, a region at a time: the index
of a large tier with few blocks is small. The garbage collector sees nothing of it
except one small object per region.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvtier.errors import InternalError, Misuse
from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.disk.format import TAG_BYTES
from kvtier_backends.disk.log.index_slab import Slab
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
