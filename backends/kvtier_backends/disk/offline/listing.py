"""Counts the blocks in a disk tier's folder by namespace, as an engine would find them at start.

The tables do not show which blocks the tier has forgotten since they were
stored, so those count as well until they are overwritten.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtier_backends.disk.folder.description import facts_untrusted
from kvtier_backends.disk.offline.inspection import user_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier_backends.disk.folder.users import User
    from kvtier_backends.disk.format import RegionHeader
    from kvtier_backends.disk.offline.inspection import Folder, RegionReport


class Distinct:
    """Counts distinct keys, in 8 bytes each."""

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys; those added before don't count again."""
        self._hashes.extend(map(hash, keys))

    def count(self) -> int:
        """Return the number of distinct keys."""
        return int(np.unique(np.frombuffer(self._hashes, np.int64)).size) if self._hashes else 0


class Kind(NamedTuple):
    """Properties common to the blocks of one region."""

    namespace: bytes
    key_id: bytes  #: of the encryption key
    block_bytes: int


@dataclass
class Holding:
    """The blocks of one kind in a folder. Times are seconds since 1970."""

    kind: Kind
    keys: Distinct = field(default_factory=Distinct)
    facts: dict[str, Any] = field(default_factory=dict)  #: of the namespace; empty: not known
    regions: int = 0
    slots: int = 0
    oldest_s: int | None = None
    newest_s: int | None = None

    def add(self, report: RegionReport) -> None:
        """Add one region of this kind."""
        entries = report.entries.values()
        self.keys.add(entry.key for entry in entries)
        self.regions += 1
        if report.header is not None and not self.facts:
            self.facts = facts_untrusted(report.header.description)
        self.slots += 0 if report.header is None else report.header.slots
        times = [entry.stored_s for entry in entries]
        if times:
            self.oldest_s = min(*times, self.oldest_s or times[0])
            self.newest_s = max(*times, self.newest_s or 0)


@dataclass
class Listing:
    """The contents of a folder."""

    user: User | None
    bytes_on_disk: int
    regions: Counter[str] = field(default_factory=Counter)  #: by recovery's case, or "in_use"
    holdings: dict[Kind, Holding] = field(default_factory=dict)
    is_complete: bool = True


def list_folder(folder: Folder, numbers: list[int], advance: Callable[[], None]) -> Listing:
    """Inspect these regions. Raises ``OSError``; Ctrl-C skips the rest.

    ``advance`` is called after each region.
    """
    listing = Listing(user_of(folder.path), folder.files.bytes_on_disk())
    try:
        for number in numbers:
            try:
                report = folder.inspect(number)
            except PermissionError:
                raise
            except OSError:
                listing.regions["region_unreadable"] += 1
            else:
                _add(listing, report)
            advance()
    except KeyboardInterrupt:
        listing.is_complete = False
    return listing


def kind_of(header: RegionHeader) -> Kind:
    """Return the kind of blocks that a region holds."""
    return Kind(header.namespace, header.key_id, header.block_bytes)


def _add(listing: Listing, report: RegionReport) -> None:
    listing.regions["in_use" if report.is_changing else report.case] += 1
    if report.is_sound and report.header is not None:
        kind = kind_of(report.header)
        listing.holdings.setdefault(kind, Holding(kind)).add(report)
