"""Accounts for the most that the folder may hold: see the package for the theory.

The manifest stores each block that the cleaner knows: its location, size, and the epoch of its
last use. 28 bytes per block, in one array sorted by block number. A change copies the array, which
takes some milliseconds for a million blocks, so changes come in batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtier_backends.fs.bound.protocol import KNOWN, Array

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
        """Return the least recently used blocks: ``size`` bytes, or ``blocks_max`` blocks."""
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
        """Return for each number its place in ``entries``, and whether it is there."""
        known = self.entries["block"]
        places = np.searchsorted(known, numbers)
        if not len(known):
            return places, np.zeros(len(numbers), bool)
        inside = np.minimum(places, len(known) - 1)
        return places, (places < len(known)) & (known[inside] == numbers)


@dataclass
class Scanned:
    """The results of a scan."""

    known: Array
    others: int  #: bytes of files that are not blocks: unfinished or foreign ones


@dataclass
class Account:
    """The bytes of one term. All sizes are bytes."""

    capacity: int
    manifest: Manifest = field(default_factory=Manifest)
    granted: int = 0
    others: int = 0
    epoch: int = 1
    is_counted: bool = False  #: a scan has ended in this term
    unknown: float = float("inf")  #: before that: bytes that may be there beside the manifest
    ghosts: int = 0  #: bytes of known blocks that were found missing since the last scan
    unsaved: int = 0  #: blocks stored or removed since the manifest was copied

    def __post_init__(self) -> None:
        self._lost = 0  # since the last scan began
        self._lost_before = 0  # before that
        self._changes: list[tuple[Array, int] | NDArray[np.uint64]] | None = None
        self._stored_since: list[NDArray[np.uint64]] | None = None  # since an eviction began

    @property
    def bound(self) -> float:
        """Most bytes that the folder holds, including all grants."""
        rest = self.others if self.is_counted else self.unknown
        return self.manifest.bytes + self.granted + self.lost + rest

    @property
    def lost(self) -> int:
        """Bytes that revoked grants may have stored: the next scan finds them."""
        return self._lost + self._lost_before

    def begin_from(self, manifest: Manifest, epoch: int, *, holds: bool) -> None:
        """Begin with an older term's manifest. ``holds``: that term kept the folder in bounds."""
        self.manifest = manifest
        self.epoch = max(self.epoch, epoch + 1)
        if holds:
            self.unknown = max(0, self.capacity - manifest.bytes)

    def grant(self, size: int) -> None:
        """Count a grant, before it is made."""
        self.granted += size

    def settle(self, size: int, stored: Array) -> None:
        """Take a grant's receipt."""
        self.granted -= size
        twice = self.manifest.add(stored, self.epoch)
        self.unsaved += len(stored)
        if self._stored_since is not None:
            self._stored_since.append(stored["block"])
        if not self.is_counted:
            self.unknown += twice  # a known file may be gone, and an unknown one there instead
        self._note((stored, self.epoch))

    def lose(self, size: int) -> None:
        """Note that a grant was revoked and removed."""
        self.granted -= size
        self._lost += size

    def touch(self, used: Array) -> None:
        """Note uses."""
        self.manifest.touch(used["block"], self.epoch)

    def saved(self) -> None:
        """Note that the manifest was copied."""
        self.unsaved = 0

    def eviction_begins(self) -> None:
        """Record stores from now on: such a block may exist although the eviction removed it."""
        self._stored_since = []

    def removed(self, numbers: NDArray[np.uint64], removed_bytes: int) -> None:
        """Forget blocks that an eviction found gone. ``removed_bytes``: of files it removed."""
        if self._stored_since:
            numbers = np.setdiff1d(numbers, np.concatenate(self._stored_since))
        self._stored_since = None
        not_there = max(0, self.manifest.remove(numbers) - removed_bytes)
        self.ghosts += not_there
        self.unsaved += len(numbers)
        if not self.is_counted:
            self.unknown += not_there
        self._note(numbers)

    def scan_begins(self) -> None:
        """Record all changes from now on: the scan may have seen the state before them, or not."""
        self._changes = []
        self._lost_before, self._lost = self.lost, 0

    def scan_failed(self) -> None:
        """Continue with the known blocks."""
        self._changes = None

    def scan_ended(self, scanned: Scanned) -> None:
        """Restart with the scan's findings, and with all changes since the scan began."""
        fresh = Manifest(scanned.known)
        fresh.with_epochs_of(self.manifest)
        for change in self._changes or ():
            if isinstance(change, tuple):
                fresh.add(*change)
            else:
                fresh.remove(change)
        self.manifest = fresh
        self.others = scanned.others
        self.unknown = 0
        self.ghosts = 0
        self.is_counted = True
        self._lost_before = 0
        self._changes = None

    def _note(self, change: tuple[Array, int] | NDArray[np.uint64]) -> None:
        if self._changes is not None:
            self._changes.append(change)
