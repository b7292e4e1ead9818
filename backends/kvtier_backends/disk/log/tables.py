"""Writes the table of one open region.

Many blocks that are written together have pages of their own, which go behind
them in the same call, so that no store waits for another. For few blocks that would
take too many pages. They share one, and entries that wait together are written
together. That page holds all entries since it was begun. It is written to a
place that holds nothing newer than its last version, so there is
always one whole version of it: ``_next_version`` is that place, and the two swap
roles. Pages that are begun while another waits to be written go to new places.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import PAGE_BYTES, RegionGeometry, RegionHeader, TableWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.format import EntryTuple

    _Waiting = tuple[Sequence[EntryTuple], asyncio.Future[OSError | None]]

PAGES_AT_ONCE: Final = 8
"""At most this many versions of shared pages go in one call: entries of some hundred blocks."""

POOL_GROWS_BY: Final = 32


class Identity(NamedTuple):
    """The values that this engine writes into its regions' headers."""

    folder_id: bytes
    namespace: bytes
    key_id: bytes
    description: bytes = b""


def new_header(
    identity: Identity,
    geometry: RegionGeometry,
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
        description=identity.description,
    )


class PagePool:
    """Reuses pages that may be written with O_DIRECT. Event loop only.

    Regions come and go, and unmapping a page interrupts all threads.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def borrow(self) -> memoryview:
        """Return a page with arbitrary contents."""
        if not self._free:
            memory = memoryview(mmap.mmap(-1, POOL_GROWS_BY * PAGE_BYTES))
            self._free = [memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES)]
        return self._free.pop()

    def give_back(self, pages: Iterable[memoryview]) -> None:
        """Keep pages for the next ``borrow``. No call may write them any more."""
        self._free += pages


class RegionTable:
    """The table of one region, from its opening on. Event loop only."""

    def __init__(
        self,
        device: Device,
        region: int,
        incarnation: bytes,
        geometry: RegionGeometry,
        pool: PagePool,
        *,
        tag_bytes: int,
        on_written: Callable[[int], None],
    ) -> None:
        """``on_written`` is called with the number of bytes of each write."""
        self.incarnation = incarnation
        self._device = device
        self._region = region
        self._places = geometry.table_pages
        self._own_page_slots = geometry.own_page_slots
        self._pool = pool
        self._tag_bytes = tag_bytes
        self._on_written = on_written
        self._pages = [pool.borrow() for _ in range(PAGES_AT_ONCE)]  # of the shared page's writes
        self._writer = TableWriter(incarnation, tag_bytes)
        self._next_version: int | None = 0  # the shared page's; None: there is no place for it
        self._first_unused = 1  # the first place never used
        self._head: int | None = None  # where the shared page's last version lies
        self._waiting: list[_Waiting] = []
        self._is_writing = False

    def close(self) -> None:
        """Release the pages. No entry is being added any more."""
        self._pool.give_back(self._pages)
        self._pages = []

    # --- pages of their own ---

    def own_pages(self, entries: Sequence[EntryTuple]) -> list[Transfer]:
        """Return pages of these entries alone, to be written behind their blocks, in order.

        There are none for few entries, or if the table has no room: then ``add``
        them. The pages are held until ``free``.
        """
        pages: list[Transfer] = []
        if len(entries) < self._own_page_slots:
            return pages
        writer, first = TableWriter(self.incarnation, self._tag_bytes), self._first_unused
        while entries:
            place = self._reserve()
            if place is None:
                self._first_unused = first
                self.free(pages)
                return []
            count = writer.add(entries)
            page = self._pool.borrow()
            page[:] = writer.encode()
            pages.append(self._transfer(place, page))
            writer.start_page()
            entries = entries[count:]
        self._on_written(len(pages) * PAGE_BYTES)
        return pages

    def free(self, pages: Sequence[Transfer]) -> None:
        """Release the pages that ``own_pages`` returned. No call may write them any more."""
        self._pool.give_back(page for transfer in pages for page in transfer.buffers)

    # --- the shared page ---

    async def add(self, entries: Sequence[EntryTuple]) -> OSError | None:
        """Wait until these entries are in the table. Return the problem, None if there is none."""
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, done))
        if not self._is_writing:
            self._is_writing = True
            try:
                while self._waiting:
                    await self._write_waiting()
            finally:
                self._is_writing = False
                waiting, self._waiting = self._waiting, []  # entries that came while a write failed
                _answer(waiting, _not_written())
        return await done

    async def _write_waiting(self) -> None:
        written, self._waiting = self._waiting, []
        problem: OSError | None = _not_written()
        try:
            problem = await self._write([entry for entries, _ in written for entry in entries])
        finally:
            _answer(written, problem)

    async def _write(self, entries: Sequence[EntryTuple]) -> OSError | None:
        while entries:
            old, places, count = self._encode(entries)
            if not places:
                return OSError(errno.EFBIG, "the region's table is full: its keys are very long")
            problem = await self._device.write(list(map(self._transfer, places, self._pages)))
            if problem is not None:
                return problem
            self._on_written(len(places) * PAGE_BYTES)
            self._head = places[-1]
            self._next_version = self._reserve() if old is None else old
            entries = entries[count:]
        return None

    def _encode(self, entries: Sequence[EntryTuple]) -> tuple[int | None, list[int], int]:
        """Put entries into as many pages as go in one call.

        Returns the place of the first page's last version, None if it has
        none; the place of each page; and how many entries they have.
        """
        places: list[int] = []
        old, place, count = self._head, self._next_version, 0
        while count < len(entries) and place is not None:
            added = self._writer.add(entries[count:])
            if added == 0:
                self._writer.start_page()
                self._head = None  # and that holds if the write fails
                if not places:
                    old = None
                continue
            self._pages[len(places)][:] = self._writer.encode()
            places.append(place)
            count += added
            is_more = count < len(entries) and len(places) < len(self._pages)
            place = self._reserve() if is_more else None
        return old, places, count

    def _reserve(self) -> int | None:
        """Return a place never used, None if there is none."""
        if self._first_unused == self._places:
            return None
        self._first_unused += 1
        return self._first_unused - 1

    def _transfer(self, place: int, page: memoryview) -> Transfer:
        return Transfer(self._region, (1 + place) * PAGE_BYTES, [page])


def _answer(waiting: Sequence[_Waiting], problem: OSError | None) -> None:
    """Set the result that the callers wait for."""
    for _, done in waiting:
        if not done.done():
            done.set_result(problem)


def _not_written() -> OSError:
    return OSError(errno.ECANCELED, "the table was not written")
