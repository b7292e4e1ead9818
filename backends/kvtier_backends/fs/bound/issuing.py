"""Makes grants, takes their receipts, and revokes the grants of dead writers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier_backends.fs.bound.folders import clear
from kvtier_backends.fs.bound.names import RECEIPT, WANT, GrantName
from kvtier_backends.fs.bound.records import (
    BLOCKS,
    RecordDamaged,
    Want,
    decode_array_untrusted,
    decode_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.fs.bound.account import Account
    from kvtier_backends.fs.bound.folders import Folder
    from kvtier_backends.fs.bound.records import Array
    from kvtier_backends.fs.bound.timing import Timing

RESERVE_SHARE: Final = 16
"""At most capacity / RESERVE_SHARE is granted, to all writers together."""

GRANTS_MAX: Final = 2
"""Most grants of one writer: the one that it stores with, and the next one."""


@dataclass
class Known:
    """The cleaner's record of a writer."""

    name: str
    want: Want
    changed_s: float
    grants: dict[int, GrantName] = field(default_factory=dict)
    last: int = 0  #: the round of its latest grant


class Issuer:
    """The grants of one term. One task."""

    def __init__(
        self,
        account: Account,
        timing: Timing,
        now: Callable[[], float],
        is_gone: Callable[[str], bool],
    ) -> None:
        self._account = account
        self._timing = timing
        self._now = now
        self._is_gone = is_gone
        self._writers: dict[str, Known] = {}
        self.lacking_bytes = 0  #: of blocks that the filesystem had no room for
        self._number = 0
        self._round = 0
        self._doubtful: list[tuple[Known, int]] = []  # it is not known whether it was made
        self._receipts: list[tuple[int, Array]] = []  # of grants that were removed: size, stored

    async def settle(self, term: Folder, names: list[str]) -> None:
        """Read all writers' requests, take receipts, and revoke the grants of dead writers."""
        try:
            await self._settle(term, names)
        finally:
            self._settle_receipts()

    async def _settle(self, term: Folder, names: list[str]) -> None:
        for name in names:
            if name.startswith(WANT):
                with suppress(RecordDamaged, FileNotFoundError):
                    self._hear(name, decode_untrusted(await term.read(name), Want))
        while self._doubtful:
            await self._reclaim(term, *self._doubtful[-1])
            self._doubtful.pop()
        for writer in list(self._writers.values()):
            for number in writer.want.finished:
                await self._reclaim(term, writer, number)
            if self._is_dead(writer):
                for number in list(writer.grants):
                    await self._reclaim(term, writer, number)
                with suppress(FileNotFoundError):
                    await term.remove(f"{WANT}{writer.name}")
                del self._writers[writer.name]

    def forget_lacking(self) -> None:
        """Forget the bytes that there was no room for: as many are evicted now."""
        self.lacking_bytes = 0

    def needed(self) -> int:
        """Return how many bytes are to be granted next, if there is room."""
        return sum(self._share(writer) for writer in self._waiting())

    async def issue(self, term: Folder) -> bool:
        """Make the grants that there is room for. Returns whether a writer waits for more."""
        self._round += 1
        waiting = sorted(self._waiting(), key=lambda each: each.last)
        is_short = False
        for writer in waiting:
            free = self._account.capacity - self._account.bound
            file_bytes = writer.want.file_bytes
            size = int(min(self._share(writer), max(free, 0))) // file_bytes * file_bytes
            if not size:
                is_short = True
                continue
            self._number += 1
            name = GrantName(writer.name, self._number, size)
            # Invariant: a grant is made only while bound + grant <= capacity.
            assert self._account.bound + size <= self._account.capacity, "granted too much"
            self._account.grant(size)
            writer.grants[name.number] = name
            writer.last = self._round
            self._doubtful.append((writer, name.number))
            await term.make_folder(str(name))
            self._doubtful.pop()
        return is_short

    def _hear(self, file_name: str, want: Want) -> None:
        name = file_name.removeprefix(WANT)
        writer = self._writers.get(name)
        if writer is None:
            if want.file_bytes > 0:
                self._writers[name] = Known(name, want, self._now())
        elif writer.want.count != want.count and want.file_bytes > 0:
            self.lacking_bytes += max(0, want.no_room - writer.want.no_room) * want.file_bytes
            writer.want = want
            writer.changed_s = self._now()

    def _is_dead(self, writer: Known) -> bool:
        stands_s = self._now() - writer.changed_s
        return stands_s >= self._timing.dead_s or self._is_gone(writer.name)

    def _waiting(self) -> list[Known]:
        return [
            writer
            for writer in self._writers.values()
            if writer.want.wanted_bytes > 0
            and len(writer.grants) - self._finished(writer) < GRANTS_MAX
        ]

    def _finished(self, writer: Known) -> int:
        return sum(number in writer.grants for number in writer.want.finished)

    def _share(self, writer: Known) -> int:
        """Return the size of this writer's next grant, by its demand and at most its share."""
        reserve = self._account.capacity // RESERVE_SHARE
        most = reserve // (GRANTS_MAX * max(1, len(self._writers)))
        file_bytes = writer.want.file_bytes
        return max(file_bytes, min(2 * writer.want.wanted_bytes, most) // file_bytes * file_bytes)

    async def _reclaim(self, term: Folder, writer: Known, number: int) -> None:
        """Remove a grant and take its receipt; without one, the grant's bytes count as lost."""
        grant = writer.grants.get(number)
        if grant is None:
            return
        stored = None
        with suppress(FileNotFoundError):
            folder = await term.open_folder(str(grant))
            with suppress(FileNotFoundError, RecordDamaged):
                stored, _ = decode_array_untrusted(await folder.read(RECEIPT), BLOCKS)
        await clear(term, str(grant))
        del writer.grants[number]
        if stored is None:
            self._account.lose(grant.size)
        else:
            self._receipts.append((grant.size, stored))

    def _settle_receipts(self) -> None:
        """Take all receipts of a round at once: each change copies the whole manifest.

        Invariant: a grant counts in full until its receipt does.
        """
        if self._receipts:
            self._account.settle(*joined(self._receipts))
            self._receipts.clear()


def joined(receipts: list[tuple[int, Array]]) -> tuple[int, Array]:
    """Return the total size of these grants, and all blocks that were stored with them."""
    sizes, stored = zip(*receipts, strict=True)
    return sum(sizes), np.concatenate(stored)
