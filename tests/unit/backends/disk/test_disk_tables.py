"""The table of a region keeps every entry that was acknowledged, whichever write is torn."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings, strategies

from kvtier_backends.disk.format import (
    PAGE_BYTES,
    Entry,
    PageRefused,
    RegionGeometry,
    decode_table_untrusted,
    entries_untrusted,
    records_max,
)
from kvtier_backends.disk.log.tables import PagePool, RegionTable
from tests.support.examples import examples
from tests.unit.backends.disk._simulated import SimulatedDevice, SimulatedDisk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.disk.device import Transfer

pytestmark = pytest.mark.anyio
INCARNATION = b"i" * 16
KEY_BYTES = 255  # few records a page, so that pages fill up
PER_PAGE = records_max(KEY_BYTES, 0)


def entries_in(raw: bytes | bytearray) -> set[int]:
    """Return the slots of all entries in the sound pages of a table."""
    found: set[int] = set()
    for at in range(PAGE_BYTES, len(raw), PAGE_BYTES):
        try:
            table = decode_table_untrusted(bytes(raw[at : at + PAGE_BYTES]), INCARNATION)
        except PageRefused:
            continue
        found.update(entry.slot for entry in entries_untrusted(table, 1 << 30))
    return found


class TearingDevice(SimulatedDevice):
    """Looks at the disk as it would be if each write were torn, before it lets it through."""

    acknowledged: set[int]
    fails_at: int | None = None  #: this transfer of the next call

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        fails_at, self.fails_at = self.fails_at, None
        for number, transfer in enumerate(transfers):
            if number == fails_at:
                return OSError(errno.EIO, "sick")
            torn = bytearray(self.disk.bytes[0])
            torn[transfer.at : transfer.at + 512] = transfer.buffers[0][:512]
            assert entries_in(torn) >= self.acknowledged
            await super().write([transfer])
        return None


def entry(slot: int) -> Entry:
    return Entry(slot, 1, slot.to_bytes(2, "big").ljust(KEY_BYTES, b"k"), bytes(16), b"")


def table_on(
    device: SimulatedDevice,
    places: int,
    *,
    own_page_slots: int = 1 << 16,
    wrote: list[int] | None = None,
) -> RegionTable:
    """Return a table with so many places for pages."""
    geometry = RegionGeometry(0, PAGE_BYTES, PAGE_BYTES, 1 << 16, places, own_page_slots)
    said = ([] if wrote is None else wrote).append
    return RegionTable(device, 0, INCARNATION, geometry, PagePool(), tag_bytes=0, on_written=said)


async def put(table: RegionTable, device: SimulatedDevice, slots: range) -> OSError | None:
    """Have a table take entries as the log does, but for the blocks."""
    entries = [entry(slot) for slot in slots]
    pages = table.own_pages(entries)
    if not pages:
        return await table.add(entries)
    try:
        return await device.write(pages)
    finally:
        table.free(pages)


@settings(max_examples=examples(60))
@given(
    strategies.lists(
        strategies.lists(
            strategies.tuples(
                strategies.integers(1, 5 * PER_PAGE), strategies.none() | strategies.integers(0, 3)
            ),
            min_size=1,
            max_size=3,
        ),
        max_size=12,
    ),
    strategies.integers(1, 5 * PER_PAGE),
    strategies.integers(0, 99),
)
def test_no_write_that_is_torn_or_fails_takes_an_entry_that_was_acknowledged(
    rounds: list[list[tuple[int, int | None]]], own_page_slots: int, seed: int
) -> None:
    async def run() -> None:
        adds = [add for together in rounds for add in together]
        failures = sum(fails_at is not None for _, fails_at in adds)
        # A write that failed may leave the places behind that it was to go to.
        places = sum(-(-size // PER_PAGE) for size, _ in adds) + 8 * failures + 1
        device = TearingDevice(SimulatedDisk(1, (1 + places) * PAGE_BYTES, seed))
        device.acknowledged = set()
        wrote: list[int] = []
        table = table_on(device, places, own_page_slots=own_page_slots, wrote=wrote)
        slot = 0

        async def put_some(slots: range, *, may_fail: bool) -> None:
            problem = await put(table, device, slots)
            if problem is None:
                device.acknowledged.update(slots)
            else:
                assert may_fail

        for together in rounds:
            may_fail = any(fails_at is not None for _, fails_at in together)
            async with anyio.create_task_group() as tasks:
                for size, fails_at in together:
                    device.fails_at = fails_at
                    put_slots = partial(put_some, range(slot, slot + size), may_fail=may_fail)
                    tasks.start_soon(put_slots)
                    slot += size
        device.fails_at = None
        found = entries_in(device.disk.bytes[0])
        assert device.acknowledged <= found <= set(range(slot))
        assert sum(wrote) % PAGE_BYTES == 0

    asyncio.run(run())


@settings(max_examples=examples(40))
@given(
    strategies.lists(strategies.integers(1, 5 * PER_PAGE), max_size=25),
    strategies.integers(1, 5 * PER_PAGE),
    strategies.booleans(),
)
def test_a_region_has_places_for_all_pages_of_its_table(
    sizes: list[int], own_page_slots: int, at_once: bool
) -> None:
    async def run() -> None:
        slots = sum(sizes)
        places = -(-slots // PER_PAGE) + 1 + slots // own_page_slots
        device = SimulatedDevice(SimulatedDisk(1, (1 + places) * PAGE_BYTES, 0))
        table = table_on(device, places, own_page_slots=own_page_slots)
        ends: list[OSError | None] = []

        async def put_some(slots: range) -> None:
            ends.append(await put(table, device, slots))

        slot = 0
        async with anyio.create_task_group() as tasks:
            for size in sizes:
                some = range(slot, slot + size)
                slot += size
                if at_once:
                    tasks.start_soon(put_some, some)
                else:
                    await put_some(some)
        assert ends == [None] * len(sizes)
        assert entries_in(device.disk.bytes[0]) == set(range(slot))

    asyncio.run(run())


async def test_many_entries_have_pages_of_their_own_where_there_is_room() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 5 * PAGE_BYTES, 0))
    wrote: list[int] = []
    table = table_on(device, 4, own_page_slots=PER_PAGE + 1, wrote=wrote)
    assert table.own_pages([entry(slot) for slot in range(PER_PAGE)]) == []
    own = table.own_pages([entry(slot) for slot in range(PER_PAGE + 1)])
    assert [(page.at, page.size) for page in own] == [
        (2 * PAGE_BYTES, PAGE_BYTES),
        (3 * PAGE_BYTES, PAGE_BYTES),
    ]
    assert wrote == [2 * PAGE_BYTES]
    others = [entry(slot) for slot in range(PER_PAGE + 1, 2 * PER_PAGE + 2)]
    assert table.own_pages(others) == [], "there is one place besides the shared page's"
    assert await table.add(others) is None


async def test_pages_that_were_given_back_serve_again() -> None:
    pool = PagePool()
    pages = [pool.borrow() for _ in range(100)]
    assert {page.nbytes for page in pages} == {PAGE_BYTES}
    pool.give_back(pages)
    assert {id(pool.borrow()) for _ in range(100)} == {id(page) for page in pages}


async def test_stores_that_end_together_share_a_page_write() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    wrote: list[int] = []
    table = table_on(device, 3, wrote=wrote)
    async with anyio.create_task_group() as tasks:
        for slot in range(PER_PAGE):
            tasks.start_soon(table.add, [entry(slot)])
    assert entries_in(device.disk.bytes[0]) == set(range(PER_PAGE))
    assert len(wrote) == 2


async def test_a_full_table_says_so() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    table = table_on(device, 2)
    assert await table.add([entry(slot) for slot in range(PER_PAGE)]) is None
    problem = await table.add([entry(slot) for slot in range(PER_PAGE, 3 * PER_PAGE)])
    assert isinstance(problem, OSError)
