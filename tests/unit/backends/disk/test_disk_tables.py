"""The table of a region keeps every entry that was acknowledged, whichever write is torn."""

from __future__ import annotations

import asyncio
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
from kvtier_backends.disk.tables import RegionTable, new_page
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

    async def write(self, transfers: Sequence[Transfer]) -> list[OSError | None]:
        (transfer,) = transfers
        torn = bytearray(self.disk.bytes[0])
        torn[transfer.at : transfer.at + 512] = transfer.buffers[0][:512]
        assert entries_in(torn) >= self.acknowledged
        return await super().write(transfers)


def entry(slot: int) -> Entry:
    return Entry(slot, 1, slot.to_bytes(2, "big").ljust(KEY_BYTES, b"k"), bytes(16), b"")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2 * PER_PAGE), max_size=25), st.integers(0, 99))
def test_a_torn_write_takes_no_entry_that_was_acknowledged(sizes: list[int], seed: int) -> None:
    async def run() -> None:
        total = sum(sizes)
        pages = -(-total // PER_PAGE) + 1
        device = TearingDevice(SimulatedDisk(1, (1 + pages) * PAGE_BYTES, seed))
        device.acknowledged = set()
        wrote: list[int] = []
        table = RegionTable(
            device, 0, INCARNATION, pages, new_page(), seal_bytes=0, wrote=wrote.append
        )
        slot = 0
        for size in sizes:
            slots = range(slot, slot + size)
            slot += size
            assert await table.add([entry(each) for each in slots]) is None
            device.acknowledged.update(slots)
        assert entries_in(device.disk.bytes[0]) == set(range(total))
        assert sum(wrote) == len(wrote) * PAGE_BYTES

    asyncio.run(run())


async def test_stores_that_end_together_share_a_page_write() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    wrote: list[int] = []
    table = RegionTable(device, 0, INCARNATION, 3, new_page(), seal_bytes=0, wrote=wrote.append)
    async with anyio.create_task_group() as tasks:
        for slot in range(PER_PAGE):
            tasks.start_soon(table.add, [entry(slot)])
    assert entries_in(device.disk.bytes[0]) == set(range(PER_PAGE))
    assert len(wrote) == 2


async def test_a_write_that_fails_fails_its_stores_and_no_later_one() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    table = RegionTable(device, 0, INCARNATION, 3, new_page(), seal_bytes=0, wrote=lambda _: None)
    device.sick.add(0)
    assert isinstance(await table.add([entry(0)]), OSError)
    device.sick.clear()
    assert await table.add([entry(1)]) is None
    assert entries_in(device.disk.bytes[0]) >= {1}


async def test_a_full_table_says_so() -> None:
    device = SimulatedDevice(SimulatedDisk(1, 4 * PAGE_BYTES, 0))
    table = RegionTable(device, 0, INCARNATION, 2, new_page(), seal_bytes=0, wrote=lambda _: None)
    assert await table.add([entry(slot) for slot in range(PER_PAGE)]) is None
    problem = await table.add([entry(slot) for slot in range(PER_PAGE, 3 * PER_PAGE)])
    assert isinstance(problem, OSError)
