"""Holds a writer's grants: the bytes that each allows, and the blocks stored with it.

# Invariant: a grant is never used for more bytes than it is good for: what is written into its
#            folder counts before it is, and comes back only once it is removed. Checked: begin,
#            give_up, test_the_folder_never_holds_more_than_its_bound.
# Invariant: nothing is done with a grant any more once its receipt is written. Checked:
#            finished, test_nothing_is_stored_with_a_grant_that_has_a_receipt.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_backends.fs.bound.folders import Folder
    from kvtier_backends.fs.bound.names import GrantName, Location


class NoGrant(OSError):
    """Raised if nothing may be stored right now. It passes by itself, or the log has the reason."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "no room has been granted")


@dataclass
class Stage:
    """The folder where a block's file is written before it is renamed, and the progress."""

    folder: int  #: open
    size: int | None = None  #: of the file that may be in its place, whatever the call returned
    is_left: bool = False  #: it could not be removed after a failure

    def begin_renaming(self, size: int) -> None:
        """Note that the file is being renamed into its place, and its size."""
        self.size = size

    def note_left(self) -> None:
        """Note that the write failed, and that its file could not be removed."""
        self.is_left = True


@dataclass(eq=False)
class Grant:
    """One grant of this writer."""

    name: GrantName
    folder: Folder
    left: int  #: bytes
    in_flight: int = 0  #: blocks
    is_spent: bool = False  #: it takes no more blocks
    is_lost: bool = False  #: its folder is gone
    stored: list[tuple[Location, int]] = field(default_factory=list)


class Grants:
    """All grants of one writer. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: list[Grant] = []
        self.taken_bytes = 0  #: since the last call of ``demand``
        self.refused_bytes = 0
        self.no_room = 0  #: blocks with a grant that the filesystem had no room for

    def add(self, grant: Grant) -> None:
        """Add a new grant."""
        with self._lock:
            self._grants.append(grant)

    def drop_all(self) -> None:
        """Forget all grants: their term is over."""
        with self._lock:
            for grant in self._grants:
                grant.is_lost = True
            self._grants.clear()

    def left(self, size: int) -> int:
        """Return how many files of this size there is room for."""
        with self._lock:
            return sum(grant.left // size for grant in self._grants if not grant.is_spent)

    def begin(self, size: int) -> Grant:
        """Reserve the room for a file in a grant. Raises ``NoGrant``."""
        with self._lock:
            for grant in self._grants:
                if grant.is_spent:
                    continue
                if grant.left >= size:
                    grant.left -= size
                    grant.in_flight += 1
                    self.taken_bytes += size
                    return grant
                grant.is_spent = True
            self.refused_bytes += size
        raise NoGrant

    def end(self, grant: Grant, location: Location, size: int, returned: int) -> None:
        """Note that a file was stored, or may have been. ``returned``: bytes it did not need."""
        with self._lock:
            grant.in_flight -= 1
            grant.left += returned
            grant.stored.append((location, size))

    def note_no_room(self) -> None:
        """Note that the filesystem had no room for a block, despite its grant."""
        with self._lock:
            self.no_room += 1

    def give_up(self, grant: Grant, returned: int) -> None:
        """Note that a file was not stored. ``returned``: its size, or 0 if something is left."""
        with self._lock:
            grant.in_flight -= 1
            grant.left += returned

    def lose(self, grant: Grant) -> None:
        """Stop using a grant whose folder is gone."""
        with self._lock:
            grant.in_flight -= 1
            grant.is_lost = True
            if grant in self._grants:
                self._grants.remove(grant)

    def spend_all(self) -> None:
        """Stop using all grants: they are handed back."""
        with self._lock:
            for grant in self._grants:
                grant.is_spent = True

    def finished(self) -> list[Grant]:
        """Return the grants that are no longer in use, for a receipt."""
        with self._lock:
            return [each for each in self._grants if each.is_spent and not each.in_flight]

    def forget(self, grant: Grant) -> None:
        """Forget a grant whose receipt is written."""
        with self._lock:
            if grant in self._grants:
                self._grants.remove(grant)

    def demand(self) -> tuple[int, int]:
        """Return the bytes taken since the last call, and the bytes refused."""
        with self._lock:
            demand = self.taken_bytes, self.refused_bytes
            self.taken_bytes = self.refused_bytes = 0
        return demand

    def ask(self, size: int) -> None:
        """Note that a store waits for room."""
        with self._lock:
            self.refused_bytes += size

    def numbers(self) -> set[int]:
        """Return the numbers of the grants that are held."""
        with self._lock:
            return {grant.name.number for grant in self._grants}
