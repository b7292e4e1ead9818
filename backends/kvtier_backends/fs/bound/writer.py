"""Runs a writer's side of the protocol: requests grants, takes them, and hands in receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_backends.fs.bound.demand import Demand
from kvtier_backends.fs.bound.grants import Grant, Grants
from kvtier_backends.fs.bound.names import (
    RECEIPT,
    TERMS,
    USES,
    WANT,
    parse_grant_untrusted,
    term_name,
    term_numbers,
)
from kvtier_backends.fs.bound.records import Want, encode, encode_array
from kvtier_backends.fs.bound.uses import Uses, as_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.fs.bound.folders import Folder
    from kvtier_backends.fs.bound.timing import Timing


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
