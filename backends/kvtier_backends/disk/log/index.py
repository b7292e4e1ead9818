"""The disk tier's index: maps keys to locations, compactly and without pauses.

A location is one number: ``region * slots_per_region + slot``. The record
of a block (key, digest, times) lies in flat arrays of its region, at its slot,
so a region's blocks are listed and forgotten without a search. Tables of
64-bit words (``index_words.py``) lead from a key to its location. They grow with what
is stored, a table at a time, and so do the arrays, a region at a time: an index
of a large tier that has little in it is small. Nothing here is seen by the
garbage collector but one small object a region.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import InternalError, Misuse
from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.disk.format import TAG_BYTES, check_key_lengths
from kvtier_backends.disk.log.index_words import (
    COUNT_AT,
    HALF_BITS,
    HOME_BITS,
    HOME_MASK,
    TABLE_WORDS_MAX,
    Words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_LOCATION_MASK: Final = (1 << HALF_BITS) - 1
SLOTS_MAX: Final = 1 << 30


class BlockRecord(NamedTuple):
    """What the index has of one block besides its location."""

    digest: bytes
    stored_s: int
    used_s: int
    tag: bytes


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
        """Tell whether the slot has this key's block."""
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


class BlockIndex:
    """Keys to locations, for ``regions`` regions of ``slots_per_region`` slots each.

    ``encrypted`` keeps room for an encryption tag a block. One thread at a time.
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
        """Return the location of each key's block, None for those that are not here."""
        tables, high, over = self.words.tables, self.words.high, self.words.over
        slots, slabs = self.slots_per_region, self._slabs
        found: list[int | None] = []
        keys = list(keys)
        while len(found) < len(keys):
            key = keys[len(found)]
            print_ = hash(key) & _LOCATION_MASK
            words = tables[print_ >> HOME_BITS & high]
            at = print_ & HOME_MASK
            location = None
            while word := words[at]:
                if word >> HALF_BITS == print_:
                    location = (word & _LOCATION_MASK) - 1
                    slab = slabs[location // slots]
                    if slab is not None and slab.holds(location % slots, key):
                        break
                    location = None
                at = (at + 1) & HOME_MASK
            if over and location is None:
                location = over.get(key)
            found.append(location)
            if location is not None:
                # Blocks stored together are looked for together, and lie side by side.
                behind = self._count_behind(location, keys, len(found))
                found += range(location + 1, location + 1 + behind)
        return found

    def _count_behind(self, location: int, keys: Sequence[bytes], start: int) -> int:
        """Return how many keys from ``start`` on have their blocks right behind a block."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        assert slab is not None, "a block without its region"
        return slab.count_held(slot + 1, keys, start)

    def insert(self, key: bytes, location: int, record: BlockRecord) -> None:
        """Add a block. Neither its key nor a block at its location may be there."""
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
        """Add blocks at neighbouring locations of one region; returns how many.

        No block may be there. A key that is elsewhere already stays there, and
        the slot that it was to get stays empty.
        """
        region, start = divmod(first, self.slots_per_region)
        stop = start + len(keys)
        lengths = tuple(map(len, keys))
        check_key_lengths(lengths)
        shortest, longest = min(lengths), max(lengths)
        slab = self.slab(region, longest)
        if stop > self.slots_per_region or any(slab.lengths[start:stop]):
            raise InternalError(f"slots {start} to {stop} of region {region} are not all free")
        width = slab.key_width
        if shortest < width:
            keys_padded = b"".join([key.ljust(width, b"\0") for key in keys])
        else:
            keys_padded = b"".join(keys)
        _put(slab.keys, start * width, keys_padded, stop * width)
        _put(slab.digests, start * DIGEST_BYTES, b"".join(digests), stop * DIGEST_BYTES)
        if self.encrypted:
            _put(slab.tags, start * TAG_BYTES, b"".join(tags), stop * TAG_BYTES)
        slab.stored_s[start:stop] = array("I", stored_s)
        slab.used_s[start:stop] = array("I", used_s)
        self.words.grow_for(self._count + len(keys))
        # Before the words: a key that is given twice is seen the second time.
        slab.lengths[start:stop] = bytes(lengths)
        refused = self._put_words(first, keys)
        for location in refused:
            slab.lengths[location - first + start] = 0
        added = len(keys) - len(refused)
        self.add_live(region, added)
        return added

    def remove(self, key: bytes) -> int | None:
        """Forget a key. Returns where its block was."""
        location = self.get(key)
        self.remove_all((key,))
        return location

    def remove_all(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget keys; returns those that were there, each once."""
        keys = list(dict.fromkeys(keys))
        slots, slabs, live = self.slots_per_region, self._slabs, self._live
        remove_word = self._remove_word
        gone = []
        # Removing one key moves words, and no block: the others' locations stay right.
        for key, location in zip(keys, self.find(keys), strict=True):
            if location is not None:
                remove_word(key, location)
                region = location // slots
                slab = slabs[region]
                assert slab is not None, "a location without its region"
                slab.lengths[location % slots] = 0
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
            slab.used_s[slot : slot + count] = array("I", [now_s]) * count

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
        """Give back the memory of a region that has no block any more."""
        if self._live[region]:
            raise InternalError(f"region {region} has {self._live[region]} blocks")
        self._slabs[region] = None

    def keys(self, regions: Sequence[int]) -> Iterator[list[bytes]]:
        """Yield the keys of these regions, a list a region."""
        return (self.keys_of(region) for region in regions if self._live[region])

    # --- for this package's bulk load as well ---

    def slab(self, region: int, key_width: int) -> Slab:
        """Return a region's arrays, made if missing and with room for keys of this length."""
        slab = self._slabs[region]
        if slab is None:
            slab = Slab(self.slots_per_region, key_width, encrypted=self.encrypted)
            self._slabs[region] = slab
        elif slab.key_width < key_width:
            slab.widen(key_width)
        return slab

    def add_live(self, region: int, count: int) -> None:
        """Count blocks whose words were written in bulk."""
        self._live[region] += count
        self._count += count

    def _put_words(self, first: int, keys: Sequence[bytes]) -> list[int]:
        """Write the words of keys from a location on; returns the locations of those left out.

        Left out are keys that have a word already.
        """
        tables, high, over = self.words.tables, self.words.high, self.words.over
        slots, slabs = self.slots_per_region, self._slabs
        refused = []
        for location, key in enumerate(keys, first):
            print_ = hash(key) & _LOCATION_MASK
            words = tables[print_ >> HOME_BITS & high]
            at = print_ & HOME_MASK
            while word := words[at]:
                if word >> HALF_BITS == print_:
                    there = (word & _LOCATION_MASK) - 1
                    slab = slabs[there // slots]
                    if slab is not None and slab.holds(there % slots, key):
                        refused.append(location)
                        break
                at = (at + 1) & HOME_MASK
            else:
                if over and key in over:
                    refused.append(location)
                elif words[COUNT_AT] < TABLE_WORDS_MAX:
                    words[at] = print_ << HALF_BITS | (location + 1)
                    words[COUNT_AT] += 1
                else:
                    over[key] = location
        return refused

    def _remove_word(self, key: bytes, location: int) -> None:
        """Remove the word of a key's location; move back what would be out of reach then."""
        if self.words.over and self.words.over.pop(key, None) is not None:
            return
        print_ = hash(key) & _LOCATION_MASK
        words = self.words.tables[print_ >> HOME_BITS & self.words.high]
        word = print_ << HALF_BITS | (location + 1)
        hole = print_ & HOME_MASK
        while words[hole] != word:
            hole = (hole + 1) & HOME_MASK
        at = hole
        while True:
            at = (at + 1) & HOME_MASK
            word = words[at]
            if not word:
                break
            home = (word >> HALF_BITS) & HOME_MASK
            if (at - home) & HOME_MASK >= (at - hole) & HOME_MASK:
                words[hole] = word
                hole = at
        words[hole] = 0
        words[COUNT_AT] -= 1


def _put(column: bytearray, start: int, data: bytes, stop: int) -> None:
    """Overwrite a part of a slab's column; what is too long or short would move the rest."""
    if len(data) != stop - start:
        raise Misuse(f"{len(data)} bytes for {stop - start}: digests and tags have one length.")
    column[start:stop] = data
