"""Decides how the contents of a folder are used when it is opened: named cases, as tables.

Each table has one row for every combination of facts; a test walks them all.
A fact is only checked if those before it allow that, so the rows
read like a list of questions. Sound contents are served; the rest is dropped,
and counted under the name of its case.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import (
    PAGE_BYTES,
    PageRefused,
    Refusal,
    RegionHeader,
    TablePage,
    decode_header_untrusted,
    decode_table_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvtier.plugin_api.threads import DaemonThreads
    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.format import RegionGeometry
    from kvtier_backends.disk.log.index import BulkLoad

YES: Final = True
NO: Final = False
ANY: Final = None

READ_AGAIN_PAUSE_S: Final = 0.2
READ_AGAIN_MAX: Final = 5  #: in all: an unreadable disk delays the start no longer than this

_BATCH_BYTES: Final = 2 << 20
_BATCHES_AT_ONCE: Final = 4


class Action(Enum):
    """How a superblock, a region or a table page is treated."""

    SERVE = "serve"
    REUSE = "reuse"  #: nothing in it is useful: overwrite it
    REUSE_LAST = "reuse last"  #: it may be useful to another engine later: overwrite it last
    SKIP = "skip"  #: go on with the next one
    START_EMPTY = "start empty"  #: the folder becomes an empty one


class Case(NamedTuple):
    """One row: a name, the facts that select it, and the action."""

    name: str
    facts: tuple[bool | None, ...]
    action: Action

    def matches(self, facts: Sequence[bool]) -> bool:
        """Return whether the row is for these facts."""
        return all(
            wanted is ANY or wanted is found
            for wanted, found in zip(self.facts, facts, strict=True)
        )


FOLDER_CASES: Final = (
    #     name                  there sound version layout
    Case("folder_new", (NO, ANY, ANY, ANY), Action.START_EMPTY),
    Case("folder_damaged", (YES, NO, ANY, ANY), Action.START_EMPTY),
    Case("folder_other_version", (YES, YES, NO, ANY), Action.START_EMPTY),
    Case("folder_other_layout", (YES, YES, YES, NO), Action.START_EMPTY),
    Case("folder_sound", (YES, YES, YES, YES), Action.SERVE),
)

REGION_CASES: Final = (
    #     name                    readable written sound version folder place layout names key
    Case("region_unreadable", (NO, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY), Action.REUSE),
    Case("region_never_used", (YES, NO, ANY, ANY, ANY, ANY, ANY, ANY, ANY), Action.REUSE),
    Case("region_damaged", (YES, YES, NO, ANY, ANY, ANY, ANY, ANY, ANY), Action.REUSE),
    Case("region_other_version", (YES, YES, YES, NO, ANY, ANY, ANY, ANY, ANY), Action.REUSE),
    Case("region_other_folder", (YES, YES, YES, YES, NO, ANY, ANY, ANY, ANY), Action.REUSE),
    Case("region_misplaced", (YES, YES, YES, YES, YES, NO, ANY, ANY, ANY), Action.REUSE),
    Case("region_foreign", (YES, YES, YES, YES, YES, YES, ANY, NO, ANY), Action.REUSE_LAST),
    Case("region_other_layout", (YES, YES, YES, YES, YES, YES, NO, YES, ANY), Action.REUSE),
    Case("region_unknown_key", (YES, YES, YES, YES, YES, YES, YES, YES, NO), Action.REUSE_LAST),
    Case("region_sound", (YES, YES, YES, YES, YES, YES, YES, YES, YES), Action.SERVE),
)

PAGE_CASES: Final = (
    #     name                written sound version incarnation
    Case("table_unused", (NO, ANY, ANY, ANY), Action.SKIP),
    Case("table_torn", (YES, NO, ANY, ANY), Action.SKIP),
    Case("table_other_version", (YES, YES, NO, ANY), Action.SKIP),
    Case("table_left_over", (YES, YES, YES, NO), Action.SKIP),
    Case("table_sound", (YES, YES, YES, YES), Action.SERVE),
)

UNREMARKABLE: Final = frozenset(
    {
        "folder_new",
        "folder_sound",
        "region_never_used",
        "region_sound",
        "table_left_over",
        "table_sound",
        "table_unused",
    }
)
"""Cases that a healthy folder has: not counted."""


def find_case(cases: Sequence[Case], facts: Sequence[bool]) -> Case:
    """Return the row for these facts."""
    return next(case for case in cases if case.matches(facts))


class Expected(NamedTuple):
    """The header values of this engine's own regions."""

    folder_id: bytes
    namespace: bytes
    key_ids: Container[bytes]
    geometry: RegionGeometry


