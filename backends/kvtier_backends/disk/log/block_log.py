"""The log of blocks: appends to the open region, reads from any, empties the emptiest.

Everything here runs on one event loop; only the device's calls are waited for.
Each call is a task of its own that a cancelled caller leaves behind: what it
holds (slots being written, regions being read) is let go when the device is
done with it, and not before.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.plugin_api.backend import Loaded, Outcome
from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import (
    ID_BYTES,
    NO_KEY_ID,
    PAGE_BYTES,
    SEAL_BYTES,
    Geometry,
    check_key_lengths,
    encode_header,
    time_s,
)
from kvtier_backends.disk.log.batches import Batch, Item, check_buffers
from kvtier_backends.disk.log.calls import Calls
from kvtier_backends.disk.log.healing import try_a_region
from kvtier_backends.disk.log.load_priority import Turns
from kvtier_backends.disk.log.region_faults import RegionTrouble
from kvtier_backends.disk.log.region_reclaim import empty_one, victim_without_loss
from kvtier_backends.disk.log.regions import Extent, RegionState
from kvtier_backends.disk.log.runs import neighbours
from kvtier_backends.disk.log.tables import Identity, PagePool, RegionTable, new_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.plugin_api.backend import LoadBlock, StoreBlock
    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.log.index import BlockIndex, Known
    from kvtier_backends.disk.log.regions import Budget, Regions
    from kvtier_backends.ledger import Ledger

LOOKS_AHEAD_PER_REGION: Final = 4


@dataclass(frozen=True)
class Space:
    """Where the blocks go, and how many of them."""

    device: Device
    index: BlockIndex
    regions: Regions
    geometry: Geometry
    budget: Budget
    capacity_blocks: int
    stores_beside_loads: int = 1  #: how many stores go on while a load is under way


class Sealing(NamedTuple):
    """How a block is encrypted: its seal, and which of the engine's keys opens it."""

    seal: bytes
    key_id: bytes


