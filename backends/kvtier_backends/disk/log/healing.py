"""Tests whether failed regions work again: retired ones, and those that could not be read.

A round of ``heal`` is a part of the tier's upkeep. Retired regions are tried by
their header, one after the other and no further than the first that fails.
Suspected regions are read again where they failed; a region that fails on its own, while
another place can be read, is eventually lost. If nothing can be read, the
medium has failed and not the region: then no region is given up.
"""

from __future__ import annotations

import mmap
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import PAGE_BYTES
from kvtier_backends.disk.log.region_faults import MEDIUM_ERRORS

if TYPE_CHECKING:
    from kvtier_backends.disk.log.context import LogContext
    from kvtier_backends.disk.log.region_faults import RegionFaults
    from kvtier_backends.disk.log.region_opening import RegionOpener

SUSPECTS_AT_ONCE: Final = 4
FREE_AHEAD_MAX: Final = 16
"""With this many free regions, there is no hurry to take more of a disk that had no room."""


class Healer:
    """Retries failed regions. Event loop only."""

    def __init__(self, context: LogContext, faults: RegionFaults, opener: RegionOpener) -> None:
        self._context = context
        self._regions = context.regions
        self._faults = faults
        self._opener = opener

    async def heal(self) -> None:
        """Do one round: for retired regions, then for suspected ones."""
        await self._try_retired()
        await self._read_suspects()

    async def _try_retired(self) -> None:
        faults = self._faults
        for region in faults.due():
            async with self._opener.lock:
                if self._opener.is_closed or self._regions.free_count >= FREE_AHEAD_MAX:
                    return
                if region not in faults.due():
                    continue
                problem = await self._opener.rewrite_header(region)
                if problem is None:
                    faults.write_succeeded()
                    faults.revive(region)
                    continue
                faults.still_fails(region, problem)
                if problem.errno not in MEDIUM_ERRORS:
                    return

    async def _read_suspects(self) -> None:
        faults, regions = self._faults, self._regions
        for region in [each for each in faults.suspects if not self._context.index.live(each)]:
            faults.acquit(region)
        asked = dict(islice(faults.suspects.items(), SUSPECTS_AT_ONCE))
        if not asked:
            return
        transfers = [
            Transfer(region, suspect.at, [memoryview(mmap.mmap(-1, suspect.size))])
            for region, suspect in asked.items()
        ]
        sound = next((r for r in regions.oldest_first() if r not in faults.suspects), None)
        if sound is not None:
            transfers.append(Transfer(sound, 0, [memoryview(mmap.mmap(-1, PAGE_BYTES))]))
        ends = await self._context.read_pinned(transfers)
        medium_works = not all(isinstance(end, OSError) for end in ends)
        for region, end in zip(asked, ends, strict=False):
            if region not in faults.suspects:
                continue
            faults.ask_last(region)
            if not isinstance(end, OSError):
                faults.acquit(region)
            elif medium_works:
                faults.strike(region, end)