class Recovered(NamedTuple):
    """The result of a recovery."""

    sequences: dict[int, int]  #: of the regions that are served
    reuse_last: list[int]  #: regions to be used last, the oldest first
    highest: int  #: the greatest sequence number seen
    key_ids: dict[int, bytes]
    counts: Counter[str]


def folder_case(refusal: Refusal | None, *, layout_fits: bool) -> Case:
    """Judge a superblock by why it was refused (None: it was not), and whether it fits."""
    there = refusal is not Refusal.BLANK
    sound = refusal not in (Refusal.BLANK, Refusal.DAMAGED)
    return find_case(FOLDER_CASES, (there, sound, refusal is None, layout_fits))


def region_case(
    page: bytes | memoryview, number: int, expected: Expected
) -> tuple[Case, RegionHeader | None]:
    """Judge a region by the page that should be its header."""
    header = None
    refusal = None
    try:
        header = decode_header_untrusted(page)
    except PageRefused as refused:
        refusal = refused.refusal
    geometry = expected.geometry
    facts = (
        len(page) == PAGE_BYTES,
        refusal is not Refusal.BLANK,
        refusal is not Refusal.DAMAGED,
        refusal is not Refusal.OTHER_VERSION,
        header is not None and header.folder_id == expected.folder_id,
        header is not None and header.number == number,
        header is not None
        and (header.block_bytes, header.stride, header.slots, header.table_pages)
        == (geometry.block_bytes, geometry.stride, geometry.slots, geometry.table_pages),
        header is not None and header.namespace == expected.namespace,
        header is not None and header.key_id in expected.key_ids,
    )
    return find_case(REGION_CASES, facts), header


def page_case(page: bytes | memoryview, incarnation: bytes) -> tuple[Case, TablePage | None]:
    """Judge one table page of a region."""
    table = None
    refusal = None
    try:
        table = decode_table_untrusted(page, incarnation)
    except PageRefused as refused:
        refusal = refused.refusal
    facts = (
        refusal is not Refusal.BLANK,
        refusal is not Refusal.DAMAGED,
        refusal is not Refusal.OTHER_VERSION,
        refusal is not Refusal.OTHER_INCARNATION,
    )
    return find_case(PAGE_CASES, facts), table


