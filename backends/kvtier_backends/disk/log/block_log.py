"""The log of blocks: appends to the open region, reads from any, reclaims the emptiest.

``BlockLog`` puts the parts together: the reader, the appender, the opener of regions,
the reclaimer and the healer. Each gets the others that it needs, and none gets the log.

The log runs on one event loop; only the device's calls are waited for.
Each call is a task of its own that outlives a cancelled caller: the slots being
written and the regions being read are released when the device is
done with them, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.format import check_key_lengths
from kvtier_backends.disk.log.appender import BlockAppender
from kvtier_backends.disk.log.batches import AppendBatch, check_buffers
from kvtier_backends.disk.log.calls import Calls
from kvtier_backends.disk.log.healing import Healer
from kvtier_backends.disk.log.live_blocks import LiveBlocks
from kvtier_backends.disk.log.load_priority import LoadPriority
from kvtier_backends.disk.log.reader import BlockReader
from kvtier_backends.disk.log.region_faults import RegionFaults
from kvtier_backends.disk.log.region_opening import RegionOpener
from kvtier_backends.disk.log.region_reclaim import Reclaimer

if TYPE_CHECKING:
    from asyncio import Lock
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.plugin_api.backend import LoadBlock, Loaded, StoreBlock
    from kvtier_backends.disk.log.context import LogContext
    from kvtier_backends.disk.log.reader import Encryption


class BlockLog:
    """Blocks in regions of a device; ``capacity_blocks`` bounds how many are kept.

    ``on_lost`` is called with the keys of blocks that the log drops for its own reasons.
    ``ttl_s`` 0 means that blocks never expire. ``stores_beside_loads`` is how many
    stores go on while a load is in flight.
    """

    def __init__(
        self,
        context: LogContext,
        *,
        capacity_blocks: int,
        stores_beside_loads: int = 1,
        ttl_s: int,
        on_lost: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.index = context.index
        self.regions = context.regions
        self.namespace = context.identity.namespace  #: of all blocks in the index
        self.calls = Calls()
        self._context = context
        self._capacity_blocks = capacity_blocks
        priority = LoadPriority(stores_beside_loads)
        self._live = LiveBlocks(context, ttl_s=ttl_s, on_lost=on_lost)
        self._faults = RegionFaults(
            context.regions,
            context.incidents,
            context.counters,
            context.clock,
            on_lost=self._live.lose_region,
        )
        self._opener = RegionOpener(context, self._faults, self.calls)
        self._reader = BlockReader(context, self._live, self._faults, priority)
        self._appender = BlockAppender(context, self._opener, self._faults, priority, self.calls)
        self._reclaimer = Reclaimer(
            context, self._live, self._reader, self._appender, self._faults, self.calls
        )
        self._healer = Healer(context, self._faults, self._opener)

    @property
    def opening(self) -> Lock:
        """The lock that is held while a region is opened."""
        return self._opener.lock

    @property
    def appending(self) -> int:
        """Number of new blocks on their way into the index."""
        return self._appender.appending

    async def load(
        self, blocks: Sequence[LoadBlock], encryption: dict[bytes, Encryption] | None = None
    ) -> list[Loaded]:
        """Read each block into its buffer; one result per block, in order.

        ``encryption`` is filled with the encryption of each block found, by key.
        """
        return await self.calls.shielded(self._reader.load(blocks, encryption))

    async def store(
        self, blocks: Sequence[StoreBlock], tags: Sequence[bytes] = ()
    ) -> list[Outcome]:
        """Append the blocks that are not stored yet; one outcome per block, in order.

        ``tags`` belong to encrypted blocks, one each.
        """
        return await self.calls.shielded(self._store(blocks, tags or [b""] * len(blocks)))

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forget these keys; return how many were there."""
        return len(self.index.remove_all(keys))

    def has(self, key: bytes) -> bool:
        """Return whether a load would find the key. No I/O."""
        return self._live.has(key)

    def lose(self, keys: Sequence[bytes], counter: str) -> None:
        """Forget keys for the tier's own reasons: count them, and report them as lost."""
        self._live.lose(keys, counter)

    def sweep(self, region: int) -> None:
        """Forget a region's blocks that are older than ``ttl_s``."""
        self._live.sweep(region)

    async def heal(self) -> None:
        """Check whether failed regions work again."""
        await self._healer.heal()

    def abandon(self) -> None:
        """Forget all blocks, and store nothing any more: the folder has vanished."""
        self._opener.close()
        self._live.abandon()

    async def _store(self, blocks: Sequence[StoreBlock], tags: Sequence[bytes]) -> list[Outcome]:
        keys = [block.key for block in blocks]
        check_key_lengths(map(len, keys))
        check_buffers([block.buffer for block in blocks], self._context.geometry.block_bytes)
        outcomes = dict.fromkeys(keys, Outcome.DONE)
        places: dict[bytes, int] = {}  # of missing blocks, each key once
        for place, location in enumerate(self._live.find(keys)):
            if location is None:
                places.setdefault(keys[place], place)
        fits = list(places.values())
        room = self._room()
        if len(fits) > room:
            outcomes.update(dict.fromkeys(list(places)[room:], Outcome.FULL))
            del fits[room:]
        if fits:
            batch = AppendBatch.new(
                [blocks[place] for place in fits],
                [tags[place] for place in fits],
                self._context.now_s(),
            )
            ends = await self._appender.append(batch, self._reclaimer.make_room, self._open_ahead)
            outcomes.update(zip(batch.keys, ends, strict=True))
            self._open_ahead()
            self._reclaim_ahead()
        answers = [outcomes[key] for key in keys]
        if Outcome.FULL in answers:
            self._faults.report_full(answers.count(Outcome.FULL))
        return answers

    def _room(self) -> int:
        """Return how many more blocks the capacity allows."""
        return max(0, self._capacity_blocks - len(self.index) - self._appender.appending)

    def _open_ahead(self) -> None:
        """Open the next regions before a store has to wait for them."""
        regions = self.regions
        if not (regions.ahead_missing and self._may_look_ahead() and self._opener.may_open_ahead()):
            return
        if regions.has_next and self._reclaimer.may_search():
            self._reclaimer.reclaim_dead()
        if regions.next_to_open_ahead():
            self._opener.open_ahead()

    def _reclaim_ahead(self) -> None:
        """Reclaim a region before a store has to wait for it, if no other can be opened."""
        regions = self.regions
        if regions.has_next or not self._may_look_ahead():
            return
        if regions.next_to_open(for_reinsertion=False) is None:
            self._reclaimer.reclaim_ahead()

    def _may_look_ahead(self) -> bool:
        return not (self._opener.lock.locked() or self._faults.in_doubt)
