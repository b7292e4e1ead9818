"""The log of blocks: appends to the open region, reads from any, empties the emptiest.

Everything here runs on one event loop; only the device's calls are waited for.
Each call is a task of its own that a cancelled caller leaves behind: what it
holds (slots being written, regions being read) is let go when the device is
done with it, and not before.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.backend import Outcome
from kvtier.errors import Misuse
from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.emptier import affordable, empty_one
from kvtier_backends.disk.format import (
    ID_BYTES,
    KEY_BYTES_MAX,
    NO_KEY_ID,
    PAGE_BYTES,
    SEAL_BYTES,
    Entry,
    Geometry,
    encode_header,
)
from kvtier_backends.disk.index import Known
from kvtier_backends.disk.regions import RegionState
from kvtier_backends.disk.runs import neighbours
from kvtier_backends.disk.tables import Identity, RegionTable, new_header
from kvtier_backends.disk.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from kvtier.backend import LoadBlock, StoreBlock
    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.index import BlockIndex
    from kvtier_backends.disk.regions import Budget, Extent, Regions
    from kvtier_backends.ledger import Ledger

T = TypeVar("T")

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
SICK_MEDIUM: Final = frozenset({errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.ENODATA})
"""Errors that speak of one place on the medium: its region is retired."""

NO_ROOM_PAUSE_S: Final = 30.0
RETIRED_PAUSE_S: Final = 300.0


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


class Found(NamedTuple):
    """What a load brought, and with which of the engine's keys it is encrypted."""

    outcome: Outcome
    digest: bytes = b""
    seal: bytes = b""
    key_id: bytes = NO_KEY_ID


class Item(NamedTuple):
    """One block to append."""

    key: bytes
    buffer: memoryview
    known: Known
    source: int | None = None  #: where it is now, if it is appended again


