"""Remembers the blocks that the ``reuse`` policy evicted.

A lossy table of fixed size: no key is kept, only a tag of it, and a new record
may push out an old one. One record stands for a stretch of blocks, under the
key of the one nearest to the head; it contains the length, so a request that
comes back walks from record to record.

    bits   meaning
    14     tag of the key
    10     cohort
    6      share of the vote (see ``model``), in 63rds
    12     length in blocks
    22     when it was last used, in quarters of a unit, wrapping around
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key

RECORDS_PER_BLOCK: Final = 4
"""Records for each block of capacity: a block that comes back later counts as new."""

RECORDS_MIN: Final = 1 << 15
"""A quarter of a MiB, so that a small tier, which evicts most before it returns, learns as well."""

_COHORT_AT: Final = 40
_SHARE_AT: Final = 34
_LENGTH_AT: Final = 22
_LENGTH_MAX: Final = (1 << 12) - 1
_TIME_MASK: Final = (1 << 22) - 1


class Ghost(NamedTuple):
    """A stretch of evicted blocks."""

    cohort: int
    share: float
    length: int
    used: float


def _zeros(pairs: int) -> memoryview:
    """Return this many pairs of empty records. They take memory once they are written to.

    Private: pages that are only read then stay one page of zeros. Not reserved: a large tier
    may have more records than there is memory, as long as it has not evicted so much.
    """
    unreserved: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved
    return memoryview(mmap.mmap(-1, 16 * pairs, flags=flags)).cast("Q")


class Ghosts:
    """Remembers stretches by the key of their first block."""

    def __init__(self, capacity: int) -> None:
        # Pairs of records: either may hold a key, so that few push out one another.
        self._pairs = max(RECORDS_MIN, capacity * RECORDS_PER_BLOCK) // 2
        self._records = _zeros(self._pairs)

    def __deepcopy__(self, _: object) -> Ghosts:
        """Return a copy that remembers the same."""
        twin = Ghosts(0)
        twin._pairs = self._pairs
        twin._records = _zeros(self._pairs)
        twin._records[:] = self._records
        return twin

    def clear(self) -> None:
        """Forget everything."""
        self._records = _zeros(self._pairs)

    def remember(self, key: Key, cohort: int, share: float, length: int, used: float) -> None:
        """Remember a stretch whose first block is ``key``."""
        records = self._records
        at, tag = self._place(key)
        now = int(used * 4) & _TIME_MASK
        old, other = records[at], records[at + 1]
        if old >> 50 != tag and (
            other >> 50 == tag or (now - other & _TIME_MASK) > (now - old & _TIME_MASK)
        ):
            at += 1
        records[at] = (
            tag << 50
            | cohort << _COHORT_AT
            | int(share * 63) << _SHARE_AT
            | min(length, _LENGTH_MAX) << _LENGTH_AT
            | now
        )

    def pop(self, key: Key, now: float) -> Ghost | None:
        """Return and forget the stretch whose first block is ``key``."""
        records = self._records
        at, tag = self._place(key)
        record = records[at]
        if record >> 50 != tag:
            at += 1
            record = records[at]
            if record >> 50 != tag:
                return None
        records[at] = 0
        age = (int(now * 4) - record & _TIME_MASK) / 4.0
        return Ghost(
            cohort=record >> _COHORT_AT & 1023,
            share=(record >> _SHARE_AT & 63) / 63.0,
            length=record >> _LENGTH_AT & _LENGTH_MAX,
            used=now - age,
        )

    def _place(self, key: Key) -> tuple[int, int]:
        """Return where the key's pair begins, and the key's tag, which is never 0."""
        number = xxh3_64_intdigest(key)
        return number % self._pairs * 2, number >> 50 | 1
