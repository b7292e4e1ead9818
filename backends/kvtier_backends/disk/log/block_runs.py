"""Groups blocks into runs: by location, and by the time they were stored."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier_backends.disk.log.index import BlockIndex


def neighbours(locations: Sequence[int], slots_per_region: int) -> list[list[int]]:
    """Group the places in ``locations`` into runs of consecutive locations of one region."""
    if locations and _are_one_run(locations, slots_per_region):
        return [list(range(len(locations)))]
    runs: list[list[int]] = []
    previous = -2
    for place in sorted(range(len(locations)), key=locations.__getitem__):
        location = locations[place]
        if location == previous + 1 and location % slots_per_region:
            runs[-1].append(place)
        else:
            runs.append([place])
        previous = location
    return runs


def _are_one_run(locations: Sequence[int], slots_per_region: int) -> bool:
    """Fast path: the blocks were stored together, and are requested in the same order."""
    first, last = locations[0], locations[0] + len(locations) - 1
    if first // slots_per_region != last // slots_per_region:
        return False
    return list(locations) == list(range(first, last + 1))


def stored_together(index: BlockIndex, regions: Sequence[int]) -> Iterator[list[bytes]]:
    """Yield the keys in these regions, in batches that were stored within one second.

    In the order of their slots, which is the order of storing. Blocks stored
    together have one time, so they are in one batch, with any others stored in
    that second. Only reinserted blocks keep an older time.
    """
    for region in regions:
        first = region * index.slots_per_region
        blocks = [
            (index.record(first + slot).stored_s, key)
            for slot, key in zip(index.slots_of(region), index.keys_of(region), strict=True)
        ]
        for _, batch in groupby(blocks, key=itemgetter(0)):
            yield [key for _, key in batch]
