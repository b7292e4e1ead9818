"""Runs a writer's side of the protocol: requests grants, takes them, and hands in receipts.

The grants of a writer hold the bytes that each allows, and the blocks stored with it. ``Demand``
measures how much it stores, so that a slow cleaner grants enough until its next round. ``Uses``
collects the blocks used since the last report: no order, and a limited number.

# Invariant: no more bytes are written with a grant than it allows: a file's bytes are taken from
#            it before the write, and returned only once the file is removed. Checked: begin,
#            give_up, test_the_folder_never_holds_more_than_its_bound.
# Invariant: nothing is done with a grant any more once its receipt is written. Checked:
#            finished, test_nothing_is_stored_with_a_grant_that_has_a_receipt.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier_backends.fs.bound.protocol import (
    BLOCKS,
    RECEIPT,
    TERMS,
    USES,
    WANT,
    Array,
    Want,
    encode,
    encode_array,
    parse_grant_untrusted,
    term_name,
    term_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier_backends.fs.bound.protocol import Folder, GrantName, Location, Timing


class Demand:
    """A writer's demand: bytes stored recently, and bytes that had no room. One task."""

    def __init__(self, window_s: float) -> None:
        """``window_s``: stores longer ago than this do not count, in seconds."""
        self._window_s = window_s
        self._taken: deque[tuple[float, int]] = deque()
        self._refused = 0

    def note(self, now: float, taken: int, refused: int) -> bool:
        """Note bytes stored and refused since the last call. Returns whether there were any."""
        if taken:
            self._taken.append((now, taken))
        while self._taken and now - self._taken[0][0] >= self._window_s:
            self._taken.popleft()
        if taken or refused:
            self._refused = refused  # a waiting store is counted in each round: don't add up
        return bool(taken or refused)

    def bytes(self) -> int:
        """Return how many bytes would be stored within the window, if there were room."""
        return sum(size for _, size in self._taken) + self._refused


USES_MAX: Final = 1 << 16


class Uses:
    """Blocks that this engine has loaded, or found to be stored. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}

    def note(self, location: Location) -> None:
        """Note that a block was used. With too many, the oldest are forgotten."""
        with self._lock:
            self._used[location.block] = location.leaf
            if len(self._used) > USES_MAX:
                del self._used[next(iter(self._used))]

    def drain(self) -> Array:
        """Return them, and start again."""
        with self._lock:
            used, self._used = self._used, {}
        return as_array((block, leaf, 0) for block, leaf in used.items())


def as_array(blocks: Iterable[tuple[int, int, int]]) -> Array:
    """Return blocks as in the small files: number, leaf and size of each."""
    return np.array(list(blocks), BLOCKS)


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


class Writer:
    """One engine's tier as a writer. ``round`` runs in one task."""

    def __init__(
        self,
        name: str,
        file_bytes: int,
        timing: Timing,
        now: Callable[[], float],
    ) -> None:
        """``name``: unique. ``now``: this machine's monotonic clock, in seconds."""
        self.grants = Grants()
        self.uses = Uses()
        self._name = name
        self._file_bytes = file_bytes
        self._timing = timing
        self._now = now
        self._term: Folder | None = None
        self._number = 0
        self._seen: set[int] = set()  # all grants of this term that were ever adopted
        self._finished: set[int] = set()
        self._count = 0
        self._listed = 0
        self._demand = Demand(timing.idle_s)
        self._used_s = self._listed_s = now()
        self._wanted_s = float("-inf")

    async def round(self, space: Folder) -> bool:
        """Do all due work. Returns whether blocks are being stored. Raises ``OSError``."""
        terms = await space.open_folder(TERMS)
        numbers = term_numbers(await terms.names())
        if not numbers:
            return False
        if numbers[-1] != self._number or self._term is None:
            self.leave()
            self._term = await terms.open_folder(term_name(numbers[-1]))
            if numbers[-1] != self._number:
                self._number = numbers[-1]
                self._seen.clear()
        try:
            return await self._work(self._term)
        except FileNotFoundError:
            self.leave()  # the term is over: the next round finds its successor
            return True

    async def sign_off(self) -> None:
        """Hand back all grants. Raises ``OSError``."""
        self.grants.spend_all()
        if self._term is not None:
            await self._hand_in()
            await self._say(self._term, 0)

    def leave(self) -> None:
        """Release the term: it is over, or the folder has changed."""
        self.grants.drop_all()
        self._term = None
        self._finished.clear()
        self._wanted_s = float("-inf")

    async def _work(self, term: Folder) -> bool:
        now = self._now()
        if self._demand.note(now, *self.grants.demand()):
            self._used_s = now
        elif now - self._used_s >= self._timing.hand_back_s:
            self.grants.spend_all()
        await self._hand_in()
        await self._adopt(term, await term.names())
        await self._list_uses(term, now)
        is_busy = now - self._used_s < self._timing.idle_s
        if is_busy or self._finished or now - self._wanted_s >= self._timing.idle_s:
            await self._say(term, self._demand.bytes() if is_busy else 0)
            self._wanted_s = now
        return is_busy

    async def _hand_in(self) -> None:
        """Write the receipts of finished grants. A grant is not touched after that."""
        for grant in self.grants.finished():
            stored = as_array((*location, size) for location, size in grant.stored)
            await grant.folder.write(RECEIPT, encode_array(stored))
            self.grants.forget(grant)
            self._finished.add(grant.name.number)

    async def _adopt(self, term: Folder, names: list[str]) -> None:
        """Take new grants, and forget old ones that the cleaner has removed.

        Invariant: a grant is taken once. One that is there and was released is handed back.
        """
        found = filter(None, map(parse_grant_untrusted, names))
        mine = {grant.number: grant for grant in found if grant.writer == self._name}
        self._finished.intersection_update(mine)
        self._finished.update(mine.keys() & self._seen - self.grants.numbers())
        for number in sorted(mine.keys() - self._seen):
            self._seen.add(number)
            folder = await term.open_folder(str(mine[number]))
            self.grants.add(Grant(mine[number], folder, mine[number].size))

    async def _list_uses(self, term: Folder, now: float) -> None:
        if now - self._listed_s < self._timing.uses_s:
            return
        self._listed_s = now
        used = self.uses.drain()
        if len(used):
            self._listed += 1
            await term.write(f"{USES}{self._name}-{self._listed}", encode_array(used))

    async def _say(self, term: Folder, wanted: int) -> None:
        self._count += 1
        finished = tuple(sorted(self._finished))
        want = Want(self._count, self._file_bytes, wanted, finished, self.grants.no_room)
        await term.write(f"{WANT}{self._name}", encode(want))
