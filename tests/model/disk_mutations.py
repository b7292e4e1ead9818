"""Mistakes that one could make in the disk tier, each as a context manager that makes it.

As in ``mutations``: each of these must be caught.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from stepped_device import SteppedDevice

from kvtier_backends.disk import format as disk_format
from kvtier_backends.disk.folder import recovery
from kvtier_backends.disk.format import ID_BYTES
from kvtier_backends.disk.log.appender import BlockAppender
from kvtier_backends.disk.log.batches import AppendBatch, insert
from kvtier_backends.disk.log.block_log import BlockLog
from kvtier_backends.disk.log.index_bulk import BulkLoad
from kvtier_backends.disk.log.live_blocks import LiveBlocks
from kvtier_backends.disk.log.regions import Budget, Regions, RegionState
from kvtier_backends.disk.log.tables import RegionTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.plugin_api.backend import Outcome
    from kvtier_backends.disk.device import Transfer
    from kvtier_backends.disk.log.index import BlockIndex
    from kvtier_backends.disk.log.regions import Extent

DISK_MUTATIONS: dict[str, Any] = {}
ENOUGH = 1 << 30


def mutation(make: Callable[[], Iterator[None]]) -> Callable[[], Any]:
    """Register a mutation under its function's name."""
    made = contextmanager(make)
    DISK_MUTATIONS[make.__name__] = made
    return made


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


@mutation
def skip_the_checksum_of_a_table() -> Iterator[None]:
    """A page that was torn is taken for what it says."""
    real = disk_format._check

    def check(page: Any, magic: bytes) -> None:
        body = bytes(page[: disk_format._CHECKED_BYTES])
        real(disk_format._with_checksum(body) if any(body) else page, magic)

    with patch.object(disk_format, "_check", check):
        yield


@mutation
def take_the_table_of_an_older_life_of_a_region() -> Iterator[None]:
    """The incarnation in a table page is not compared with the header's."""
    real = recovery.decode_table_untrusted
    at = disk_format._PREFIX.size

    def decode(page: Any, _incarnation: bytes) -> Any:
        return real(page, bytes(page[at : at + ID_BYTES]))

    with patch.object(recovery, "decode_table_untrusted", decode):
        yield


@mutation
def recover_the_older_copy() -> Iterator[None]:
    """Of two copies of a key, the one in the region that was opened first is taken."""
    real = BulkLoad.end_region

    def end_region(self: BulkLoad, region: int, sequence: int) -> int:
        return real(self, region, -sequence)

    with patch.object(BulkLoad, "end_region", end_region):
        yield


@mutation
def bring_a_removed_block_back() -> Iterator[None]:
    """A block that is reinserted is known again, whatever became of it meanwhile."""

    def put_into(self: AppendBatch, index: BlockIndex, first: int) -> None:
        index.remove_all(self.keys)
        insert(self, index, first)

    with patch.object(AppendBatch, "put_into", put_into):
        yield


@mutation
def tell_nobody_what_is_lost() -> Iterator[None]:
    """The tier above goes on believing that the blocks are there."""

    def lose(self: LiveBlocks, keys: Sequence[bytes], _counter: str) -> None:
        self._index.remove_all(keys)

    with patch.object(LiveBlocks, "lose", lose):
        yield


@mutation
def reinsert_without_a_budget() -> Iterator[None]:
    """Whatever is in a region that is reclaimed is written once more."""

    def affords(_self: Budget, _block_bytes: int, _overhead_bytes: int) -> int:
        return ENOUGH

    with patch.object(Budget, "affords", affords):
        yield


@mutation
def keep_what_is_too_old() -> Iterator[None]:
    """The sweeper finds nothing."""

    def sweep(_self: LiveBlocks, _region: int) -> None:
        return

    with patch.object(LiveBlocks, "sweep", sweep):
        yield


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


@mutation
def overwrite_the_only_version_of_a_table() -> Iterator[None]:
    """A page is written to where its last version is."""
    real = RegionTable._encode

    def encode(self: RegionTable, entries: Any) -> Any:
        if self._head is not None:
            self._next_version = self._head
        return real(self, entries)

    with patch.object(RegionTable, "_encode", encode):
        yield


@mutation
def let_the_index_overflow() -> Iterator[None]:
    """Nobody looks how many blocks the tier has room for."""

    def room(_self: BlockLog) -> int:
        return ENOUGH

    with patch.object(BlockLog, "_room", room):
        yield
