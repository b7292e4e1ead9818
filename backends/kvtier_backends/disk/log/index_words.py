"""Keeps words that lead from a key's hash to its block, in tables that grow with the blocks.

A word's upper half is a fingerprint of the key, its lower half the location plus
one. The fingerprint's lowest bits give the word's home in its table,
the bits above them select the table. When the tables are fuller than
``TABLE_WORDS_MEAN`` on average, one of them is split in two, the next one the
next time (linear hashing, Litwin 1980): so no call ever lays out more than one table.

Within a table, collisions are resolved by linear probing. There are no tombstones:
removing a word moves later ones back (Knuth, TAOCP 3, 6.4, algorithm R).

# Invariant: a word is found by walking from its home, and no empty word lies between.
#            Checked: remove, assert_invariants,
#            the_index_and_the_regions_hold_their_own_invariants.
# Invariant: every table has an empty word. What would fill it lies in ``over``.
#            Checked: assert_invariants, the_index_and_the_regions_hold_their_own_invariants.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

HALF_BITS: Final = 32
LOCATION_MASK: Final = (1 << HALF_BITS) - 1
HOME_BITS: Final = 10
TABLE_WORDS: Final = 1 << HOME_BITS
HOME_MASK: Final = TABLE_WORDS - 1
TABLE_WORDS_MEAN: Final = TABLE_WORDS * 3 // 8  #: a table not yet split has up to twice as many
TABLE_WORDS_MAX: Final = TABLE_WORDS * 15 // 16
COUNT_AT: Final = TABLE_WORDS  #: behind its words, a table has the count of those in use


class Words:
    """Tables of words. ``tables`` has one for each value of the bits in ``high``.

    Some stand for two values, until they are split. ``over`` has the locations of
    keys whose table is full, which hardly ever happens by chance alone.
    """

    def __init__(self) -> None:
        self.tables = [laid_out(np.zeros(0, np.uint64))]
        self.high = 0
        self.over: dict[bytes, int] = {}
        self._count = 1  # of different tables

    def grow_for(self, blocks: int) -> None:
        """Split tables until there is room for this many blocks in all."""
        while blocks > self._count * TABLE_WORDS_MEAN:
            self._split()

    def put(
        self, first: int, keys: Sequence[bytes], holds: Callable[[int, bytes], bool]
    ) -> list[int]:
        """Write the words of keys from a location on; return the locations of those left out.

        Keys that already have a word are left out; ``holds`` checks whether a location has a key.
        """
        tables, high, over = self.tables, self.high, self.over
        refused = []
        for location, key in enumerate(keys, first):
            print_ = hash(key) & LOCATION_MASK
            words = tables[print_ >> HOME_BITS & high]
            at = print_ & HOME_MASK
            while word := words[at]:
                if word >> HALF_BITS == print_ and holds((word & LOCATION_MASK) - 1, key):
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

    def remove(self, key: bytes, location: int) -> None:
        """Remove the word of a key's location; move back words that would then be out of reach."""
        if self.over and self.over.pop(key, None) is not None:
            return
        print_ = hash(key) & LOCATION_MASK
        words = self.tables[print_ >> HOME_BITS & self.high]
        word = print_ << HALF_BITS | (location + 1)
        hole = print_ & HOME_MASK
        while words[hole] != word:
            assert words[hole], "an empty word lies between a word and its home"
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

    # --- all words at once ---

    def assert_invariants(self) -> Iterator[int]:
        """Assert the invariants; yield each location that has a word. Checks all words."""
        each_once = {id(table): table for table in self.tables}  # one not yet split is there twice
        for table in each_once.values():
            in_use = [(at, word) for at, word in enumerate(table[:TABLE_WORDS]) if word]
            assert table[COUNT_AT] == len(in_use), "a table's count is not that of its words"
            assert len(in_use) < TABLE_WORDS, "a table has no empty word"
            for at, word in in_use:
                print_ = word >> HALF_BITS
                assert self.tables[print_ >> HOME_BITS & self.high] is table, "another table's word"
                home = print_ & HOME_MASK
                between = range(home, home + ((at - home) & HOME_MASK))
                assert all(table[step & HOME_MASK] for step in between), "out of reach of its home"
                yield (word & LOCATION_MASK) - 1
        yield from self.over.values()

    def begin_for(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Create as many empty tables as these keys need. There must be no word yet.

        Returns the values to sort the keys by before ``fill``: equal only if the hashes are.
        """
        while len(hashes) > self._count * TABLE_WORDS_MEAN:
            self._count *= 2
        empty = np.zeros(0, np.uint64)
        self.tables = [laid_out(empty) for _ in range(self._count)]
        self.high = self._count - 1
        # By home and then by the rest of the hash: one sort for both uses.
        bits = np.uint64(HOME_BITS + self.high.bit_length())
        return hashes << (np.uint64(64) - bits) | hashes >> bits

    def fill(
        self,
        hashes: NDArray[np.uint64],
        locations: NDArray[np.int64],
        key_at: Callable[[int], bytes | None],
    ) -> None:
        """Write the words of different keys, sorted by the values that ``begin_for`` returned."""
        prints = hashes & np.uint64(LOCATION_MASK)
        words = prints << np.uint64(HALF_BITS) | (locations + 1).astype(np.uint64)
        tables = (prints >> np.uint64(HOME_BITS) & np.uint64(self.high)).astype(np.int64)
        ends = np.searchsorted(tables, np.arange(self.high + 2)).tolist()
        for table, (start, end) in enumerate(pairwise(ends)):
            if start < end:
                self.tables[table] = laid_out(words[start:end][:TABLE_WORDS_MAX])
                for location in locations[start:end][TABLE_WORDS_MAX:].tolist():
                    key = key_at(location)
                    if key is not None:
                        self.over[key] = location

    def _split(self) -> None:
        new = self._count
        if new > self.high:
            self.tables += self.tables
            self.high = 2 * self.high + 1
        bit = (self.high + 1) // 2
        words = np.frombuffer(self.tables[new - bit], np.uint64)[:TABLE_WORDS]
        words = words[words != 0]
        is_upper = words >> np.uint64(HALF_BITS + HOME_BITS) & np.uint64(bit) != 0
        self.tables[new - bit] = laid_out(words[~is_upper])
        self.tables[new] = laid_out(words[is_upper])
        self._count = new + 1


def laid_out(words: NDArray[np.uint64]) -> array[int]:
    """Return a table of these words, ``TABLE_WORDS_MAX`` at most: each at its home or behind."""
    table = array("Q", bytes(8 * (TABLE_WORDS + 1)))
    view = np.frombuffer(table, np.uint64)
    view[COUNT_AT] = len(words)
    if not len(words):
        return table
    home = (words >> np.uint64(HALF_BITS) & np.uint64(HOME_MASK)).astype(np.int64)
    order = np.argsort(home, kind="stable")
    run = np.arange(len(words))
    at = run + np.maximum.accumulate(home[order] - run)
    fits = at < TABLE_WORDS
    view[at[fits]] = words[order[fits]]
    free = 0  # words beyond the end wrap around to the beginning
    for word in words[order[~fits]].tolist():
        while table[free]:
            free += 1
        table[free] = word
    return table