class Recovery:
    """Reads headers and tables of all regions, and fills an index with the sound blocks."""

    def __init__(
        self,
        device: Device,
        expected: Expected,
        threads: DaemonThreads,
        bulk: BulkLoad,
    ) -> None:
        """``threads`` do the parsing; ``bulk`` fills the index."""
        self._device = device
        self._expected = expected
        self._threads = threads
        self._bulk = bulk
        self._headers: dict[int, RegionHeader] = {}
        self._reuse_last: list[tuple[int, int]] = []
        self._highest = 0
        self._counts: Counter[str] = Counter()
        self._pauses_left = READ_AGAIN_MAX

    async def run(self, regions: int, blocks_max: int) -> Recovered:
        """Read all regions; the newest ``blocks_max`` blocks at most are recovered."""
        table_bytes = self._expected.geometry.slots_at
        size = max(1, _BATCH_BYTES // table_bytes)
        batches = [range(first, min(first + size, regions)) for first in range(0, regions, size)]
        pass_on = asyncio.Semaphore(_BATCHES_AT_ONCE)
        await asyncio.gather(*(self._recover_batch(batch, pass_on) for batch in batches))
        dropped = await self._threads.run(partial(self._bulk.finish, blocks_max))
        if not blocks_max:  # none are wanted, however much room there is
            dropped = dropped._replace(over=0)
        self._counts.update({f"entries_{why}": n for why, n in dropped._asdict().items() if n})
        if len(self._bulk.index):
            self._counts["blocks_recovered"] = len(self._bulk.index)
        return Recovered(
            {number: header.sequence for number, header in self._headers.items()},
            [number for _, number in sorted(self._reuse_last)],
            self._highest,
            {number: header.key_id for number, header in self._headers.items()},
            self._counts,
        )

    async def _recover_batch(self, batch: range, pass_on: asyncio.Semaphore) -> None:
        table_bytes = self._expected.geometry.slots_at
        async with pass_on:
            whole = memoryview(mmap.mmap(-1, len(batch) * table_bytes))
            tables = [whole[at * table_bytes : (at + 1) * table_bytes] for at in range(len(batch))]
            wanted = [Transfer(n, 0, [table]) for n, table in zip(batch, tables, strict=True)]
            ends = await self._read(wanted)
            raws = [
                table[: 0 if isinstance(end, OSError) else end]
                for table, end in zip(tables, ends, strict=True)
            ]
            failed = [n for n, end in zip(batch, ends, strict=True) if isinstance(end, OSError)]
            if failed:
                # Overwritten last: their blocks may be readable again at the next start.
                self._counts["region_unreadable"] += len(failed)
                self._reuse_last += [(0, number) for number in failed]
            await self._threads.run(partial(self._judge_all, batch, raws))

    async def _read(self, wanted: list[Transfer]) -> list[int | OSError]:
        """Read; repeat failed reads a little later: a disk may fail for a moment."""
        ends = await self._device.read(wanted)
        while self._pauses_left and any(isinstance(end, OSError) for end in ends):
            self._pauses_left -= 1
            await asyncio.sleep(READ_AGAIN_PAUSE_S)
            failed = [at for at, end in enumerate(ends) if isinstance(end, OSError)]
            again = await self._device.read([wanted[at] for at in failed])
            for at, end in zip(failed, again, strict=True):
                ends[at] = end
        return ends

    def _judge_all(self, batch: range, raws: list[memoryview]) -> None:
        """Judge a batch of regions. Runs in a thread, one call at a time."""
        for number, raw in zip(batch, raws, strict=True):
            self._judge(number, raw)

    def _judge(self, number: int, raw: memoryview) -> None:
        case, header = region_case(raw[:PAGE_BYTES], number, self._expected)
        # A file that is shorter than its regions was truncated, or never got so far.
        if raw or case.name != "region_unreadable":
            self._count(case)
        if header is not None and header.folder_id == self._expected.folder_id:
            self._highest = max(self._highest, header.sequence)
        if case.action is Action.REUSE_LAST and header is not None:
            self._reuse_last.append((header.sequence, number))
        if case.action is not Action.SERVE or header is None:
            return
        # In any order: a slot has one entry in an incarnation, however often it was written.
        for at in range(PAGE_BYTES, len(raw) - PAGE_BYTES + 1, PAGE_BYTES):
            case, table = page_case(raw[at : at + PAGE_BYTES], header.incarnation)
            self._count(case)
            if table is not None:
                self._bulk.add_page(table)
        if len(raw) < self._expected.geometry.slots_at:
            self._counts["table_truncated"] += 1
        if self._bulk.end_region(number, header.sequence):
            self._headers[number] = header

    def _count(self, case: Case) -> None:
        if case.name not in UNREMARKABLE:
            self._counts[case.name] += 1
