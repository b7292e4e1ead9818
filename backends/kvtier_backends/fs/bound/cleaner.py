"""Runs the cleaner's side of the protocol: takes a term, keeps the account, grants and evicts.

``Issuer`` makes grants, takes their receipts, and revokes the grants of dead writers. ``Cleaner``
leads the term, and begins scans and evictions; ``eviction.py`` carries them out.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvtier_backends.fs.bound.account import Account, Manifest, Scanned
from kvtier_backends.fs.bound.protocol import (
    BLOCKS,
    KNOWN,
    LEASE,
    MANIFEST,
    RECEIPT,
    TERMS,
    USES,
    WANT,
    GrantName,
    Lease,
    ManifestHead,
    RecordDamaged,
    Want,
    clear,
    decode_array_untrusted,
    decode_untrusted,
    encode,
    encode_array,
    ensure_folder,
    term_name,
    term_numbers,
)
from kvtier_backends.fs.bound.removals import Removals
from kvtier_backends.posix import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.fs.bound.eviction import Evicted
    from kvtier_backends.fs.bound.protocol import Array, Folder, Timing


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
        self._doubtful: list[tuple[Known, int]] = []  # its folder may not have been made
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


VICTIMS_MAX = 8192
"""Most blocks of one eviction. Slow storage ends it sooner: ``Timing.evict_s``."""

FULL_SHARE = 1024
"""While the filesystem is full, capacity / FULL_SHARE is evicted at a time."""

LOOK_EPOCH = 1 << 30
"""More epochs than any file's age: a scan before this engine leads goes by file times alone."""

UNSAVED_SHARE = 64
"""The manifest is saved after one change per this many blocks: the next cleaner starts from it,
and tries in vain to remove blocks that have gone since."""


class Evictor(Protocol):
    """The cleaner's operations on block files."""

    def begin_evict(self, victims: Array, *, folders: bool) -> None:
        """Begin to remove these blocks. Abandons any earlier eviction.

        ``folders``: also their folders, if they are empty then.
        """

    def evicted(self) -> Evicted | None:
        """Return the eviction's result when it has ended, once."""

    def begin_scan(self, epoch: int, duty: float) -> None:
        """Begin to scan for all blocks, for this share of the time. Abandons any earlier scan."""

    def scanned(self) -> Scanned | OSError | None:
        """Return the result of the scan, once."""


