"""Removes blocks from a folder by age or namespace, so that nothing finds them again.

Their entries are removed from the tables and their bytes from the disk (as far as
a filesystem can ensure it; an SSD may keep copies of its own). In a folder that an
engine uses, the engine does it: it forgets the blocks, reports them as lost,
and appends nothing while the tables are replaced.

``scrub_region`` replaces the table pages of a region one by one, in place. A crash meanwhile
leaves a page that fails its check, or an entry without its block: a loss, never wrong bytes.
Its caller ensures that nothing is appended to the region meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import StoreFault
from kvtier_backends.disk.format import PAGE_BYTES, Entry, TableWriter
from kvtier_backends.disk.log.regions import RegionState
from kvtier_backends.disk.offline.listing import Distinct, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from kvtier.plugin_api.threads import DaemonThreads
    from kvtier_backends.disk.log.block_log import BlockLog
    from kvtier_backends.disk.offline.inspection import Folder, Page, RegionReport
    from kvtier_backends.disk.offline.region_files import RegionFiles


_BLANK = bytes(PAGE_BYTES)


def scrub_region(
    files: RegionFiles, report: RegionReport, keep: Callable[[Entry], bool]
) -> list[Entry]:
    """Erase everything in a region except the blocks that ``keep`` accepts.

    Returns the removed entries. Raises ``OSError``.
    """
    entries = report.entries.values() if report.is_sound else ()
    gone = [entry for entry in entries if not keep(entry)]
    stay = {entry.slot for entry in entries} - {entry.slot for entry in gone}
    if not stay or report.header is None or report.geometry is None:
        files.erase(report.number, 0, files.region_bytes)
        return gone
    for page in report.pages:
        replaced = _without(page, stay, report.header.incarnation)
        if replaced != page.raw:
            files.write(report.number, (1 + page.place) * PAGE_BYTES, replaced)
    for first, count in _gaps(stay, report.header.slots):
        files.erase(report.number, report.geometry.slot_at(first), count * report.geometry.stride)
    # Blocks of another size may have left bytes behind the last slot.
    end = report.geometry.slot_at(report.header.slots)
    files.erase(report.number, end, files.region_bytes - end)
    return gone


def _without(page: Page, stay: set[int], incarnation: bytes) -> bytes:
    """Return the page with entries of these slots only; blank if there are none."""
    kept = [entry for entry in page.entries if entry.slot in stay]
    if not kept:
        return _BLANK
    if len(kept) == len(page.entries) and not page.beyond:
        return page.raw
    writer = TableWriter(incarnation, len(kept[0].tag))
    writer.add(kept)
    return writer.encode()


def _gaps(slots: Iterable[int], end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of slots below ``end`` that are not among these, as first and count."""
    first = 0
    for slot in [*sorted(slots), end]:
        if slot > first:
            yield first, slot - first
        first = slot + 1


LOADS_END_S_MAX: Final = 5.0
"""Longest wait for all running loads together; usually they take milliseconds.

Regions whose loads take longer are left as they are and reported: an erased block
would be loaded as a damaged one.
"""

QUIET_WAIT_S_MAX: Final = 10.0
ROUNDS_MAX: Final = 5
_POLL_S: Final = 0.01


class RegionSelection(NamedTuple):
    """Selects the blocks to remove: those stored before a time, of one namespace or of all."""

    before_s: int  #: seconds since 1970
    namespace: bytes | None = None
    all_of_it: bool = False  #: unreadable regions, too

    def selects(self, report: RegionReport, entry: Entry) -> bool:
        """Return whether an entry of a region is to be removed."""
        namespace = b"" if report.header is None else report.header.namespace
        return self.covers(namespace) and entry.stored_s < self.before_s

    def covers(self, namespace: bytes) -> bool:
        """Return whether blocks of this namespace are selected."""
        return self.namespace in (None, namespace)


@dataclass
class Purged:
    """The blocks that were, or would be, removed."""

    kinds: dict[Kind, Distinct] = field(default_factory=dict)
    regions_failed: int = 0  #: that could not be read or changed, or were being read
    is_complete: bool = True

    def add(self, report: RegionReport, gone: list[Entry]) -> None:
        """Count the entries removed from a region."""
        if report.header is not None and gone:
            keys = self.kinds.setdefault(kind_of(report.header), Distinct())
            keys.add(entry.key for entry in gone)


