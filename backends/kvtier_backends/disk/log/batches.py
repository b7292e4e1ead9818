"""Holds blocks on their way into the log, column by column.

A tuple per block, at each step, took more time than the digests did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.backend import StoreBlock
    from kvtier_backends.disk.format import EntryTuple
    from kvtier_backends.disk.log.index import BlockIndex, BlockRecord


class Reinsertion(NamedTuple):
    """One block to reinsert."""

    key: bytes
    buffer: memoryview
    record: BlockRecord
    source: int  #: its current location


class AppendBatch(NamedTuple):
    """Blocks to append; all columns except ``sources`` have one length."""

    keys: Sequence[bytes]
    buffers: Sequence[memoryview]
    digests: Sequence[bytes]
    tags: Sequence[bytes]
    stored_s: Sequence[int]
    used_s: Sequence[int]
    sources: Sequence[int] = ()  #: their current locations, if they are reinserted

    @property
    def is_reinserted(self) -> bool:
        """Whether the blocks are in the log already."""
        return bool(self.sources)

    @classmethod
    def new(cls, blocks: Sequence[StoreBlock], tags: Sequence[bytes], now_s: int) -> AppendBatch:
        """Return a batch of new blocks, at least one, that are stored now."""
        keys, buffers, digests = zip(*blocks, strict=True)
        times = [now_s] * len(blocks)
        return cls(keys, buffers, digests, tags, times, times)

    @classmethod
    def reinserted(cls, items: Sequence[Reinsertion]) -> AppendBatch:
        """Return a batch of blocks that keep their times."""
        return cls(
            [item.key for item in items],
            [item.buffer for item in items],
            [item.record.digest for item in items],
            [item.record.tag for item in items],
            [item.record.stored_s for item in items],
            [item.record.used_s for item in items],
            [item.source for item in items],
        )

    def cut(self, start: int, stop: int) -> AppendBatch:
        """Return a slice of the batch."""
        return AppendBatch(
            self.keys[start:stop],
            self.buffers[start:stop],
            self.digests[start:stop],
            self.tags[start:stop],
            self.stored_s[start:stop],
            self.used_s[start:stop],
            self.sources[start:stop],
        )

    def entries(self, first: int) -> list[EntryTuple]:
        """Return the blocks' table entries if they lie in the slots from ``first`` on."""
        slots = range(first, first + len(self.keys))
        return list(zip(slots, self.stored_s, self.keys, self.digests, self.tags, strict=True))

    def put_into(self, index: BlockIndex, first: int) -> None:
        """Put the blocks, which lie from location ``first`` on, into the index."""
        if not self.is_reinserted:
            # A key that is already in the index was stored twice concurrently: it is left out.
            insert(self, index, first)
        elif index.find(self.keys) == list(self.sources):
            index.remove_all(self.keys)
            insert(self, index, first)
        else:
            for step, (key, source) in enumerate(zip(self.keys, self.sources, strict=True)):
                # Otherwise it was removed, or stored again, while it was reinserted.
                if index.get(key) == source:
                    index.remove(key)
                    insert(self.cut(step, step + 1), index, first + step)


def insert(batch: AppendBatch, index: BlockIndex, first: int) -> None:
    """Add those of the blocks whose keys are not in the index."""
    index.insert_run(first, batch.keys, batch.digests, batch.tags, batch.stored_s, batch.used_s)


def check_buffers(buffers: Sequence[memoryview], block_bytes: int) -> None:
    """Raise ``Misuse`` for a buffer that is not a block."""
    for size in {buffer.nbytes for buffer in buffers} - {block_bytes}:
        raise Misuse(f"a buffer of {size} bytes is no block of {block_bytes}. Hand in whole slots.")