class BlockLog(Calls):
    """Blocks in regions of a device. ``space.capacity_blocks`` bounds how many are kept.

    ``lost`` is told the keys of blocks that go for reasons of the log's own.
    ``clock`` gives seconds since 1970. ``ttl_s`` 0 means for ever.
    """

    def __init__(
        self,
        space: Space,
        identity: Identity,
        ledger: Ledger,
        *,
        ttl_s: int,
        clock: Callable[[], float],
        lost: Callable[[Sequence[bytes]], None],
    ) -> None:
        super().__init__()
        self.device = space.device
        self.index = space.index
        self.regions = space.regions
        self.geometry = space.geometry
        self.budget = space.budget
        self.ledger = ledger
        self.lost = lost
        self.trouble = RegionTrouble(space.regions, ledger, clock, self._lose_region)
        self.allocated: set[int] = set()
        self.key_ids: dict[int, bytes] = {}  # what each region is encrypted with
        self.is_dead = False  # the folder has vanished: nothing is stored any more
        self.identity = identity
        self._capacity_blocks = space.capacity_blocks
        self._ttl_s = ttl_s
        self._clock = clock
        self._tables: dict[int, RegionTable] = {}
        self._turns = Turns(space.stores_beside_loads)
        self.opening = asyncio.Lock()
        self._emptying: asyncio.Future[Outcome] | None = None
        self._look_ahead_at = 0  # for a region to empty, with that much room left
        self._opened_ahead_in: int | None = None  # the region that was open at the last attempt
        self._pages = PagePool()
        self._header_page = self._pages.take()  # whoever holds ``opening`` has it
        self._appending = 0  # blocks that are on their way into the index
        self.to_append_again = 0  #: blocks of the region being emptied that still need room
        self._padding = memoryview(mmap.mmap(-1, PAGE_BYTES))[
            : self.geometry.stride - self.geometry.block_bytes
        ]

    # --- what the backend asks for ---

    async def load(
        self, blocks: Sequence[LoadBlock], sealed: dict[bytes, Sealing] | None = None
    ) -> list[Loaded]:
        """Read each block into its buffer; one answer a block, in order.

        ``sealed`` is told how each block that is there is encrypted, by key.
        """
        return await self.shielded(self._load(blocks, sealed))

    async def store(
        self, blocks: Sequence[StoreBlock], seals: Sequence[bytes] = ()
    ) -> list[Outcome]:
        """Append the blocks that are not there yet; one outcome a block, in order.

        ``seals`` go with encrypted blocks, one each.
        """
        return await self.shielded(self._store(blocks, seals or [b""] * len(blocks)))

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forget these keys; returns how many were there."""
        return len(self.index.remove_all(keys))

    def has(self, key: bytes) -> bool:
        """Tell whether a load would find the key. No I/O."""
        location = self.index.get(key)
        return location is not None and not self.is_expired(self.index.known(location))

    def lose(self, keys: Sequence[bytes], name: str) -> None:
        """Forget keys for a reason of the log's own: counted under ``name``, and told."""
        gone = self.index.remove_all(keys)
        if gone:
            self.ledger.add(name, len(gone))
            self.lost(gone)

    def sweep(self, region: int) -> None:
        """Forget a region's blocks that are older than ``ttl_s``."""
        if self._ttl_s:
            before_s = self._now_s() - self._ttl_s
            self.lose(self.index.stored_before(region, before_s), "blocks_expired")

    # --- loads ---

    async def _load(
        self, blocks: Sequence[LoadBlock], sealed: dict[bytes, Sealing] | None
    ) -> list[Loaded]:
        keys = [block.key for block in blocks]
        check_buffers([block.buffer for block in blocks], self.geometry.block_bytes)
        answers = [Loaded(Outcome.ABSENT)] * len(blocks)
        found = self._find(keys)
        there = [place for place, location in enumerate(found) if location is not None]
        if not there:
            return answers
        locations = [location for location in found if location is not None]
        runs = neighbours(locations, self.geometry.slots)
        # Before the read: what is there now may be gone by its end.
        digests = self._use(runs, locations)
        if sealed is not None:
            for place, location in zip(there, locations, strict=True):
                key_id = self.key_ids.get(location // self.geometry.slots, NO_KEY_ID)
                sealed[keys[place]] = Sealing(self.index.known(location).seal, key_id)
        with self._turns.load():
            outcomes = await self._read(runs, locations, [blocks[place].buffer for place in there])
        for place, outcome, digest in zip(there, outcomes, digests, strict=True):
            answers[place] = Loaded(outcome, digest if outcome is Outcome.DONE else None)
        return answers

    def _find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return where the keys' blocks are, None for what is not here or too old."""
        found = self.index.find(keys)
        if self._ttl_s:
            expired = [
                place
                for place, location in enumerate(found)
                if location is not None and self.is_expired(self.index.known(location))
            ]
            self.lose([keys[place] for place in expired], "blocks_expired")
            for place in expired:
                found[place] = None
        return found

    def _use(self, runs: Sequence[Sequence[int]], locations: Sequence[int]) -> list[bytes]:
        """Note that blocks are used; returns their digests."""
        now_s = self._now_s()
        digests = [b""] * len(locations)
        for run in runs:
            first = locations[run[0]]
            self.index.use(first, now_s, len(run))
            for place, digest in zip(run, self.index.digests(first, len(run)), strict=True):
                digests[place] = digest
        return digests

    async def read_at(self, wanted: Sequence[tuple[int, memoryview]]) -> list[Outcome]:
        """Read blocks at locations into buffers: neighbours in one transfer."""
        locations = [location for location, _ in wanted]
        runs = neighbours(locations, self.geometry.slots)
        return await self._read(runs, locations, [buffer for _, buffer in wanted])

    async def _read(
        self,
        runs: Sequence[Sequence[int]],
        locations: Sequence[int],
        buffers: Sequence[memoryview],
    ) -> list[Outcome]:
        """Read each run of places, whose locations are neighbours, in one transfer."""
        transfers = [
            self._transfer(locations[run[0]], [buffers[place] for place in run]) for run in runs
        ]
        pinned = {transfer.region for transfer in transfers}
        for region in pinned:
            self.regions.pin(region)
        try:
            ends = await self.device.read(transfers)
        finally:
            for region in pinned:
                self.regions.unpin(region)
        outcomes = [Outcome.DONE] * len(locations)
        for run, transfer, end in zip(runs, transfers, ends, strict=True):
            whole, rest = self._judge_read(end, len(run))
            for place in run[whole:]:
                outcomes[place] = rest
            if isinstance(end, OSError):
                self.trouble.read_failed(transfer, end)
        return outcomes

    def _judge_read(self, end: int | OSError, blocks: int) -> tuple[int, Outcome]:
        """Return how many blocks of a transfer were read whole, and what became of the rest."""
        if isinstance(end, OSError):
            self.ledger.trouble("load", "loads_failed", end, count=blocks)
            return 0, Outcome.FAILED
        geometry = self.geometry
        whole = min(blocks, (end + geometry.stride - geometry.block_bytes) // geometry.stride)
        if whole:
            self.ledger.success("load")
        if whole < blocks:
            reason = "a segment file is shorter than its blocks"
            self.ledger.trouble("load", "blocks_cut_off", reason, count=blocks - whole)
        return whole, Outcome.DAMAGED

    # --- stores ---

    async def _store(self, blocks: Sequence[StoreBlock], seals: Sequence[bytes]) -> list[Outcome]:
        keys = [block.key for block in blocks]
        check_key_lengths(map(len, keys))
        check_buffers([block.buffer for block in blocks], self.geometry.block_bytes)
        outcomes = dict.fromkeys(keys, Outcome.DONE)
        places: dict[bytes, int] = {}  # of what is not here, each key once
        for place, location in enumerate(self._find(keys)):
            if location is None:
                places.setdefault(keys[place], place)
        fits = list(places.values())
        room = max(0, self._capacity_blocks - len(self.index) - self._appending)
        if len(fits) > room:
            outcomes.update(dict.fromkeys(list(places)[room:], Outcome.FULL))
            del fits[room:]
        if fits:
            self._appending += len(fits)
            batch = Batch.new(
                [blocks[place] for place in fits],
                [seals[place] for place in fits],
                self._now_s(),
            )
            ends = await self._append(batch)
            outcomes.update(zip(batch.keys, ends, strict=True))
            self._look_ahead()
        answers = [outcomes[key] for key in keys]
        if Outcome.FULL in answers:
            self.ledger.add("stores_full", answers.count(Outcome.FULL))
        return answers

    # --- appending ---

    async def append_again(self, items: Sequence[Item]) -> list[Outcome]:
        """Write blocks of the log once more, where there is room."""
        return await self._append(Batch.again(items))

    async def _append(self, batch: Batch) -> list[Outcome]:
        """Write blocks where there is room: extent by extent, all at once."""
        writes: list[asyncio.Future[list[Outcome]]] = []
        ends: list[Outcome] = []
        at, count = 0, len(batch.keys)
        while at < count:
            extent: Extent | Outcome | None = None
            try:
                extent = await self._take(count - at, again=batch.is_again)
            finally:
                if not isinstance(extent, Extent) and not batch.is_again:
                    self._appending -= count - at
            if isinstance(extent, Outcome):
                ends = [extent] * (count - at)
                break
            part = batch.cut(at, at + extent.slots)
            at += extent.slots
            if at < count:
                writes.append(self.start(self._write(extent, part)))
            else:  # mostly the only one: it needs no task of its own
                ends = await self._write(extent, part)
        return [outcome for write in writes for outcome in await write] + ends

    async def _write(self, extent: Extent, batch: Batch) -> list[Outcome]:
        """Write one extent's blocks, then their entries, then know them."""
        region = extent.region
        table = self._tables[region]
        first, count = region * self.geometry.slots + extent.first, len(batch.keys)
        pages: list[Transfer] = []
        try:
            entries = batch.entries(extent.first)
            pages = table.own_pages(entries)
            async with self._turns.store():
                problem = await self.device.write([self._transfer(first, batch.buffers), *pages])
            if problem is None and not pages:
                problem = await table.add(entries)
            if problem is not None:
                return [self.trouble.store_failed(region, problem)] * count
            if self.is_dead or self.regions.state(region) is RegionState.RETIRED:
                return [Outcome.FAILED] * count
            self._count_bytes(count * self.geometry.stride, again=batch.is_again)
            batch.put_into(self.index, first)
            self.trouble.wrote()
            self.ledger.success("store")
            return [Outcome.DONE] * count
        finally:
            if not batch.is_again:
                self._appending -= count
            self.regions.written(extent)
            table.free(pages)
            if self._tables.get(region) is table and self.regions.is_written(region):
                del self._tables[region]
                table.close()

    def _count_bytes(self, size: int, *, again: bool) -> None:
        if again:
            self.budget.spend(size)
            self.ledger.add("bytes_appended_again", size)
        else:
            self.budget.stored(size)
            self.ledger.add("bytes_stored", size)

    def count_overhead(self, size: int) -> None:
        """Count bytes of headers and tables."""
        self.budget.spend(size)
        self.ledger.add("bytes_of_tables", size)

    async def _take(self, count: int, *, again: bool) -> Extent | Outcome:
        """Return slots to write to, or FULL or FAILED."""
        while not self.is_dead:
            if room := self._room(again=again):
                return self.regions.take(min(count, room))  # mostly there is nothing to wait for
            async with self.opening:
                if room := self._room(again=again):
                    return self.regions.take(min(count, room))
                refused = await try_a_region(self) if self.trouble.in_doubt else None
                region = self.regions.next_to_open(again=again)
                if refused is None and region is not None:
                    problem = await self._open(region)
                    if problem is None:
                        continue
                    refused = self.trouble.open_failed(region, problem, self.allocated)
                    if refused is None:
                        continue
                if refused is not None:
                    return refused
            if again:
                return Outcome.FULL
            end = await self._make_room()
            if end is not Outcome.DONE and not self.regions.room:
                return end
        return Outcome.FAILED

    def _room(self, *, again: bool) -> int:
        """Return how many slots may be taken now. The last ones are for ``to_append_again``."""
        regions = self.regions
        room = regions.room
        if again or not self.to_append_again or regions.has_next or regions.free_count:
            return room
        return max(0, room - self.to_append_again)

    async def _make_room(self) -> Outcome:
        """Empty a region, together with whoever wants room as well."""
        if self._emptying is None or self._emptying.done():
            victim = self.regions.victim(self.trouble.suspects)
            self._emptying = self.start(empty_one(self, victim))
        return await asyncio.shield(self._emptying)

    def _look_ahead(self) -> None:
        """Open the next region, or empty one for that, before a store has to wait for it."""
        regions = self.regions
        if regions.has_next or self.opening.locked() or self.trouble.in_doubt:
            return
        if regions.next_to_open(again=False) is not None:
            if regions.open_region != self._opened_ahead_in:
                self._opened_ahead_in = regions.open_region
                self.start(self._open_ahead())
            return
        if regions.room > regions.slots // 2:
            self._look_ahead_at = regions.slots // 2
        if regions.room <= self._look_ahead_at:
            # Looking for a victim takes a while where there are many regions: not each time.
            self._look_ahead_at = max(0, regions.room - regions.slots // LOOKS_AHEAD_PER_REGION)
            is_free = self._emptying is None or self._emptying.done()
            if is_free and (victim := victim_without_loss(self)) is not None:
                self._emptying = self.start(empty_one(self, victim))

    async def _open_ahead(self) -> None:
        async with self.opening:
            region = self.regions.next_to_open(again=False)
            if region is not None and not (self.regions.has_next or self.is_dead):
                await self._open(region)  # whoever needs one meets a problem again

    async def _open(self, region: int) -> OSError | None:
        """Give a free region a new header: it is appended to, now or next."""
        incarnation = os.urandom(ID_BYTES)
        sequence, problem = await self.head(region, incarnation)
        if problem is not None:
            return problem
        table = RegionTable(
            self.device,
            region,
            incarnation,
            self.geometry,
            self._pages,
            seal_bytes=SEAL_BYTES if self.index.sealed else 0,
            wrote=self.count_overhead,
        )
        self.trouble.wrote()
        self.index.release(region)
        self.regions.headed(region, sequence)
        self.key_ids[region] = self.identity.key_id
        self._tables[region] = table
        return None

    async def head(self, region: int, incarnation: bytes) -> tuple[int, OSError | None]:
        """Write the header of a region that has no block; returns its sequence, and what failed.

        Whoever calls holds ``opening``.
        """
        sequence, now_s = self.regions.next_sequence(), self._now_s()
        header = new_header(self.identity, self.geometry, region, sequence, incarnation, now_s)
        if region not in self.allocated:
            try:
                await self.device.allocate(region)
            except OSError as no_room:
                return sequence, no_room
            self.allocated.add(region)
        self._header_page[:] = encode_header(header)
        problem = await self.device.write([Transfer(region, 0, [self._header_page])])
        if problem is None:
            self.count_overhead(PAGE_BYTES)
        return sequence, problem

    # --- small things ---

    def _now_s(self) -> int:
        """Return the time as it is written down, also by a clock that is far off."""
        return time_s(self._clock())

    def _lose_region(self, region: int) -> None:
        self.lose(self.index.keys_of(region), "blocks_lost_with_a_region")

    def item_again(self, key: bytes, buffer: memoryview, location: int) -> Item:
        """Return what it takes to append a block of the log again."""
        return Item(key, buffer, self.index.known(location), location)

    def is_expired(self, known: Known) -> bool:
        """Tell whether a block is older than ``ttl_s``."""
        return self._ttl_s > 0 and known.stored_s + self._ttl_s < self._now_s()

    def has_current_key(self, region: int) -> bool:
        """Tell whether a region's blocks may go into a region that is opened now."""
        return self.key_ids.get(region, NO_KEY_ID) == self.identity.key_id

    def _transfer(self, location: int, buffers: Sequence[memoryview]) -> Transfer:
        """Return what moves blocks that lie one behind the other, from ``location`` on."""
        if self._padding:  # behind each block, where blocks are no whole pages
            buffers = [each for buffer in buffers for each in (buffer, self._padding)]
        region, slot = divmod(location, self.geometry.slots)
        return Transfer(region, self.geometry.slot_at(slot), list(buffers))
