"""Opens regions: writes their headers, and keeps the tables of those being written.

A region's bytes are allocated before its first header is written. The next regions
get their headers while the open one still has room, so no store waits for that.

# Invariant: a header is written only by whoever holds ``lock``. Checked: write_header,
#            what_the_index_names_is_whole_on_the_disk_unless_the_disk_lost_it.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import ID_BYTES, PAGE_BYTES, TAG_BYTES, encode_header
from kvtier_backends.disk.log.calls import begin
from kvtier_backends.disk.log.tables import PagePool, RegionTable, new_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.backend import Outcome
    from kvtier_backends.disk.log.calls import Calls
    from kvtier_backends.disk.log.context import LogContext
    from kvtier_backends.disk.log.region_faults import RegionFaults


class RegionOpener:
    """Opens free regions for blocks. Event loop only.

    ``lock`` is held while a header is written. While another caller holds it, no
    region is opened.
    """

    def __init__(self, context: LogContext, faults: RegionFaults, calls: Calls) -> None:
        self.lock = asyncio.Lock()
        self._context = context
        self._regions = context.regions
        self._faults = faults
        self._calls = calls
        self._tables: dict[int, RegionTable] = {}  # of regions being written
        self._pages = PagePool()
        self._opened_ahead_in: int | None = None  # the region that was open at the last attempt
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the folder has vanished: no region is opened and no block is appended."""
        return self._is_closed

    def close(self) -> None:
        """Open no more regions."""
        self._is_closed = True

    def table(self, region: int) -> RegionTable:
        """Return the table of a region that is being written."""
        return self._tables[region]

    def close_table(self, region: int, table: RegionTable) -> None:
        """Close a region's table if the region's last writer has ended."""
        if self._tables.get(region) is table and self._regions.is_written(region):
            del self._tables[region]
            table.close()

    async def open(self, regions: Sequence[int]) -> OSError | None:
        """Give free regions new headers, so that they take blocks, one after the other.

        All headers at once: each waits at the disk for other writes there. The caller holds
        ``lock``. Returns the problem with the first; a caller that needs another meets its own.
        """
        incarnations = [os.urandom(ID_BYTES) for _ in regions]
        written = [
            begin(self.write_header(region, incarnation))
            for region, incarnation in zip(regions, incarnations, strict=True)
        ]
        await asyncio.wait(written)
        # They take blocks in the order of their sequences, whichever was written first: that
        # order shows a later start what is older.
        problems = [
            self._headed(region, incarnation, *header.result())
            for region, incarnation, header in zip(regions, incarnations, written, strict=True)
        ]
        return problems[0]

    def _headed(
        self, region: int, incarnation: bytes, sequence: int, problem: OSError | None
    ) -> OSError | None:
        """Have a region take blocks, if its header was written. Return the problem otherwise."""
        context = self._context
        if problem is not None:
            return problem
        table = RegionTable(
            context.device,
            region,
            incarnation,
            context.geometry,
            self._pages,
            tag_bytes=TAG_BYTES if context.index.encrypted else 0,
            on_written=self._count_overhead,
        )
        self._faults.write_succeeded()
        context.index.release(region)
        self._regions.headed(region, sequence, context.identity.key_id)
        self._tables[region] = table
        return None

    def may_open_ahead(self) -> bool:
        """Return whether no attempt was made yet since the open region was opened."""
        return self._regions.open_region != self._opened_ahead_in

    def open_ahead(self) -> None:
        """Begin to open the next regions, once per open region."""
        if self.may_open_ahead():
            self._opened_ahead_in = self._regions.open_region
            self._calls.start(self._open_ahead())

    async def _open_ahead(self) -> None:
        async with self.lock:
            if self._is_closed:
                return
            regions = self._regions.next_to_open_ahead()
            if regions:
                await self.open(regions)

    async def probe(self) -> Outcome | None:
        """Write one header to test whether writing works; return None if it does.

        Otherwise returns the outcome of the waiting store. The caller holds ``lock``.
        """
        region = self._faults.region_to_probe()
        if region is None:
            self._faults.end_doubt()  # only a reclaimed region can show it
            return None
        return self._faults.probed(region, await self.rewrite_header(region))

    async def rewrite_header(self, region: int) -> OSError | None:
        """Write a header into a region without blocks, without opening it. Return the problem.

        The caller holds ``lock``.
        """
        _, problem = await self.write_header(region, os.urandom(ID_BYTES))
        return problem

    async def write_header(self, region: int, incarnation: bytes) -> tuple[int, OSError | None]:
        """Write the header of a region without blocks; return its sequence, and the problem.

        The caller holds ``lock``.
        """
        assert self.lock.locked(), "a header is written without the lock"
        assert not self._context.index.live(region), "a header is written over blocks"
        context = self._context
        sequence, now_s = self._regions.next_sequence(), context.now_s()
        header = new_header(
            context.identity, context.geometry, region, sequence, incarnation, now_s
        )
        if not self._regions.is_allocated(region):
            try:
                await context.device.allocate(region)
            except OSError as no_room:
                return sequence, no_room
            self._regions.note_allocated(region)
        page = self._pages.borrow()
        page[:] = encode_header(header)
        problem = await context.device.write([Transfer(region, 0, [page])])
        self._pages.give_back([page])
        assert self.lock.locked(), "the lock was released while a header was written"
        if problem is None:
            self._count_overhead(PAGE_BYTES)
        return sequence, problem

    def _count_overhead(self, size: int) -> None:
        """Count bytes of headers and tables."""
        self._context.budget.spend(size)
        self._context.counters.add("bytes_of_tables", size)
