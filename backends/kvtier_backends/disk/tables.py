"""Writes the table of one open region: whoever waits together is written together.

A page holds all entries since it was begun. It is written to a place that
holds nothing newer than what its last version holds, so there is always one
whole version of it: ``_spare`` is that place, and the two change roles. Pages
that are begun while another waits to be written go to places of their own.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import PAGE_BYTES, Geometry, RegionHeader, TableWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.format import EntryTuple


PAGES_AT_ONCE: Final = 8
"""So many pages at most go in one call: entries of some hundred blocks."""


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


def new_pages(count: int) -> list[memoryview]:
    """Return pages that may be written with O_DIRECT."""
    memory = memoryview(mmap.mmap(-1, count * PAGE_BYTES))
    return [memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES)]


class RegionTable:
    """The table of one region, from its opening on. Event loop only."""

    def __init__(
        self,
        device: Device,
        region: int,
        incarnation: bytes,
        places: int,
        pages: Sequence[memoryview],
        *,
        seal_bytes: int,
        wrote: Callable[[int], None],
    ) -> None:
        """Write from ``pages``, to the ``places`` for pages that the region has.

        ``pages`` are free again when no entry is being added any more.
        ``wrote`` is told how many bytes each write took.
        """
        self.pages = pages
        self.incarnation = incarnation
        self._device = device
        self._region = region
        self._places = places
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
            old, places, count = self._encode(entries)
            if not places:
                return OSError(errno.EFBIG, "the region's table is full: its keys are very long")
            ends = await self._device.write(
                [
                    Transfer(self._region, (1 + place) * PAGE_BYTES, [page])
                    for place, page in zip(places, self.pages, strict=False)
                ]
            )
            problem = next((end for end in ends if end is not None), None)
            if problem is not None:
                return problem
            self._wrote(len(places) * PAGE_BYTES)
            self._head = places[-1]
            self._next += len(places) - 1
            if old is None:
                old, self._next = self._next, self._next + 1
            self._spare = old
            entries = entries[count:]
        return None

    def _encode(self, entries: Sequence[EntryTuple]) -> tuple[int | None, list[int], int]:
        """Put entries into as many pages as go in one call.

        Returns where the last version of the first page lies, None if it has
        none; where each page goes; and how many entries they have taken.
        """
        places: list[int] = []
        old, place, taken = self._head, self._spare, 0
        while taken < len(entries) and len(places) < len(self.pages) and place < self._places:
            count = self._writer.add(entries[taken:])
            if count == 0:
                self._writer.start_page()
                self._head = None  # and that holds if the write fails
                if not places:
                    old = None
                continue
            self.pages[len(places)][:] = self._writer.encode()
            places.append(place)
            place = self._next + len(places) - 1
            taken += count
        return old, places, taken
