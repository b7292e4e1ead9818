"""Reclaims regions: reinserts blocks as far as budget and room allow, and drops the rest.

Nothing is dropped before the blocks that stay have been read and written: if the
medium fails meanwhile, the region keeps its blocks, and is sealed as before.

The least recently used blocks are dropped; of blocks used at once, the
tail goes before the head, because a prompt's block is useless without those
before it. Blocks that are removed, or stored again, while they are being reinserted
stay as they are. (Log-structured file systems call this cleaning: Rosenblum and
Ousterhout, 1992. CacheLib's navy reclaims and reinserts regions as well.)
"""

from __future__ import annotations

import asyncio
import mmap
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.format import PAGE_BYTES
from kvtier_backends.disk.log.batches import Reinsertion
from kvtier_backends.disk.log.regions import RegionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.disk.log.appender import BlockAppender
    from kvtier_backends.disk.log.calls import Calls
    from kvtier_backends.disk.log.context import LogContext
    from kvtier_backends.disk.log.live_blocks import LiveBlocks
    from kvtier_backends.disk.log.reader import BlockReader
    from kvtier_backends.disk.log.region_faults import RegionFaults

BATCH_BYTES: Final = 2 << 20
READERS_WAIT_S_MAX: Final = 1.0
VICTIM_SEARCHES_PER_REGION: Final = 4
_READERS_POLL_S: Final = 0.005


