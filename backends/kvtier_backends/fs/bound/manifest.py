"""Stores each block that the cleaner knows: its location, size, and the epoch of its last use.

28 bytes per block, in one array sorted by block number. A change copies the array, which takes
some milliseconds for a million blocks, so changes come in batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier_backends.fs.bound.records import KNOWN, Array

if TYPE_CHECKING:
    from numpy.typing import NDArray


def empty() -> Array:
    """Return an empty list of blocks."""
    return np.empty(0, KNOWN)


class Manifest:
    """The known blocks. One thread at a time."""

    def __init__(self, known: Array | None = None) -> None:
        """``known``: like ``entries`` of another manifest, or as found by a scan."""
        found = empty() if known is None else known
        _, first = np.unique(found["block"], return_index=True)
        self.entries = found[first]
        self.bytes = int(self.entries["size"].sum())

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, blocks: Array, epoch: int) -> int:
        """Add stored blocks, used in this epoch. Returns the bytes of those already known."""
        if not len(blocks):
            return 0
        larger_first = np.lexsort((blocks["size"], blocks["block"]))[::-1]
        blocks = blocks[larger_first]
        _, first = np.unique(blocks["block"], return_index=True)
        twice = int(blocks["size"].sum()) - int(blocks["size"][first].sum())
        blocks = blocks[first]
        places, there = self._find(blocks["block"])
        known, new = places[there], blocks[~there]
        entries = self.entries
        entries["epoch"][known] = np.maximum(entries["epoch"][known], epoch)
        sizes = np.maximum(entries["size"][known], blocks["size"][there])
        grown = int((sizes - entries["size"][known]).sum())
        entries["size"][known] = sizes
        added = np.empty(len(new), KNOWN)
        for name in ("block", "leaf", "size"):
            added[name] = new[name]
        added["epoch"] = epoch
        self.entries = np.insert(entries, places[~there], added)
        self.bytes += grown + int(new["size"].sum())
        return twice + int(blocks["size"][there].sum()) - grown

    def touch(self, numbers: NDArray[np.uint64], epoch: int) -> None:
        """Note that these blocks, if known, were used in this epoch."""
        places, there = self._find(numbers)
        known = places[there]
        self.entries["epoch"][known] = np.maximum(self.entries["epoch"][known], epoch)

    def remove(self, numbers: NDArray[np.uint64]) -> int:
        """Forget these blocks. Returns their total bytes."""
        places, there = self._find(np.unique(numbers))
        known = places[there]
        size = int(self.entries["size"][known].sum())
        self.entries = np.delete(self.entries, known)
        self.bytes -= size
        return size

    def oldest(self, size: int, blocks_max: int) -> Array:
        """Return the least recently used blocks, of ``size`` bytes in total at least."""
        count = min(blocks_max, len(self.entries))
        if not count:
            return empty()
        order = np.argpartition(self.entries["epoch"], count - 1)[:count]
        order = order[np.argsort(self.entries["epoch"][order], kind="stable")]
        sizes = np.cumsum(self.entries["size"][order])
        return self.entries[order[: int(np.searchsorted(sizes, size)) + 1]]

    def with_epochs_of(self, other: Manifest) -> None:
        """Take over the epochs of blocks that the other manifest knows too."""
        places, there = other._find(self.entries["block"])
        self.entries["epoch"][there] = other.entries["epoch"][places[there]]

    def _find(self, numbers: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return for each number its place, and whether it is there."""
        known = self.entries["block"]
        places = np.searchsorted(known, numbers)
        if not len(known):
            return places, np.zeros(len(numbers), bool)
        inside = np.minimum(places, len(known) - 1)
        return places, (places < len(known)) & (known[inside] == numbers)