class Cleaner:
    """One engine's tier as a candidate to lead. ``round`` runs in one task."""

    def __init__(
        self,
        name: str,
        capacity: int,
        hands: Evictor,
        timing: Timing,
        now: Callable[[], float],
        is_gone: Callable[[str], bool],
        *,
        others_store: bool = False,
    ) -> None:
        """``is_gone``: returns whether a writer's process is known to have ended.

        ``others_store``: others store without grants, such as vLLM: the folder is scanned often.
        """
        self._name = name
        self._capacity = capacity
        self._hands = hands
        self._timing = timing
        self._now = now
        self._is_gone = is_gone
        self._others_store = others_store
        self.term: Folder | None = None
        self.number = 0
        self.account = Account(capacity)
        self.evicted_blocks = 0
        self._evict_failed: OSError | None = None
        self._is_evicting = False
        self._is_stuck = False  #: the last eviction could not remove any block
        self.leads_beside: int | None = None  #: the capacity of another leader, if not ours
        self._issuer = Issuer(self.account, timing, now, is_gone)
        self._removals = Removals()
        self._is_fenced = False
        self._is_next = True  #: it leads, or it would if it could make a term
        self._looked: Manifest | None = None  #: the findings of an earlier look
        self._is_looking = False
        self._lease_count = 0
        self._watched: tuple[int, Lease | None] | None = None
        self._watched_s = now()
        self._epoch_s = self._saved_s = now()
        self._scan_began_s: float | None = None
        self._scan_ended_s = float("-inf")
        self._scan_took_s = 0.0

    @property
    def leads(self) -> bool:
        """Return whether this is the cleaner, as far as it knows."""
        return self.term is not None

    def pop_failure(self) -> OSError | None:
        """Return the reason why a block could not be removed, once."""
        failure, self._evict_failed = self._evict_failed, None
        return failure

    async def round(self, space: Folder) -> bool:
        """Do all due work. Returns whether there is more to do at once. Raises ``OSError``."""
        try:
            return await self._round(space)
        except OSError as problem:
            if problem.errno in NO_ROOM:
                await self.make_room(space)
            raise

    async def _round(self, space: Folder) -> bool:
        terms = await ensure_folder(space, TERMS)
        if self.term is not None and self.number != await _newest(terms):
            self.step_down()  # even if the maker of that term died: writers look there
        if self.term is None:
            await self._watch(terms)
        if self.term is None:
            return False
        try:
            return await self._lead(space, terms, self.term)
        except FileNotFoundError:
            if self.number != await _newest(terms):
                self.step_down()  # another one leads: our term is void
                return False
            raise

    async def release(self, space: Folder) -> None:
        """Let another one lead at once. Raises ``OSError``."""
        if self.term is not None:
            if self._is_fenced:
                await self._end_eviction(space)
                await self._save(space)
            await self._renew(self.term, released=True)
            self.step_down()

    # --- taking a term ---

    async def _watch(self, terms: Folder) -> None:
        """Make a term if none leads: the lease has stood still long enough by our own clock."""
        number = await _newest(terms)
        lease = await _lease_untrusted(terms, number) if number else None
        if number and self._watched != (number, lease):
            self._watched, self._watched_s = (number, lease), self._now()
            other = None if lease is None else lease.capacity
            self.leads_beside = other if other != self._capacity else None
        is_released = lease is not None and (lease.released or self._is_gone(lease.holder))
        is_expired = self._now() - self._watched_s >= self._timing.lease_s
        self._is_next = not number or is_released or is_expired
        if self._is_next:
            await self._claim(terms, number + 1)

    async def _claim(self, terms: Folder, number: int) -> None:
        try:
            term = await terms.make_folder(term_name(number))
        except FileExistsError:
            return
        # A process paused before ``mkdir`` may have made a term that was over long ago.
        if await _newest(terms) != number:
            await terms.remove_folder(term_name(number))
            return
        self.term, self.number = term, number
        self._lease_count = 0
        self._is_fenced = False
        self._is_evicting = self._is_stuck = False
        self.leads_beside = None
        self.account = Account(self._capacity)
        self._issuer = Issuer(self.account, self._timing, self._now, self._is_gone)
        self._scan_began_s = None
        self._scan_ended_s = float("-inf")

    def step_down(self) -> None:
        """Stop leading. Its grants become void with the next term."""
        self.term = None
        self._watched = None
        self._watched_s = self._now()

    async def _renew(self, term: Folder, *, released: bool = False) -> None:
        self._lease_count += 1
        lease = Lease(self._lease_count, self._name, self._capacity, released)
        await term.write(LEASE, encode(lease))

    # --- leading ---

    async def _lead(self, space: Folder, terms: Folder, term: Folder) -> bool:
        await self._renew(term)
        if not self._is_fenced:
            await self._fence(space, terms)
        account = self.account
        if self._now() - self._epoch_s >= self._timing.epoch_s:
            self._epoch_s = self._now()
            account.epoch += 1
        await self._end_eviction(space)
        names = await term.names()
        await self._issuer.settle(term, names)
        await self._merge_uses(term, names)
        self._scan()
        if self._issuer.lacking_bytes:
            self._begin_making_room()
        is_behind = self._evict()
        is_wanting = await self._issuer.issue(term)
        is_stale = account.unsaved * UNSAVED_SHARE > len(account.manifest)
        pause_s = self._timing.idle_s if is_stale else self._timing.save_s
        if self._now() - self._saved_s >= pause_s:
            await self._save(space)
        return is_behind or is_wanting

    async def _fence(self, space: Folder, terms: Folder) -> None:
        """End all earlier terms; continue with their manifest."""
        for number in term_numbers(await terms.names()):
            if number < self.number:
                await clear(terms, term_name(number))
        await self._removals.begin(space, self.number)
        await self._load(space)
        self._is_fenced = True
        self._looked, self._is_looking = None, False
        self._saved_s = self._epoch_s = self._now()

    async def _load(self, space: Folder) -> None:
        with suppress(FileNotFoundError, RecordDamaged):
            known, raw = decode_array_untrusted(await space.read(MANIFEST), KNOWN)
            head = decode_untrusted(raw, ManifestHead)
            holds = head.holds and head.capacity <= self._capacity and not self._others_store
            self.account.begin_from(Manifest(known.copy()), head.epoch, holds=holds)

    async def _save(self, space: Folder) -> None:
        account = self.account
        self._saved_s = self._now()
        account.saved()
        holds = account.bound <= self._capacity and not self._others_store
        head = encode(ManifestHead(self._capacity, account.epoch, holds))
        await space.write(MANIFEST, encode_array(account.manifest.entries, head))

    async def _merge_uses(self, term: Folder, names: list[str]) -> None:
        for name in names:
            if name.startswith(USES):
                with suppress(RecordDamaged):
                    used, _ = decode_array_untrusted(await term.read(name), BLOCKS)
                    self.account.touch(used)
                await term.remove(name)

    def _scan(self) -> None:
        """Take the result of a scan, or begin one if it is due."""
        now = self._now()
        if self._scan_began_s is not None:
            found = self._hands.scanned()
            if found is None:
                return
            self._scan_took_s, self._scan_ended_s = now - self._scan_began_s, now
            self._scan_began_s = None
            if isinstance(found, OSError):
                self.account.scan_failed()
                raise found
            self.account.scan_ended(found)
            self._saved_s = float("-inf")  # at once: the next cleaner need not scan first
            return
        timing = self._timing
        since = now - self._scan_ended_s
        account = self.account
        doubt = account.lost + account.ghosts
        soon = not account.is_counted or doubt * 256 > self._capacity or self._others_store
        pause = timing.rescan_s if not soon else self._scan_took_s / timing.scan_share_max
        if since >= max(pause, timing.idle_s):
            account.scan_begins()
            self._scan_began_s = now
            self._hands.begin_scan(account.epoch, self._duty())

    def _duty(self) -> float:
        """Return the scan's share of the time: all of it if stores wait for the result."""
        is_known = self.account.manifest.bytes * 2 > self._capacity
        return self._timing.scan_duty if is_known else 1.0

    def _evict(self) -> bool:
        """Have blocks removed: the excess over capacity, the next grants' size, and as much ahead.

        Grants and the lease do not wait for it. Returns whether there is more to do.
        """
        needed = self._issuer.needed()
        over = self.account.bound + needed - self._capacity
        if over <= 0 or over == float("inf"):  # nothing is known until the scan ends
            return False
        self._begin_evicting(int(over) + needed)
        return self._is_evicting and not self._is_stuck

    async def make_room(self, space: Folder | None) -> None:
        """Evict a little: the filesystem is full, though the folder may be within its bound.

        Not even the small files can be written, and nothing else would make room. ``space``:
        their folder, if it could be created. Raises ``OSError``.
        """
        if not self._is_next:
            return  # the leader finds it full too
        await self._end_eviction(space)
        if self._is_fenced:
            self._scan()
        else:
            self._look()
        self._begin_making_room()

    def _look(self) -> None:
        """Find victims before this engine leads a term: others may store, so it counts nothing."""
        if not self._looked and not self._is_looking:
            self._is_looking = True
            self._hands.begin_scan(LOOK_EPOCH, self._timing.scan_duty)
            return
        found = self._hands.scanned() if self._is_looking else None
        if found is not None:
            self._is_looking = False
            if isinstance(found, OSError):
                raise found
            self._looked = Manifest(found.known)

    def _begin_making_room(self) -> None:
        lacking = min(self._issuer.lacking_bytes, self._capacity // RESERVE_SHARE)
        if self._begin_evicting(max(lacking, self._capacity // FULL_SHARE), folders=True):
            self._issuer.lacking_bytes = 0  # as many are evicted now

    def _begin_evicting(self, size: int, *, folders: bool = False) -> bool:
        """Begin to remove this many bytes of blocks, unless an eviction is running.

        ``folders``: also their folders, each of which takes an inode, and often a page.
        """
        if self._is_evicting:
            return False
        known = self.account.manifest if self._looked is None else self._looked
        victims = known.oldest(size, VICTIMS_MAX)
        self._is_evicting = bool(len(victims))
        if self._is_evicting:
            self.account.eviction_begins()
            self._hands.begin_evict(victims, folders=folders)
        return self._is_evicting

    async def _end_eviction(self, space: Folder | None) -> None:
        """Apply the result of an eviction that began in an earlier round."""
        evicted = self._hands.evicted() if self._is_evicting else None
        if evicted is None:
            return
        self._is_evicting = False
        self._is_stuck = not evicted.numbers
        numbers = np.array(evicted.numbers, np.uint64)
        self.account.removed(numbers, evicted.bytes)
        if self._looked is not None:
            self._looked.remove(numbers)
        self.evicted_blocks += len(evicted.names)
        self._evict_failed = evicted.failed
        self._removals.note(evicted.names)
        if space is not None:
            await self._removals.announce(space)


async def _newest(terms: Folder) -> int:
    return max(term_numbers(await terms.names()), default=0)


async def _lease_untrusted(terms: Folder, number: int) -> Lease | None:
    with suppress(FileNotFoundError, RecordDamaged):
        term = await terms.open_folder(term_name(number))
        return decode_untrusted(await term.read(LEASE), Lease)
    return None
