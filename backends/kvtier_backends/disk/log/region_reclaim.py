"""Empties one region: appends its blocks again, as far as budget and room go, and drops the rest.

Nothing is dropped before the blocks that stay have been read and written: where the
medium fails meanwhile, the region keeps what it has, and is sealed as before.

What is dropped is what was used least recently; of what was used at once, the
tail goes before the head, because a prompt's block is of no use without those
before it. Blocks that are removed, or stored anew, while they are on their way
stay as they are.
"""

from __future__ import annotations

import asyncio
import mmap
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.format import PAGE_BYTES
from kvtier_backends.disk.log.regions import RegionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.disk.log.block_log import BlockLog

BATCH_BYTES: Final = 2 << 20
READERS_WAIT_S_MAX: Final = 1.0
_READERS_POLL_S: Final = 0.005


def affordable(log: BlockLog) -> int:
    """Return how many blocks may be appended again now: by the budget, and by the room."""
    regions, stride = log.regions, log.geometry.stride
    batches = -(-regions.slots * stride // BATCH_BYTES)
    overhead_bytes = (batches + 2) * PAGE_BYTES  # a table page a batch, a header
    room = regions.room + regions.slots * (regions.has_next + (regions.free_count > 0))
    return min(room, log.budget.affords(stride, overhead_bytes))


def victim_without_loss(log: BlockLog) -> int | None:
    """Return the region to empty next, if all of its blocks may be appended again now."""
    region = log.regions.victim(log.trouble.suspects)
    return region if region is not None and log.index.live(region) <= affordable(log) else None


async def empty_one(log: BlockLog, region: int | None) -> Outcome:
    """Empty a region, the victim. FULL: there is none, or it is still read. FAILED: it is kept."""
    if region is None:
        return Outcome.FAILED if log.trouble.suspects else Outcome.FULL
    log.regions.begin_emptying(region)
    log.regions.pin(region)
    is_over = False
    try:
        is_over = await _append_again(log, _choose(log, region))
    finally:
        if is_over:  # whatever could not be appended again is lost
            log.lose(log.index.keys_of(region), "blocks_dropped")
        elif log.index.live(region) and log.regions.state(region) is RegionState.EMPTYING:
            log.regions.keep(region)
        log.regions.unpin(region)
    if not is_over:
        return Outcome.FAILED
    log.ledger.add("regions_emptied")
    waited_s = 0.0
    while log.regions.state(region) is RegionState.EMPTYING and waited_s < READERS_WAIT_S_MAX:
        await asyncio.sleep(_READERS_POLL_S)
        waited_s += _READERS_POLL_S
    is_free = log.regions.state(region) is RegionState.FREE
    return Outcome.DONE if is_free else Outcome.FULL


def _choose(log: BlockLog, region: int) -> list[int]:
    """Return the locations of the blocks to append again, in order."""
    log.sweep(region)
    first = region * log.geometry.slots
    locations = [first + slot for slot in log.index.slots_of(region)]
    # Blocks under an older key stay where that key is named, and go with it.
    excess = len(locations) - (affordable(log) if log.has_current_key(region) else 0)
    if excess > 0:
        # The blocks of a request lie in its order, mostly.
        by_use = sorted(locations, key=lambda at: (log.index.known(at).used_s, -at))
        locations = sorted(by_use[excess:])
    return locations


async def _append_again(log: BlockLog, locations: Sequence[int]) -> bool:
    """Append blocks again as far as there is room. False: the medium failed."""
    if not locations:
        return True
    block_bytes, stride = log.geometry.block_bytes, log.geometry.stride
    size = max(1, BATCH_BYTES // stride)
    memory = memoryview(mmap.mmap(-1, min(size, len(locations)) * stride))
    views = [memory[at : at + block_bytes] for at in range(0, len(memory), stride)]
    log.to_append_again = len(locations)
    try:
        for start in range(0, len(locations), size):
            batch = locations[start : start + size]
            ends = await _append_batch(log, batch, views[: len(batch)])
            if Outcome.FAILED in ends or (Outcome.FULL in ends and log.trouble.in_doubt):
                return False
            if Outcome.FULL in ends:
                break
            log.to_append_again -= len(batch)
    finally:
        log.to_append_again = 0
    return True


async def _append_batch(
    log: BlockLog, locations: Sequence[int], views: Sequence[memoryview]
) -> list[Outcome]:
    """Append some blocks again; returns what became of those that are not lost."""
    outcomes = await log.read_at(list(zip(locations, views, strict=True)))
    items = []
    for location, view, outcome in zip(locations, views, outcomes, strict=True):
        key = log.index.key_at(location)
        if key is not None and outcome is Outcome.DONE:
            items.append(log.item_again(key, view, location))
    ends = await log.append_again(items)
    return [outcome for outcome in outcomes if outcome is Outcome.FAILED] + ends