class Reclaimer:
    """Makes room in a log, one region at a time. Event loop only."""

    def __init__(
        self,
        context: LogContext,
        live: LiveBlocks,
        reader: BlockReader,
        appender: BlockAppender,
        faults: RegionFaults,
        calls: Calls,
    ) -> None:
        self._context = context
        self._index = context.index
        self._regions = context.regions
        self._live = live
        self._reader = reader
        self._appender = appender
        self._faults = faults
        self._calls = calls
        self._running: asyncio.Future[Outcome] | None = None
        self._search_at_room = 0  # with this much room left, a victim is searched for
        self._searched_in: tuple[int | None, int] = (None, 0)  # the open region, and its quarter

    async def make_room(self) -> Outcome:
        """Reclaim a region, once for all callers that want room.

        FULL: there is none to reclaim, or it is still being read. FAILED: it is kept.
        """
        if self._running is None or self._running.done():
            self._begin(self._victim())
            self.reclaim_dead()
        assert self._running is not None
        return await asyncio.shield(self._running)

    def reclaim_ahead(self) -> None:
        """Begin to reclaim a region before a store has to wait for it, if no block is dropped."""
        regions = self._regions
        if regions.room > regions.slots // 2:
            self._search_at_room = regions.slots // 2
        if regions.room > self._search_at_room:
            return
        # A search takes a while if there are many regions: don't search each time.
        step = regions.slots // VICTIM_SEARCHES_PER_REGION
        self._search_at_room = max(0, regions.room - step)
        if self._running is None or self._running.done():
            region = self._victim()
            if region is not None and self._index.live(region) <= self._affordable():
                self._begin(region)
                self.reclaim_dead()

    def may_search(self) -> bool:
        """Return whether to search for dead regions, and count it as done: a few times per region.

        A search checks all regions: after each batch of small blocks it took a third of the
        batch's own time.
        """
        regions = self._regions
        quarter = regions.room * VICTIM_SEARCHES_PER_REGION // regions.slots
        last, self._searched_in = self._searched_in, (regions.open_region, quarter)
        return last != self._searched_in

    def reclaim_dead(self) -> None:
        """Reclaim regions without blocks and readers, as many as may be opened next: no I/O."""
        regions = self._regions
        while len(regions.next_to_open_ahead()) < regions.ahead_missing:
            region = self._victim() if self._running is None or self._running.done() else None
            if region is None or self._index.live(region) or regions.is_read(region):
                return
            self._begin(region)

    def _begin(self, region: int | None) -> None:
        self._running = self._calls.start(self._reclaim(region))

    def _victim(self) -> int | None:
        return self._regions.victim(self._faults.suspects)

    def _affordable(self) -> int:
        """Return how many blocks may be reinserted now: by the budget, and by the room."""
        regions, stride = self._regions, self._context.geometry.stride
        batches = -(-regions.slots * stride // BATCH_BYTES)
        overhead_bytes = (batches + 2) * PAGE_BYTES  # a table page a batch, a header
        room = regions.room + regions.slots * (regions.next_count + (regions.free_count > 0))
        return min(room, self._context.budget.affords(stride, overhead_bytes))

    async def _reclaim(self, region: int | None) -> Outcome:
        """Reclaim a region, the victim; see ``make_room``."""
        regions = self._regions
        if region is None:
            return Outcome.FAILED if self._faults.suspects else Outcome.FULL
        regions.begin_reclaim(region)
        regions.pin(region)
        is_over = False
        try:
            is_over = await self._reinsert(self._choose(region))
        finally:
            if is_over:  # Blocks that could not be reinserted are lost.
                self._live.lose(self._index.keys_of(region), "blocks_dropped")
            elif self._index.live(region) and regions.state(region) is RegionState.RECLAIMING:
                regions.keep(region)
            regions.unpin(region)
        if not is_over:
            return Outcome.FAILED
        self._context.counters.add("regions_reclaimed")
        waited_s = 0.0
        while regions.state(region) is RegionState.RECLAIMING and waited_s < READERS_WAIT_S_MAX:
            await asyncio.sleep(_READERS_POLL_S)
            waited_s += _READERS_POLL_S
        is_free = regions.state(region) is RegionState.FREE
        return Outcome.DONE if is_free else Outcome.FULL

    def _choose(self, region: int) -> list[int]:
        """Return the locations of the blocks to reinsert, in order."""
        self._live.sweep(region)
        first = region * self._context.geometry.slots
        locations = [first + slot for slot in self._index.slots_of(region)]
        # Blocks under an older encryption key stay in the region that names it, and go with it.
        has_current_key = self._regions.key_id(region) == self._context.identity.key_id
        excess = len(locations) - (self._affordable() if has_current_key else 0)
        if excess > 0:
            # The blocks of a request usually lie in its order.
            by_use = sorted(locations, key=lambda at: (self._index.record(at).used_s, -at))
            locations = sorted(by_use[excess:])
        assert len(locations) <= self._affordable(), "more is reinserted than the budget affords"
        return locations

    async def _reinsert(self, locations: Sequence[int]) -> bool:
        """Reinsert blocks as far as there is room. False: the medium failed."""
        if not locations:
            return True
        block_bytes, stride = self._context.geometry.block_bytes, self._context.geometry.stride
        size = max(1, BATCH_BYTES // stride)
        memory = memoryview(mmap.mmap(-1, min(size, len(locations)) * stride))
        views = [memory[at : at + block_bytes] for at in range(0, len(memory), stride)]
        try:
            for start in range(0, len(locations), size):
                self._appender.reserve(len(locations) - start)
                batch = locations[start : start + size]
                ends = await self._reinsert_batch(batch, views[: len(batch)])
                if Outcome.FAILED in ends or (Outcome.FULL in ends and self._faults.in_doubt):
                    return False
                if Outcome.FULL in ends:
                    break
        finally:
            self._appender.reserve(0)
        return True

    async def _reinsert_batch(
        self, locations: Sequence[int], views: Sequence[memoryview]
    ) -> list[Outcome]:
        """Reinsert some blocks; return the outcomes of those that are not lost."""
        outcomes = await self._reader.read_at(locations, views)
        items = []
        for location, view, outcome in zip(locations, views, outcomes, strict=True):
            key = self._index.key_at(location)
            if key is not None and outcome is Outcome.DONE:
                items.append(Reinsertion(key, view, self._index.record(location), location))
        ends = await self._appender.reinsert(items)
        return [outcome for outcome in outcomes if outcome is Outcome.FAILED] + ends
