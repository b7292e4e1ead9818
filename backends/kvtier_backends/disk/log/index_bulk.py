"""Fills an empty index from table pages, a million blocks in about a second.

Regions come in any order; the sequence of each shows its age. The newest copy of
a key is kept; if more blocks are left than the tier has room for, the oldest are
dropped. The words of the index are laid out all at once: sorted by home, each goes
to its home or right behind its predecessor.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvtier_backends.disk.log.index_slab import record_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtier_backends.disk.format import TablePage
    from kvtier_backends.disk.log.index import BlockIndex

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