def purge_region(
    folder: Folder, number: int, selection: RegionSelection, purged: Purged, *, dry: bool
) -> None:
    """Remove the selected blocks from one region. Raises ``OSError`` for missing rights only."""
    try:
        report = folder.inspect(number)
        if not report.is_sound and not selection.all_of_it:
            return  # no block in it is found, and its contents are unknown
        entries = report.entries.values()
        if dry:
            purged.add(report, [entry for entry in entries if selection.selects(report, entry)])
            return
        # Even if nothing is selected: slots without an entry may hold blocks of the time before.
        gone = scrub_region(
            folder.files, report, lambda entry: not selection.selects(report, entry)
        )
        purged.add(report, gone)
    except PermissionError:
        raise
    except OSError:
        purged.regions_failed += 1


def purge_folder(
    folder: Folder,
    numbers: list[int],
    selection: RegionSelection,
    advance: Callable[[], None],
    *,
    dry: bool,
) -> Purged:
    """Remove the selected blocks from a claimed folder; if ``dry``, count only.

    Raises ``OSError`` for missing rights. Ctrl-C leaves the rest as it is.
    """
    purged = Purged()
    try:
        for number in numbers:
            purge_region(folder, number, selection, purged, dry=dry)
            advance()
    except KeyboardInterrupt:
        purged.is_complete = False
    return purged


async def purge_log(
    log: BlockLog, regions: int, folder: Folder, selection: RegionSelection, threads: DaemonThreads
) -> Purged:
    """Remove the selected blocks while the engine runs. Stores wait meanwhile.

    ``regions`` is how many the log has. Raises ``StoreFault`` if it does not
    become idle, and ``OSError``.
    """
    purged = Purged()
    for _ in range(ROUNDS_MAX):
        purged.regions_failed = 0
        async with _appending_nothing(log, regions):
            await _forget(log, selection)
            # From here on, no load of a forgotten block begins.
            marks = [log.regions.begin_grace_period(region) for region in range(regions)]
            is_whole = True
            end = asyncio.get_running_loop().time() + LOADS_END_S_MAX
            for number in await threads.run(folder.files.numbers):
                if number < regions and not await _loads_ended(log, number, marks[number], end):
                    if log.regions.state(number) is RegionState.RECLAIMING:
                        is_whole = False
                    else:
                        purged.regions_failed += 1
                    continue
                await threads.run(
                    partial(purge_region, folder, number, selection, purged, dry=False)
                )
                log.regions.forget_allocation(number)  # its bytes may be holes now
            await threads.run(folder.files.close)
            if is_whole and not log.regions.count_in(RegionState.RECLAIMING):
                return purged
        # Removed blocks may have been read before, to be reinserted now: remove those, too.
    raise StoreFault("the tier is emptying regions all the time. Try again when it stores less")


async def _loads_ended(log: BlockLog, region: int, mark: int, end: float) -> bool:
    """Wait until a region's grace period is over. Return False if its earlier loads go on."""
    while not log.regions.is_grace_period_over(region, mark):
        # A reclaim reads its region until it may append, which waits for the purge.
        is_reclaimed = log.regions.state(region) is RegionState.RECLAIMING
        if is_reclaimed or asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(_POLL_S)
    return True


@asynccontextmanager
async def _appending_nothing(log: BlockLog, regions: int) -> AsyncIterator[None]:
    """Seal all regions that take blocks, wait for their writers, and keep others from opening."""
    loop = asyncio.get_running_loop()
    end = loop.time() + QUIET_WAIT_S_MAX
    while loop.time() < end:
        # Every allocation of slots waits for this lock.
        async with log.opening:
            while log.regions.room:  # the open region, then the one that was next
                log.regions.fill()
            written = all(map(log.regions.is_written, range(regions)))
            # A reclaim may wait for this lock: let it go on.
            if written and not log.regions.count_in(RegionState.RECLAIMING):
                yield
                written = all(map(log.regions.is_written, range(regions)))
                assert written, "a region was opened while nothing was to be appended"
                return
        await asyncio.sleep(_POLL_S)
    raise StoreFault(f"the tier did not come to rest in {QUIET_WAIT_S_MAX:.0f} s. Try again later")


async def _forget(log: BlockLog, selection: RegionSelection) -> None:
    """Forget the selected blocks, and report them. The whole index is of one namespace."""
    if selection.covers(log.namespace):
        for region in log.regions.oldest_first():
            log.lose(log.index.stored_before(region, selection.before_s), "blocks_purged")
            await asyncio.sleep(0)
