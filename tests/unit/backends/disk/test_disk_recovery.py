from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.disk import format as fmt
from kvtier_backends.disk.folder import recovery
from kvtier_backends.disk.folder.recovery import (
    FOLDER_CASES,
    PAGE_CASES,
    REGION_CASES,
    UNREMARKABLE,
    Case,
    Expected,
    folder_case,
    page_case,
    region_case,
)
from kvtier_backends.disk.log.index import BlockIndex, BulkLoad
from tests.unit.backends.disk._log import (
    CAPACITY,
    GEOMETRY,
    KEYS,
    REGIONS,
    SLOTS,
    begun,
    fresh_disk,
)
from tests.unit.backends.disk._simulated import SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.disk.device import Transfer

EXPECTED = Expected(b"f" * 16, b"n" * 16, {fmt.NO_KEY_ID}, GEOMETRY)
HEADER = fmt.RegionHeader(
    folder_id=b"f" * 16,
    incarnation=b"i" * 16,
    namespace=b"n" * 16,
    key_id=fmt.NO_KEY_ID,
    number=3,
    sequence=9,
    block_bytes=GEOMETRY.block_bytes,
    stride=GEOMETRY.stride,
    slots=GEOMETRY.slots,
    table_pages=GEOMETRY.table_pages,
    created_s=0,
)
"""As the engine of ``_log.py`` would have written it."""


@pytest.mark.parametrize("cases", [FOLDER_CASES, REGION_CASES, PAGE_CASES], ids=lambda c: c[0].name)
def test_every_combination_of_facts_has_exactly_one_case(cases: Sequence[Case]) -> None:
    for facts in itertools.product((False, True), repeat=len(cases[0].facts)):
        assert sum(case.matches(facts) for case in cases) == 1, facts


def reseal(page: bytes, at: int, new: bytes) -> bytes:
    return fmt._with_checksum(page[:at] + new + page[at + len(new) : -8])


REGION_PAGES = {
    "region_unreadable": b"",
    "region_never_used": bytes(4096),
    "region_damaged": b"x" * 4096,
    "region_other_version": reseal(fmt.encode_header(HEADER), 8, b"\x02"),
    "region_other_folder": fmt.encode_header(replace(HEADER, folder_id=b"g" * 16)),
    "region_misplaced": fmt.encode_header(replace(HEADER, number=4)),
    "region_foreign": fmt.encode_header(replace(HEADER, namespace=b"m" * 16)),
    "region_other_layout": fmt.encode_header(replace(HEADER, slots=7)),
    "region_unknown_key": fmt.encode_header(replace(HEADER, key_id=b"k" * 16)),
    "region_sound": fmt.encode_header(HEADER),
}


TABLE = fmt.TableWriter(b"i" * 16, 0).encode()
TABLE_PAGES = {
    "table_unused": bytes(4096),
    "table_torn": TABLE[:512] + b"x" * 3584,
    "table_other_version": reseal(TABLE, 8, b"\x02"),
    "table_left_over": fmt.TableWriter(b"j" * 16, 0).encode(),
    "table_sound": TABLE,
}
FOLDERS = {
    "folder_new": (fmt.Refusal.BLANK, False),
    "folder_damaged": (fmt.Refusal.DAMAGED, False),
    "folder_other_version": (fmt.Refusal.OTHER_VERSION, False),
    "folder_other_layout": (None, False),
    "folder_sound": (None, True),
}


def test_each_case_is_told_from_the_others() -> None:
    for name, page in REGION_PAGES.items():
        assert region_case(page, 3, EXPECTED)[0].name == name
    for name, page in TABLE_PAGES.items():
        assert page_case(page, b"i" * 16)[0].name == name
    for name, (refusal, layout_fits) in FOLDERS.items():
        assert folder_case(refusal, layout_fits=layout_fits).name == name
    shown = [*FOLDERS, *REGION_PAGES, *TABLE_PAGES]
    assert shown == [case.name for case in (*FOLDER_CASES, *REGION_CASES, *PAGE_CASES)]
    assert len(set(shown)) == len(shown)
    assert set(shown) >= UNREMARKABLE


async def recover(
    device: SimulatedDevice, namespace: bytes
) -> tuple[recovery.Recovered, BlockIndex]:
    """Return what an engine of that namespace finds, and the index of it."""
    threads = DaemonThreads(1, "test")
    index = BlockIndex(REGIONS, SLOTS)
    expected = Expected(b"f" * 16, namespace, {fmt.NO_KEY_ID}, GEOMETRY)
    reading = recovery.Recovery(device, expected, threads, BulkLoad(index, 1000, 0))
    found = await reading.run(REGIONS, CAPACITY)
    threads.stop()
    return found, index


