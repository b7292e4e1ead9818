"""Removes blocks from a region permanently: from its table, and from the disk.

Table pages are replaced one by one, in place. A crash meanwhile leaves a
page that fails its check, or an entry without its block: a loss, never wrong bytes.
The caller ensures that nothing is appended to the region meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_backends.disk.format import PAGE_BYTES, Entry, TableWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvtier_backends.disk.offline.inspection import Page, RegionReport
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