class BlockLog:
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
        self.device = space.device
        self.index = space.index
        self.regions = space.regions
        self.geometry = space.geometry
        self.budget = space.budget
        self.ledger = ledger
        self.lost = lost
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
        self._emptying: asyncio.Task[bool] | None = None
        self._appending = 0  # blocks that are on their way into the index
        self._tasks: set[asyncio.Task[Any]] = set()
        self._retry_at: dict[int, float] = {}
        self._padding = memoryview(mmap.mmap(-1, PAGE_BYTES))[
            : self.geometry.stride - self.geometry.block_bytes
        ]

    # --- what the backend asks for ---

    async def load(self, blocks: Sequence[LoadBlock]) -> list[Found]:
        """Read each block into its buffer; one answer a block, in order."""
        return await self.shielded(self._load(blocks))

    async def store(
        self, blocks: Sequence[StoreBlock], seals: Sequence[bytes] = ()
    ) -> list[Outcome]:
        """Append the blocks that are not there yet; one outcome a block, in order.

        ``seals`` go with encrypted blocks, one each.
        """
        return await self.shielded(self._store(blocks, seals or [b""] * len(blocks)))

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forget these keys; returns how many were there."""
        return sum(self.index.remove(key) is not None for key in keys)

    def has(self, key: bytes) -> bool:
        """Tell whether a load would find the key. No I/O."""
        location = self.index.get(key)
        return location is not None and not self.is_expired(self.index.known(location))

    def lose(self, keys: Sequence[bytes], name: str) -> None:
        """Forget keys for a reason of the log's own: counted under ``name``, and told."""
        gone = [key for key in keys if self.index.remove(key) is not None]
        if gone:
            self.ledger.add(name, len(gone))
            self.lost(gone)

    def sweep(self, region: int) -> None:
        """Forget a region's blocks that are older than ``ttl_s``."""
        if self._ttl_s:
            before_s = int(self._clock()) - self._ttl_s
            self.lose(self.index.stored_before(region, before_s), "blocks_expired")

    def revive(self) -> None:
        """Give retired regions whose pause is over another try."""
        now = self._clock()
        for region in [region for region, at in self._retry_at.items() if at <= now]:
            if self.regions.revive(region):
                del self._retry_at[region]

    def is_idle(self) -> bool:
        """Tell whether no call runs, cancelled ones included."""
        return not self._tasks

    async def wait_idle(self) -> None:
        """Return once no call runs any more."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def shielded(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end, also when the caller is cancelled."""
        return await asyncio.shield(self.start(call))

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a call as a task of its own."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- loads ---

    async def _load(self, blocks: Sequence[LoadBlock]) -> list[Found]:
        answers = [Found(Outcome.ABSENT)] * len(blocks)
        wanted = []
        now_s = int(self._clock())
        for place, block in enumerate(blocks):
            self._check_buffer(block.buffer)
            location = self.index.get(block.key)
            if location is None:
                continue
            known = self.index.known(location)
            if self.is_expired(known):
                self.lose([block.key], "blocks_expired")
                continue
            self.index.use(location, now_s)
            key_id = self.key_ids.get(location // self.geometry.slots, NO_KEY_ID)
            answers[place] = Found(Outcome.DONE, known.digest, known.seal, key_id)
            wanted.append((location, place))
        if wanted:
            with self._turns.load():
                outcomes = await self.read_at([(at, blocks[place].buffer) for at, place in wanted])
            for (_, place), outcome in zip(wanted, outcomes, strict=True):
                if outcome is not Outcome.DONE:
                    answers[place] = Found(outcome)
        return answers

    async def read_at(self, wanted: Sequence[tuple[int, memoryview]]) -> list[Outcome]:
        """Read blocks at locations into buffers: neighbours in one transfer."""
        runs = neighbours([location for location, _ in wanted], self.geometry.slots)
        transfers = [
            self._transfer(wanted[run[0]][0], [wanted[place][1] for place in run]) for run in runs
        ]
        pinned = {transfer.region for transfer in transfers}
        for region in pinned:
            self.regions.pin(region)
        try:
            ends = await self.device.read(transfers)
        finally:
            for region in pinned:
                self.regions.unpin(region)
        outcomes = [Outcome.FAILED] * len(wanted)
        for run, transfer, end in zip(runs, transfers, ends, strict=True):
            for step, place in enumerate(run):
                outcomes[place] = self._judge_read(end, step)
            if isinstance(end, OSError):
                self._sick(transfer.region, end)
        return outcomes

    def _judge_read(self, end: int | OSError, step: int) -> Outcome:
        """Return what became of the ``step``-th block of a transfer."""
        if isinstance(end, OSError):
            self.ledger.trouble("load", "loads_failed", end)
            return Outcome.FAILED
        if end < step * self.geometry.stride + self.geometry.block_bytes:
            self.ledger.trouble(
                "load", "blocks_cut_off", "a segment file is shorter than its blocks"
            )
            return Outcome.DAMAGED
        self.ledger.success("load")
        return Outcome.DONE

    # --- stores ---

    async def _store(self, blocks: Sequence[StoreBlock], seals: Sequence[bytes]) -> list[Outcome]:
        outcomes: dict[bytes, Outcome] = {}
        items: dict[bytes, Item] = {}
        now_s = int(self._clock())
        for (key, buffer, digest), seal in zip(blocks, seals, strict=True):
            self._check_buffer(buffer)
            if not 0 < len(key) <= KEY_BYTES_MAX:
                raise Misuse(f"a key of {len(key)} bytes; keys have 1 to {KEY_BYTES_MAX} bytes.")
            location = self.index.get(key)
            if location is not None and self.is_expired(self.index.known(location)):
                self.lose([key], "blocks_expired")
                location = None
            if location is None:
                items.setdefault(key, Item(key, buffer, Known(digest, now_s, now_s, seal)))
            else:
                outcomes[key] = Outcome.DONE
        room = max(0, self._capacity_blocks - len(self.index) - self._appending)
        fits = list(items.values())[:room]
        outcomes.update((key, Outcome.FULL) for key in list(items)[room:])
        if fits:
            self._appending += len(fits)
            ends = await self.append(fits, again=False)
            outcomes.update((item.key, end) for item, end in zip(fits, ends, strict=True))
            self._empty_ahead()
        answers = [outcomes[block.key] for block in blocks]
        if Outcome.FULL in answers:
            self.ledger.add("stores_full", answers.count(Outcome.FULL))
        return answers

    # --- appending ---

    async def append(self, items: Sequence[Item], *, again: bool) -> list[Outcome]:
        """Write blocks where there is room. ``again``: they are in the log already."""
        writes: list[asyncio.Task[list[Outcome]]] = []
        at, rest = 0, Outcome.DONE
        while at < len(items):
            extent = await self._take(len(items) - at, again=again)
            if isinstance(extent, Outcome):
                rest = extent
                if not again:
                    self._appending -= len(items) - at
                break
            part = items[at : at + extent.slots]
            writes.append(self.start(self._write(extent, part, again=again)))
            at += extent.slots
        outcomes = [outcome for write in writes for outcome in await write]
        return outcomes + [rest] * (len(items) - at)

    async def _write(self, extent: Extent, items: Sequence[Item], *, again: bool) -> list[Outcome]:
        """Write one extent's blocks, then their entries, then know them."""
        region, table = extent.region, self._tables[extent.region]
        first = region * self.geometry.slots + extent.first
        transfer = self._transfer(first, [item.buffer for item in items])
        entries = [
            Entry(slot, item.known.stored_s, item.key, item.known.digest, item.known.seal)
            for slot, item in enumerate(items, extent.first)
        ]
        try:
            async with self._turns.store():
                (problem,) = await self.device.write([transfer])
            if problem is None:
                problem = await table.add(entries)
            if problem is not None:
                return [self._store_failed(region, problem)] * len(items)
            if self.is_dead or self.regions.state(region) is RegionState.RETIRED:
                return [Outcome.FAILED] * len(items)
            self._count_bytes(transfer.size, again=again)
            for location, item in enumerate(items, first):
                self._know(item, location)
            self.ledger.success("store")
            return [Outcome.DONE] * len(items)
        finally:
            if not again:
                self._appending -= len(items)
            self.regions.written(extent)
            if self._tables.get(region) is table and self.regions.is_written(region):
                del self._tables[region]

    def _know(self, item: Item, location: int) -> None:
        """Put a block that is whole on the device into the index."""
        there = self.index.get(item.key)
        if there != item.source:
            return  # stored twice at once, or removed while it was appended again
        if there is not None:
            self.index.remove(item.key)
        self.index.insert(item.key, location, item.known)

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
            if self.regions.room and not self.opening.locked():
                return self.regions.take(count)  # as it mostly is: there is nothing to wait for
            async with self.opening:
                if self.regions.room:
                    return self.regions.take(count)
                region = self.regions.next_to_open(again=again)
                if region is not None:
                    problem = await self._open(region)
                    if problem is not None and not self._open_failed(region, problem):
                        return Outcome.FAILED
                    continue
            if again or not await self._make_room():
                return Outcome.FULL
        return Outcome.FAILED

    async def _make_room(self) -> bool:
        """Empty a region, together with whoever wants room as well."""
        if self._emptying is None or self._emptying.done():
            self._emptying = self.start(empty_one(self))
        return await asyncio.shield(self._emptying)

    def _empty_ahead(self) -> None:
        """Empty a region before a store has to wait for it, if nothing is lost by that."""
        regions = self.regions
        if regions.room > regions.slots // 2 or regions.next_to_open(again=False) is not None:
            return
        victim = regions.victim()
        if victim is None or not (self._emptying is None or self._emptying.done()):
            return
        if self.index.live(victim) <= affordable(self):
            self._emptying = self.start(empty_one(self))

    async def _open(self, region: int) -> OSError | None:
        """Give a free region a new header, and append to it from now on."""
        incarnation = os.urandom(ID_BYTES)
        sequence = self.regions.next_sequence()
        geometry = self.geometry
        header = new_header(
            self.identity, geometry, region, sequence, incarnation, int(self._clock())
        )
        try:
            await self._allocate(region)
        except OSError as no_room:
            return no_room
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        page[:] = encode_header(header)
        (problem,) = await self.device.write([Transfer(region, 0, [page])])
        if problem is not None:
            return problem
        self.count_overhead(PAGE_BYTES)
        self.index.release(region)
        self.regions.opened(region, sequence)
        self.key_ids[region] = self.identity.key_id
        self._tables[region] = RegionTable(
            self.device,
            region,
            incarnation,
            geometry.table_pages,
            seal_bytes=SEAL_BYTES if self.index.sealed else 0,
            wrote=self.count_overhead,
        )
        self.start(self._allocate_ahead())
        return None

    async def _allocate(self, region: int) -> None:
        if region not in self.allocated:
            await self.device.allocate(region)
            self.allocated.add(region)

    async def _allocate_ahead(self) -> None:
        """Allocate the region that is opened next, before a store has to wait for that."""
        region = self.regions.next_to_open(again=True)
        if region is not None:
            with suppress(OSError):  # whoever opens it meets the problem again
                await self._allocate(region)

    # --- trouble ---

    def _open_failed(self, region: int, problem: OSError) -> bool:
        """Take a region that cannot be opened out of the way. False: no other will do better."""
        if problem.errno in NO_ROOM:
            self.ledger.trouble("store", "no_room_for_a_region", problem)
            empty_handed = self.regions.retire_free(self.allocated | {region})
            self.regions.retire(region)
            retry_at = self._clock() + NO_ROOM_PAUSE_S
            self._retry_at.update(dict.fromkeys([*empty_handed, region], retry_at))
            return True
        self.ledger.trouble("store", "stores_failed", problem)
        if problem.errno not in SICK_MEDIUM:
            return False
        self._sick(region, problem)
        return True

    def _store_failed(self, region: int, problem: OSError) -> Outcome:
        if problem.errno in NO_ROOM:
            self.ledger.trouble("store", "no_room_for_a_block", problem)
            return Outcome.FULL
        if problem.errno == errno.EFBIG and self.regions.open_region == region:
            self.regions.fill()
        self.ledger.trouble("store", "stores_failed", problem)
        self._sick(region, problem)
        return Outcome.FAILED

    def _sick(self, region: int, problem: OSError) -> None:
        """Retire a region whose medium is sick; what it held is lost."""
        if problem.errno in SICK_MEDIUM and self.regions.retire(region):
            self.ledger.trouble("store", "regions_retired", problem)
            self._retry_at[region] = self._clock() + RETIRED_PAUSE_S
            self.lose(self.index.keys_of(region), "blocks_lost_with_a_region")

    # --- small things ---

    def item_again(self, key: bytes, buffer: memoryview, location: int) -> Item:
        """Return what it takes to append a block of the log again."""
        return Item(key, buffer, self.index.known(location), location)

    def is_expired(self, known: Known) -> bool:
        """Tell whether a block is older than ``ttl_s``."""
        return self._ttl_s > 0 and known.stored_s + self._ttl_s < self._clock()

    def has_current_key(self, region: int) -> bool:
        """Tell whether a region's blocks may go into a region that is opened now."""
        return self.key_ids.get(region, NO_KEY_ID) == self.identity.key_id

    def _check_buffer(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.geometry.block_bytes:
            raise Misuse(
                f"a buffer of {buffer.nbytes} bytes is no block of {self.geometry.block_bytes}. "
                "Hand in whole slots."
            )

    def _transfer(self, location: int, buffers: list[memoryview]) -> Transfer:
        """Return what moves blocks that lie one behind the other, from ``location`` on."""
        if self._padding:  # behind each block, where blocks are no whole pages
            buffers = [each for buffer in buffers for each in (buffer, self._padding)]
        region, slot = divmod(location, self.geometry.slots)
        return Transfer(region, self.geometry.slot_at(slot), buffers)