@pytest.mark.anyio
async def test_a_regions_blocks_are_those_of_its_namespace_alone() -> None:
    """To an engine of another one they are worse than nothing; to ours no region is a free one."""
    disk = fresh_disk()
    engine = await begun(SimulatedDevice(disk))
    await engine.fill(KEYS[: 2 * SLOTS])
    disk.before.clear()
    found, index = await recover(SimulatedDevice(disk), b"n" * 16)
    assert (set(found.sequences), len(index)) == ({0, 1}, 2 * SLOTS)
    found, index = await recover(SimulatedDevice(disk), b"m" * 16)
    assert (found.sequences, len(index)) == ({}, 0)
    assert found.counts == {"region_foreign": 2}
    assert found.reuse_last == [0, 1]


@pytest.mark.anyio
async def test_the_highest_sequence_is_that_of_all_regions_served_or_not() -> None:
    """A region that another engine left is newer than ours: the next header must be newer still.

    Else its region could be taken for the older one, and its blocks for older copies, when
    that engine's blocks are served again.
    """
    disk = fresh_disk()
    left = [
        replace(HEADER, number=0),
        replace(HEADER, number=1, sequence=40, namespace=b"m" * 16),
        replace(HEADER, number=2, sequence=50, slots=7),
        replace(HEADER, number=3, sequence=99, folder_id=b"g" * 16),  # of another folder: no matter
    ]
    for header in left:
        disk.write(header.number, 0, fmt.encode_header(header))
    disk.before.clear()
    engine = await begun(SimulatedDevice(disk))
    assert engine.log.regions.next_sequence() == 51


@pytest.mark.anyio
async def test_what_may_be_of_use_to_others_is_overwritten_last_and_the_oldest_of_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What could not be read goes before all of it: nobody knows that it is of any use."""
    monkeypatch.setattr(recovery, "READ_AGAIN_PAUSE_S", 0.0)
    disk = fresh_disk()
    for header in (
        replace(HEADER, number=1, sequence=40, namespace=b"m" * 16),
        replace(HEADER, number=2, sequence=20, namespace=b"m" * 16),
        replace(HEADER, number=4, sequence=30, key_id=b"k" * 16),
    ):
        disk.write(header.number, 0, fmt.encode_header(header))
    device = SimulatedDevice(disk)
    device.sick.add(5)
    found, _ = await recover(device, b"n" * 16)
    assert found.reuse_last == [5, 2, 4, 1]
    assert (found.sequences, found.highest) == ({}, 40)
    assert found.counts == {"region_foreign": 2, "region_unknown_key": 1, "region_unreadable": 1}


@pytest.mark.anyio
async def test_a_sound_folder_is_recovered_without_a_remark() -> None:
    """What is counted at the start is what somebody may want to look into."""
    disk = fresh_disk()
    engine = await begun(SimulatedDevice(disk))
    assert engine.found_counts == {}
    await engine.fill(KEYS[: 3 * SLOTS])
    disk.before.clear()
    again = await begun(SimulatedDevice(disk))
    assert again.found_counts == {"blocks_recovered": 3 * SLOTS}
    assert all(map(again.log.has, KEYS[: 3 * SLOTS]))


class Truncated(SimulatedDevice):
    """The segment's file ends in the midst of the first region, or that can't be read."""

    end: int | OSError = fmt.PAGE_BYTES

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        whole = await super().read(transfers)
        return [
            self.end if transfer.region == 0 else end
            for transfer, end in zip(transfers, whole, strict=True)
        ]


@pytest.mark.anyio
async def test_a_region_whose_tables_are_cut_off_is_counted_and_the_others_are_served() -> None:
    disk = fresh_disk()
    engine = await begun(SimulatedDevice(disk))
    await engine.fill(KEYS[: 2 * SLOTS])
    assert engine.log.index.live(0) == SLOTS
    cut = {key for key in KEYS[: 2 * SLOTS] if (engine.log.index.get(key) or 0) < SLOTS}
    disk.before.clear()
    again = await begun(Truncated(disk))
    assert again.found_counts == {"blocks_recovered": SLOTS, "table_truncated": 1}
    assert {key for key in KEYS[: 2 * SLOTS] if not again.log.has(key)} == cut


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("end", "counts"),
    [(0, {}), (100, {"region_unreadable": 1}), (OSError(5, "sick"), {"region_unreadable": 1})],
    ids=["never written", "cut", "unreadable"],
)
async def test_a_header_that_is_not_there_is_counted_unless_its_file_never_got_so_far(
    end: int | OSError, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "READ_AGAIN_PAUSE_S", 0.0)
    disk = fresh_disk()
    engine = await begun(SimulatedDevice(disk))
    await engine.fill(KEYS[: 2 * SLOTS])
    device = Truncated(disk)
    device.end = end
    again = await begun(device)
    assert again.found_counts == {"blocks_recovered": SLOTS, **counts}
