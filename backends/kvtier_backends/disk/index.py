"""Which block lies where: the disk tier's index, compact and free of pauses.

A location is one number: ``region * slots_per_region + slot``. What is known
of a block (key, digest, times) lies in flat arrays of its region, at its slot,
so a region's blocks are listed and forgotten without a search. One open-
addressed table of 64-bit words leads from a key to its location: the upper
half of a word is a fingerprint of the key, the lower half the location plus
one. The table has its final size from the start, because the number of slots
is known, so nothing ever rehashes; the system hands its memory out page by
page, as it is first touched. Nothing here is seen by the garbage collector but
one small object a region.

Linear probing, and no tombstones: ``remove`` moves later words back instead.

# Invariant: a word is found by walking from its home, and no empty word lies between.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.backend import DIGEST_BYTES
from kvtier.errors import InternalError, Misuse
from kvtier_backends.disk.format import KEY_BYTES_MAX, SEAL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HALF_BITS: Final = 32
_LOCATION_MASK: Final = (1 << _HALF_BITS) - 1
SLOTS_MAX: Final = 1 << 30
_WORDS_MIN: Final = 64
_WORDS_PER_SLOT: Final = 1.5  #: at least so many words a slot, up to twice that: probes stay short


class Known(NamedTuple):
    """What is known of one block besides its place."""

    digest: bytes
    stored_s: int
    used_s: int
    seal: bytes


class Slab:
    """The blocks of one region. A length of 0 marks a slot without a block."""

    __slots__ = ("digests", "key_width", "keys", "lengths", "seals", "stored_s", "used_s")

    def __init__(self, slots: int, key_width: int, *, sealed: bool) -> None:
        self.key_width = key_width
        self.keys = bytearray(slots * key_width)
        self.lengths = bytearray(slots)  # of the key
        self.digests = bytearray(slots * DIGEST_BYTES)
        self.seals = bytearray(slots * SEAL_BYTES if sealed else 0)
        self.stored_s = array("I", bytes(4 * slots))
        self.used_s = array("I", bytes(4 * slots))

    def key(self, slot: int) -> bytes:
        """Return the key at a slot that has a block."""
        start = slot * self.key_width
        return bytes(self.keys[start : start + self.lengths[slot]])

    def holds(self, slot: int, key: bytes) -> bool:
        """Tell whether the slot has this key's block."""
        start = slot * self.key_width
        length = len(key)
        return self.lengths[slot] == length and self.keys[start : start + length] == key

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

    ``sealed`` keeps room for an encryption seal a block. One thread at a time.
    """

    def __init__(self, regions: int, slots_per_region: int, *, sealed: bool = False) -> None:
        slots = regions * slots_per_region
        if slots > SLOTS_MAX:
            raise Misuse(f"{slots} slots are more than {SLOTS_MAX}. Make the tier smaller.")
        words = max(_WORDS_MIN, 1 << int(slots * _WORDS_PER_SLOT).bit_length())
        if words >= 2 * slots * _WORDS_PER_SLOT:
            words = max(_WORDS_MIN, words // 2)
        self.slots_per_region = slots_per_region
        self.sealed = sealed
        # A bytearray of zeros costs nothing until it is touched; an array is filled.
        self.words = memoryview(bytearray(8 * words)).cast("Q")
        self.mask = words - 1
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
        words, mask, slots = self.words, self.mask, self.slots_per_region
        print_ = hash(key) & _LOCATION_MASK
        at = print_ & mask
        while word := words[at]:
            if word >> _HALF_BITS == print_:
                location = (word & _LOCATION_MASK) - 1
                slab = self._slabs[location // slots]
                if slab is not None and slab.holds(location % slots, key):
                    return location
            at = (at + 1) & mask
        return None

    def insert(self, key: bytes, location: int, known: Known) -> None:
        """Add a block. Neither its key nor a block at its location may be there."""
        region, slot = divmod(location, self.slots_per_region)
        length = len(key)
        if not 0 < length <= KEY_BYTES_MAX:
            raise Misuse(f"a key of {length} bytes; keys have 1 to {KEY_BYTES_MAX} bytes.")
        slab = self.slab(region, length)
        if slab.lengths[slot]:
            raise InternalError(f"slot {slot} of region {region} has a block")
        self.put(hash(key) & _LOCATION_MASK, location)
        start = slot * slab.key_width
        slab.keys[start : start + length] = key
        slab.lengths[slot] = length
        slab.digests[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES] = known.digest
        if self.sealed:
            slab.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES] = known.seal
        slab.stored_s[slot] = known.stored_s
        slab.used_s[slot] = known.used_s
        self._live[region] += 1
        self._count += 1

    def remove(self, key: bytes) -> int | None:
        """Forget a key. Returns where its block was."""
        location = self.get(key)
        if location is not None:
            self._take(hash(key) & _LOCATION_MASK, location)
            region, slot = divmod(location, self.slots_per_region)
            slab = self._slabs[region]
            assert slab is not None, "a location without its region"
            slab.lengths[slot] = 0
            self._live[region] -= 1
            self._count -= 1
        return location

    def key_at(self, location: int) -> bytes | None:
        """Return the key of the block at a location, None if there is none."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        return slab.key(slot) if slab is not None and slab.lengths[slot] else None

    def known(self, location: int) -> Known:
        """Return what is known of the block at a location. There must be one."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        if slab is None or not slab.lengths[slot]:
            raise InternalError(f"slot {slot} of region {region} has no block")
        return Known(
            bytes(slab.digests[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES]),
            slab.stored_s[slot],
            slab.used_s[slot],
            bytes(slab.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES]),
        )

    def use(self, location: int, now_s: int) -> None:
        """Note that the block at a location was read."""
        region, slot = divmod(location, self.slots_per_region)
        slab = self._slabs[region]
        if slab is not None:
            slab.used_s[slot] = now_s

    def slots_of(self, region: int, first: int = 0) -> Iterator[int]:
        """Yield the slots of a region that have a block, from ``first`` on."""
        slab = self._slabs[region]
        if slab is not None:
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
            slab = Slab(self.slots_per_region, key_width, sealed=self.sealed)
            self._slabs[region] = slab
        elif slab.key_width < key_width:
            slab.widen(key_width)
        return slab

    def put(self, print_: int, location: int) -> None:
        """Write the word of a location, at the first empty place from its home on."""
        words, mask = self.words, self.mask
        at = print_ & mask
        while words[at]:
            at = (at + 1) & mask
        words[at] = print_ << _HALF_BITS | (location + 1)

    def add_live(self, region: int, count: int) -> None:
        """Count blocks whose words were written in bulk."""
        self._live[region] += count
        self._count += count

    def _take(self, print_: int, location: int) -> None:
        """Empty the word of a location, and move back what would be out of reach then."""
        words, mask = self.words, self.mask
        word = print_ << _HALF_BITS | (location + 1)
        hole = print_ & mask
        while words[hole] != word:
            hole = (hole + 1) & mask
        at = hole
        while True:
            at = (at + 1) & mask
            word = words[at]
            if not word:
                break
            home = (word >> _HALF_BITS) & mask
            if (at - home) & mask >= (at - hole) & mask:
                words[hole] = word
                hole = at
        words[hole] = 0
