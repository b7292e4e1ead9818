"""The table of a region keeps every entry that was acknowledged, whichever write is torn."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_backends.disk.format import (
    PAGE_BYTES,
    Entry,
    PageRefused,
    decode_table_untrusted,
    entries_untrusted,
    records_max,
)
from kvtier_backends.disk.tables import RegionTable, new_pages
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

    async def write(self, transfers: Sequence[Transfer]) -> list[OSError | None]:
        ends: list[OSError | None] = []
        fails_at, self.fails_at = self.fails_at, None
        for number, transfer in enumerate(transfers):
            if number == fails_at:
                ends.append(OSError(errno.EIO, "sick"))
                continue
            torn = bytearray(self.disk.bytes[0])
            torn[transfer.at : transfer.at + 512] = transfer.buffers[0][:512]
            assert entries_in(torn) >= self.acknowledged
            ends += await super().write([transfer])
        return ends


def entry(slot: int) -> Entry:
    return Entry(slot, 1, slot.to_bytes(2, "big").ljust(KEY_BYTES, b"k"), bytes(16), b"")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5 * PER_PAGE), st.none() | st.integers(0, 3)), max_size=20),
    st.integers(0, 99),
)
def test_no_write_that_is_torn_or_fails_takes_an_entry_that_was_acknowledged(
    adds: list[tuple[int, int | None]], seed: int
) -> None:
    async def run() -> None:
        failures = sum(fails_at is not None for _, fails_at in adds)
        # A write that failed may leave the places behind that it was to go to.
        places = sum(-(-size // PER_PAGE) for size, _ in adds) + failures + 1
        device = TearingDevice(SimulatedDisk(1, (1 + places) * PAGE_BYTES, seed))
        device.acknowledged = set()
        wrote: list[int] = []
        table = RegionTable(
            device, 0, INCARNATION, places, new_pages(3), seal_bytes=0, wrote=wrote.append
        )
        slot = 0
        for size, fails_at in adds:
            slots = range(slot, slot + size)
            slot += size
            device.fails_at = fails_at
            problem = await table.add([entry(each) for each in slots])
            if problem is None:
                device.acknowledged.update(slots)
            else:
                assert fails_at is not None
        found = entries_in(device.disk.bytes[0])
        assert device.acknowledged <= found <= set(range(slot))
        assert sum(wrote) % PAGE_BYTES == 0

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5 * PER_PAGE), max_size=25))
def test_a_table_needs_one_place_more_than_its_entries_have_pages(sizes: list[int]) -> None:
    async def run() -> None:
        places = -(-sum(sizes) // PER_PAGE) + 1
        device = SimulatedDevice(SimulatedDisk(1, (1 + places) * PAGE_BYTES, 0))
        table = RegionTable(
            device, 0, INCARNATION, places, new_pages(3), seal_bytes=0, wrote=lambda _: None
        )
        slot = 0
        for size in sizes:
            assert await table.add([entry(slot + each) for each in range(size)]) is None
            slot += size
        assert entries_in(device.disk.bytes[0]) == set(range(slot))

    asyncio.run(run())


async def test_stores_that_end_together_share_a_page_write() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    wrote: list[int] = []
    table = RegionTable(device, 0, INCARNATION, 3, new_pages(3), seal_bytes=0, wrote=wrote.append)
    async with anyio.create_task_group() as tasks:
        for slot in range(PER_PAGE):
            tasks.start_soon(table.add, [entry(slot)])
    assert entries_in(device.disk.bytes[0]) == set(range(PER_PAGE))
    assert len(wrote) == 2


async def test_a_write_that_fails_fails_its_stores_and_no_later_one() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    table = RegionTable(device, 0, INCARNATION, 3, new_pages(3), seal_bytes=0, wrote=lambda _: None)
    device.sick.add(0)
    assert isinstance(await table.add([entry(0)]), OSError)
    device.sick.clear()
    assert await table.add([entry(1)]) is None
    assert entries_in(device.disk.bytes[0]) >= {1}


async def test_a_full_table_says_so() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    table = RegionTable(device, 0, INCARNATION, 2, new_pages(3), seal_bytes=0, wrote=lambda _: None)
    assert await table.add([entry(slot) for slot in range(PER_PAGE)]) is None
    problem = await table.add([entry(slot) for slot in range(PER_PAGE, 3 * PER_PAGE)])
    assert isinstance(problem, OSError)
