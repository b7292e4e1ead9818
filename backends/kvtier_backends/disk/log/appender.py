"""Appends blocks to the open region: new ones, and those reinserted by a reclaim.

Stores take the available room at once, extent by extent. A store without room opens
the next region, or makes room by a reclaim. Reinserted blocks never wait for a reclaim:
one region is kept back for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.log.batches import AppendBatch
from kvtier_backends.disk.log.regions import Extent, RegionState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence

    from kvtier_backends.disk.device import Transfer
    from kvtier_backends.disk.log.batches import Reinsertion
    from kvtier_backends.disk.log.calls import Calls
    from kvtier_backends.disk.log.context import LogContext
    from kvtier_backends.disk.log.load_priority import LoadPriority
    from kvtier_backends.disk.log.region_faults import RegionFaults
    from kvtier_backends.disk.log.region_opening import RegionOpener

    MakeRoom = Callable[[], Awaitable[Outcome]]
    OpenAhead = Callable[[], object]


class BlockAppender:
    """Writes blocks, then their table entries, then adds them to the index. Event loop only."""

    def __init__(
        self,
        context: LogContext,
        opener: RegionOpener,
        faults: RegionFaults,
        priority: LoadPriority,
        calls: Calls,
    ) -> None:
        self._context = context
        self._regions = context.regions
        self._opener = opener
        self._faults = faults
        self._priority = priority
        self._calls = calls
        self._appending = 0
        self._reserved = 0

    @property
    def appending(self) -> int:
        """Number of new blocks on their way into the index."""
        return self._appending

    def reserve(self, slots: int) -> None:
        """Keep this many of the last slots for reinserted blocks, replacing any earlier number."""
        self._reserved = slots

    async def append(
        self, batch: AppendBatch, make_room: MakeRoom, open_ahead: OpenAhead
    ) -> list[Outcome]:
        """Append new blocks; one outcome per block.

        ``make_room`` reclaims a region. ``open_ahead`` is called each time slots have been
        allocated, before anything is written to them.
        """
        self._appending += len(batch.keys)
        return await self._append(batch, make_room, open_ahead)

    async def reinsert(self, items: Sequence[Reinsertion]) -> list[Outcome]:
        """Append blocks of the log again, as far as there is room; one outcome per block."""
        return await self._append(AppendBatch.reinserted(items), None)

    async def _append(
        self,
        batch: AppendBatch,
        make_room: MakeRoom | None,
        open_ahead: OpenAhead = lambda: None,
    ) -> list[Outcome]:
        """Write blocks extent by extent, all extents at once."""
        writes: list[asyncio.Future[list[Outcome]]] = []
        ends: list[Outcome] = []
        at, count = 0, len(batch.keys)
        while at < count:
            extent: Extent | Outcome | None = None
            try:
                extent = await self._allocate(count - at, make_room)
            finally:
                if not isinstance(extent, Extent) and make_room is not None:
                    self._appending -= count - at
            if isinstance(extent, Outcome):
                ends = [extent] * (count - at)
                break
            open_ahead()
            cut = batch.cut(at, at + extent.slots)
            at += extent.slots
            if at < count:
                writes.append(self._calls.start(self._write(extent, cut)))
            else:  # Usually the only one: it needs no task of its own.
                ends = await self._write(extent, cut)
        return [outcome for write in writes for outcome in await write] + ends

    async def _write(self, extent: Extent, batch: AppendBatch) -> list[Outcome]:
        """Write one extent's blocks, then their entries, then add them to the index."""
        context, region = self._context, extent.region
        table = self._opener.table(region)
        first, count = region * context.geometry.slots + extent.first, len(batch.keys)
        pages: list[Transfer] = []
        try:
            entries = batch.entries(extent.first)
            pages = table.own_pages(entries)
            async with self._priority.store():
                blocks = context.transfer(first, batch.buffers)
                problem = await context.device.write([blocks, *pages])
            if problem is None and not pages:
                problem = await table.add(entries)
            if problem is not None:
                return [self._faults.store_failed(region, problem)] * count
            if self._opener.is_closed or self._regions.state(region) is RegionState.RETIRED:
                return [Outcome.FAILED] * count
            self._count_bytes(count * context.geometry.stride, batch)
            batch.put_into(context.index, first)
            self._faults.write_succeeded()
            context.incidents.success("store", is_full=self._faults.is_full)
            return [Outcome.DONE] * count
        finally:
            if not batch.is_reinserted:
                self._appending -= count
            self._regions.written(extent)
            table.free(pages)
            self._opener.close_table(region, table)

    def _count_bytes(self, size: int, batch: AppendBatch) -> None:
        if batch.is_reinserted:
            self._context.budget.spend(size)
            self._context.counters.add("bytes_reinserted", size)
        else:
            self._context.budget.earn(size)
            self._context.counters.add("bytes_stored", size)

    async def _allocate(self, count: int, make_room: MakeRoom | None) -> Extent | Outcome:
        """Return up to ``count`` slots to write to, or FULL or FAILED."""
        regions, opener = self._regions, self._opener
        for_reinsertion = make_room is None
        while not opener.is_closed:
            if room := self._room(for_reinsertion=for_reinsertion):
                return regions.allocate(min(count, room))  # Usually there is nothing to wait for.
            async with opener.lock:
                if room := self._room(for_reinsertion=for_reinsertion):
                    return regions.allocate(min(count, room))
                refusal = await opener.probe() if self._faults.in_doubt else None
                region = regions.next_to_open(for_reinsertion=for_reinsertion)
                if refusal is None and region is not None:
                    # Open others with it, or stores would wait again for each.
                    others = [] if for_reinsertion else regions.next_to_open_ahead()[1:]
                    problem = await opener.open([region, *others])
                    if problem is None:
                        continue
                    refusal = self._faults.open_failed(region, problem)
                    if refusal is None:
                        continue
                if refusal is not None:
                    return refusal
            if make_room is None:
                return Outcome.FULL
            end = await make_room()
            if end is not Outcome.DONE and not regions.room:
                return end
        return Outcome.FAILED

    def _room(self, *, for_reinsertion: bool) -> int:
        """Return how many slots may be allocated now. The reserved ones are the last."""
        regions = self._regions
        room = regions.room
        if for_reinsertion or not self._reserved or regions.has_next or regions.free_count:
            return room
        return max(0, room - self._reserved)
