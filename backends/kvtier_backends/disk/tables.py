"""Writes the table of one open region: whoever waits together is written together.

A page holds all entries since it was begun. It is written to a place that
holds nothing newer than what its last version holds, so there is always one
whole version of it: ``_spare`` is that place, and the two change roles.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from typing import TYPE_CHECKING, NamedTuple

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import PAGE_BYTES, Geometry, RegionHeader, TableWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.format import EntryTuple


class Identity(NamedTuple):
    """What this engine writes into its regions' headers."""

    folder_id: bytes
    namespace: bytes
    key_id: bytes


def new_header(
    identity: Identity,
    geometry: Geometry,
    region: int,
    sequence: int,
    incarnation: bytes,
    created_s: int,
) -> RegionHeader:
    """Return the header of a region that is opened now."""
    return RegionHeader(
        folder_id=identity.folder_id,
        incarnation=incarnation,
        namespace=identity.namespace,
        key_id=identity.key_id,
        number=region,
        sequence=sequence,
        block_bytes=geometry.block_bytes,
        stride=geometry.stride,
        slots=geometry.slots,
        table_pages=geometry.table_pages,
        created_s=created_s,
    )


def new_page() -> memoryview:
    """Return a page that may be written with O_DIRECT."""
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


class RegionTable:
    """The table of one region, from its opening on. Event loop only."""

    def __init__(
        self,
        device: Device,
        region: int,
        incarnation: bytes,
        pages: int,
        page: memoryview,
        *,
        seal_bytes: int,
        wrote: Callable[[int], None],
    ) -> None:
        """Write from ``page``, which is free again when no entry is being added any more.

        ``wrote`` is told how many bytes each page write took.
        """
        self.page = page
        self.incarnation = incarnation
        self._device = device
        self._region = region
        self._pages = pages
        self._writer = TableWriter(incarnation, seal_bytes)
        self._wrote = wrote
        self._spare = 0  # where the next version of the page goes
        self._next = 1  # the first place never used
        self._head: int | None = None  # where the page's last version lies
        self._waiting: list[tuple[Sequence[EntryTuple], asyncio.Future[OSError | None]]] = []
        self._is_writing = False

    async def add(self, entries: Sequence[EntryTuple]) -> OSError | None:
        """Return once these entries are in the table, or what failed."""
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, done))
        if not self._is_writing:
            self._is_writing = True
            try:
                while self._waiting:
                    await self._write_waiting()
            finally:
                self._is_writing = False
        return await done

    async def _write_waiting(self) -> None:
        taken, self._waiting = self._waiting, []
        problem: OSError | None = OSError(errno.ECANCELED, "the table was not written")
        try:
            problem = await self._write([entry for entries, _ in taken for entry in entries])
        finally:
            for _, done in taken:
                if not done.done():
                    done.set_result(problem)

    async def _write(self, entries: Sequence[EntryTuple]) -> OSError | None:
        while entries:
            count = self._writer.fitting(entries)
            if count == 0:
                self._writer.start_page()
                self._head = None
                continue
            self._writer.add(entries[:count])
            problem = await self._write_page()
            if problem is not None:
                return problem
            entries = entries[count:]
        return None

    async def _write_page(self) -> OSError | None:
        if self._spare >= self._pages:
            return OSError(errno.EFBIG, "the region's table is full: its keys are very long")
        self.page[:] = self._writer.encode()
        at = (1 + self._spare) * PAGE_BYTES
        (problem,) = await self._device.write([Transfer(self._region, at, [self.page])])
        if problem is not None:
            return problem
        self._wrote(PAGE_BYTES)
        if self._head is None:
            self._head, self._spare = self._spare, self._next
            self._next += 1
        else:
            self._head, self._spare = self._spare, self._head
        return None
