"""Mistakes that one could make in the disk tier, most as one function in another's place.

As in ``mutations``: each of these must be caught.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from mutating import Mutations
from stepped_device import SteppedDevice

from kvtier_backends.disk import format as disk_format
from kvtier_backends.disk.folder import recovery
from kvtier_backends.disk.format import ID_BYTES
from kvtier_backends.disk.log.appender import BlockAppender
from kvtier_backends.disk.log.batches import AppendBatch, insert
from kvtier_backends.disk.log.block_log import BlockLog
from kvtier_backends.disk.log.index import BulkLoad
from kvtier_backends.disk.log.live_blocks import LiveBlocks
from kvtier_backends.disk.log.regions import Budget, Regions, RegionState
from kvtier_backends.disk.log.tables import RegionTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.plugin_api.backend import Outcome
    from kvtier_backends.disk.device import Transfer
    from kvtier_backends.disk.log.index import BlockIndex
    from kvtier_backends.disk.log.regions import Extent

DISK_MUTATIONS = Mutations()
mutation, in_place_of = DISK_MUTATIONS.add, DISK_MUTATIONS.in_place_of
ENOUGH = 1 << 30


@mutation
def drop_the_pin_of_a_region_that_is_read() -> Iterator[None]:
    """A region is free as soon as its blocks are gone, whoever reads it."""

    def pin(_self: Regions, _region: int) -> None:
        return

    def unpin(self: Regions, region: int) -> None:
        if self.state(region) is RegionState.RECLAIMING:
            self.end_reclaim(region)

    with patch.object(Regions, "pin", pin), patch.object(Regions, "unpin", unpin):
        yield


@in_place_of(disk_format, "_check")
def skip_the_checksum_of_a_table(real: Any, page: Any, magic: bytes) -> None:
    """A page that was torn is taken for what it says."""
    body = bytes(page[: disk_format._CHECKED_BYTES])
    real(disk_format._with_checksum(body) if any(body) else page, magic)


@mutation
def take_the_table_of_an_older_life_of_a_region() -> Iterator[None]:
    """The incarnation in a table page is not compared with the header's."""
    real = recovery.decode_table_untrusted
    at = disk_format._PREFIX.size

    def decode(page: Any, _incarnation: bytes) -> Any:
        return real(page, bytes(page[at : at + ID_BYTES]))

    with patch.object(recovery, "decode_table_untrusted", decode):
        yield


@in_place_of(BulkLoad, "end_region")
def recover_the_older_copy(real: Any, self: BulkLoad, region: int, sequence: int) -> int:
    """Of two copies of a key, the one in the region that was opened first is taken."""
    return real(self, region, -sequence)


@in_place_of(AppendBatch, "put_into")
def bring_a_removed_block_back(self: AppendBatch, index: BlockIndex, first: int) -> None:
    """A block that is reinserted is known again, whatever became of it meanwhile."""
    index.remove_all(self.keys)
    insert(self, index, first)


@in_place_of(LiveBlocks, "lose")
def tell_nobody_what_is_lost(self: LiveBlocks, keys: Sequence[bytes], _counter: str) -> None:
    """The tier above goes on believing that the blocks are there."""
    self._index.remove_all(keys)


@in_place_of(Budget, "affords")
def reinsert_without_a_budget(_self: Budget, _block_bytes: int, _overhead_bytes: int) -> int:
    """Whatever is in a region that is reclaimed is written once more."""
    return ENOUGH


@in_place_of(LiveBlocks, "sweep")
def keep_what_is_too_old(_self: LiveBlocks, _region: int) -> None:
    """The sweeper finds nothing."""


@mutation
def name_a_block_before_it_is_written() -> Iterator[None]:
    """The table says where a block is while it is not there yet."""
    real = BlockAppender._write

    async def write(self: BlockAppender, extent: Extent, batch: AppendBatch) -> list[Outcome]:
        await self._opener.table(extent.region).add(batch.entries(extent.first))
        return await real(self, extent, batch)

    with patch.object(BlockAppender, "_write", write):
        yield


@mutation
def write_pages_of_their_own_before_the_blocks() -> Iterator[None]:
    """The log hands both over in the order in which they lie on the disk."""
    real = SteppedDevice.write

    async def write(self: SteppedDevice, transfers: Sequence[Transfer]) -> Any:
        return await real(self, sorted(transfers, key=lambda transfer: transfer.at))

    with patch.object(SteppedDevice, "write", write):
        yield


@in_place_of(RegionTable, "_encode")
def overwrite_the_only_version_of_a_table(real: Any, self: RegionTable, entries: Any) -> Any:
    """A page is written to where its last version is."""
    if self._head is not None:
        self._next_version = self._head
    return real(self, entries)


@in_place_of(BlockLog, "_room")
def let_the_index_overflow(_self: BlockLog) -> int:
    """Nobody looks how many blocks the tier has room for."""
    return ENOUGH
