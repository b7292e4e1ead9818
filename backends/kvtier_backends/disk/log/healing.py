"""Finds out whether what failed works again: retired regions, and those that could not be read.

A round of ``heal`` is a part of the tier's upkeep. Retired regions are tried by
their header, one after the other and no further than the first that fails.
Suspected regions are read again where they failed; what fails on its own, while
another place can be read, is lost in the end. Where nothing can be read, the
medium is ill and not the region: nothing is given up then.
"""

from __future__ import annotations

import mmap
import os
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import ID_BYTES, PAGE_BYTES
from kvtier_backends.disk.log.region_faults import SICK_MEDIUM

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import Outcome
    from kvtier_backends.disk.log.block_log import BlockLog

SUSPECTS_AT_ONCE: Final = 4
FREE_AHEAD_MAX: Final = 16
"""With so many free regions there is no hurry to take more of a disk that had no room."""


async def heal(log: BlockLog) -> None:
    """Do one round: for retired regions, then for suspected ones."""
    await _try_retired(log)
    await _read_suspects(log)


async def try_a_region(log: BlockLog) -> Outcome | None:
    """Write one header, to see whether that works; returns what to tell a store if it doesn't.

    Whoever calls holds ``opening``.
    """
    region = log.trouble.to_try(log.allocated)
    if region is None:
        log.trouble.in_doubt = False  # only one that is emptied can tell
        return None
    _, problem = await log.head(region, os.urandom(ID_BYTES))
    return log.trouble.tried(region, problem, log.allocated)


async def _try_retired(log: BlockLog) -> None:
    for region in log.trouble.due():
        async with log.opening:
            if log.is_dead or log.regions.free_count >= FREE_AHEAD_MAX:
                return
            if region not in log.trouble.due():
                continue
            _, problem = await log.head(region, os.urandom(ID_BYTES))
            if problem is None:
                log.trouble.wrote()
                log.trouble.revive(region)
                continue
            log.trouble.still_fails(region, problem)
            if problem.errno not in SICK_MEDIUM:
                return


async def _read_suspects(log: BlockLog) -> None:
    trouble, regions = log.trouble, log.regions
    for region in [each for each in trouble.suspects if not log.index.live(each)]:
        trouble.acquit(region)
    asked = dict(islice(trouble.suspects.items(), SUSPECTS_AT_ONCE))
    if not asked:
        return
    transfers = [
        Transfer(region, suspect.at, [memoryview(mmap.mmap(-1, suspect.size))])
        for region, suspect in asked.items()
    ]
    sound = next((r for r in regions.oldest_first() if r not in trouble.suspects), None)
    if sound is not None:
        transfers.append(Transfer(sound, 0, [memoryview(mmap.mmap(-1, PAGE_BYTES))]))
    pinned = [transfer.region for transfer in transfers]
    for region in pinned:
        regions.pin(region)
    try:
        ends = await log.device.read(transfers)
    finally:
        for region in pinned:
            regions.unpin(region)
    medium_works = not all(isinstance(end, OSError) for end in ends)
    for region, end in zip(asked, ends, strict=False):
        if region not in trouble.suspects:
            continue
        suspect = trouble.suspects.pop(region)  # the others come first in the next round
        trouble.suspects[region] = suspect
        if not isinstance(end, OSError):
            trouble.acquit(region)
        elif medium_works:
            trouble.strike(region, end)
