"""Reads blocks from any region, neighbours in one transfer.

A region is pinned while it is read, so nothing overwrites it. A block's data in the
index is copied before the read: the block may be gone by the end of it. Blocks are grouped into
runs: by location, and by the time they were stored.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome
from kvtier_backends.disk.log.batches import check_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier_backends.disk.log.context import LogContext
    from kvtier_backends.disk.log.index import BlockIndex
    from kvtier_backends.disk.log.live_blocks import LiveBlocks
    from kvtier_backends.disk.log.load_priority import LoadPriority
    from kvtier_backends.disk.log.region_faults import RegionFaults


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


class Encryption(NamedTuple):
    """How a block is encrypted."""

    tag: bytes  #: salt and tag
    key_id: bytes  #: the id of its encryption key
    digest: bytes  #: masked


class BlockReader:
    """Reads blocks that are in the index. Event loop only; only the device is waited for."""

    def __init__(
        self,
        context: LogContext,
        live: LiveBlocks,
        faults: RegionFaults,
        priority: LoadPriority,
    ) -> None:
        self._context = context
        self._index = context.index
        self._regions = context.regions
        self._geometry = context.geometry
        self._live = live
        self._faults = faults
        self._priority = priority

    async def load(
        self, blocks: Sequence[LoadBlock], encryption: dict[bytes, Encryption] | None = None
    ) -> list[Loaded]:
        """Read each block into its buffer; one result per block, in order.

        ``encryption`` is filled with each found block's encryption, by key, before any is read.
        """
        keys = [block.key for block in blocks]
        check_buffers([block.buffer for block in blocks], self._geometry.block_bytes)
        answers = [Loaded(Outcome.ABSENT)] * len(blocks)
        found = self._live.find(keys)
        there = [place for place, location in enumerate(found) if location is not None]
        if not there:
            return answers
        locations = [location for location in found if location is not None]
        runs = neighbours(locations, self._geometry.slots)
        digests = self._note_use(runs, locations)
        if encryption is not None:
            for run in runs:
                key_id = self._regions.key_id(locations[run[0]] // self._geometry.slots)
                for at in run:
                    tag = self._index.record(locations[at]).tag
                    encryption[keys[there[at]]] = Encryption(tag, key_id, digests[at])
        with self._priority.load():
            outcomes = await self._read(runs, locations, [blocks[place] for place in there])
        for place, outcome, digest in zip(there, outcomes, digests, strict=True):
            answers[place] = Loaded(outcome, digest if outcome is Outcome.DONE else None)
        return answers

    async def read_at(
        self, locations: Sequence[int], buffers: Sequence[memoryview]
    ) -> list[Outcome]:
        """Read the blocks at these locations into buffers, one each."""
        blocks = [LoadBlock(b"", buffer) for buffer in buffers]
        return await self._read(neighbours(locations, self._geometry.slots), locations, blocks)

    def _note_use(self, runs: Sequence[Sequence[int]], locations: Sequence[int]) -> list[bytes]:
        """Note that blocks are used; return their digests."""
        now_s = self._context.now_s()
        digests = [b""] * len(locations)
        for run in runs:
            first = locations[run[0]]
            self._index.use(first, now_s, len(run))
            for place, digest in zip(run, self._index.digests(first, len(run)), strict=True):
                digests[place] = digest
        return digests

    async def _read(
        self,
        runs: Sequence[Sequence[int]],
        locations: Sequence[int],
        blocks: Sequence[LoadBlock],
    ) -> list[Outcome]:
        """Read each run of places, whose locations are neighbours, in one transfer."""
        transfers = []
        for run in runs:
            together = [blocks[place] for place in run]
            buffers = [block.buffer for block in together]
            wants_report = any(block.on_read is not None for block in together)
            on_read = partial(self._on_read, together) if wants_report else None
            transfers.append(self._context.transfer(locations[run[0]], buffers, on_read))
        ends = await self._context.read_pinned(transfers)
        outcomes = [Outcome.DONE] * len(locations)
        for run, transfer, end in zip(runs, transfers, ends, strict=True):
            whole, rest = self._outcome_of(end, len(run))
            for place in run[whole:]:
                outcomes[place] = rest
            if isinstance(end, OSError):
                self._faults.read_failed(transfer, end)
        return outcomes

    def _on_read(self, blocks: Sequence[LoadBlock], end: int) -> None:
        """Report the blocks of a transfer that were read whole. In the thread that read them."""
        for block in blocks[: self._geometry.whole_blocks(end)]:
            if block.on_read is not None:
                block.on_read()

    def _outcome_of(self, end: int | OSError, blocks: int) -> tuple[int, Outcome]:
        """Return how many blocks of a transfer were read whole, and the outcome of the rest."""
        incidents = self._context.incidents
        if isinstance(end, OSError):
            incidents.report("load", "loads_failed", end, count=blocks)
            return 0, Outcome.FAILED
        whole = min(blocks, self._geometry.whole_blocks(end))
        if whole:
            incidents.success("load")
        if whole < blocks:
            reason = "a segment file is shorter than its blocks"
            incidents.report("load", "blocks_truncated", reason, count=blocks - whole)
        return whole, Outcome.DAMAGED
