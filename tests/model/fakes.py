"""What is not real in the model: the GPU, and the storage behind each tier.

Both copy real bytes between themselves and the slots, piece by piece, at
moments of the test's choosing. So a slot that is given away too early shows
as bytes that belong to somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import Outcome, block_digest
from kvtier.tier import driver_messages as d
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.leftovers import Unannounced

if TYPE_CHECKING:
    from world import World

    from kvtier.plugin_api.keys import Key
    from tests.support.cell import Batch, TestTier

PIECES = 3


def copy_piece(target: memoryview | bytearray, source: memoryview | bytes, piece: int) -> None:
    """Copy one of the three pieces of a block."""
    size = len(source) // PIECES
    target[piece * size : (piece + 1) * size] = source[piece * size : (piece + 1) * size]


@dataclass
class GpuStore:
    """The GPU writes one block into the slot it was granted."""

    request: str
    key: Key
    slot: int
    data: bytes
    epoch: int
    pieces: int = 0
    is_stale: bool = False  # granted before a reset


@dataclass
class GpuLoad:
    """The GPU reads blocks; ``expected`` must be there from prepare_load to complete_load."""

    request: str
    keys: list[Key]
    slots: list[int]
    expected: list[bytes]
    epoch: int
    is_stale: bool = False


class Gpu:
    """All that the GPU is doing with slots."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stores: list[GpuStore] = []
        self.loads: list[GpuLoad] = []
        self.late: list[GpuStore | GpuLoad] = []  # flushed, but the scheduler may be told yet

    def write_piece(self, store: GpuStore) -> None:
        """Write the next third of the block."""
        if store.pieces < PIECES:
            copy_piece(self.world.memory.view(store.slot), store.data, store.pieces)
            store.pieces += 1

    def write_rest(self, store: GpuStore) -> None:
        """Write what is missing."""
        while store.pieces < PIECES:
            self.write_piece(store)

    def reset(self) -> None:
        """Everything begun so far is stale; the GPU goes on with it until it is flushed."""
        for work in (*self.stores, *self.loads):
            work.is_stale = True

    def flush(self) -> None:
        """End all that is stale, late writes included."""
        for store in self.stores:
            if store.is_stale:
                self.write_rest(store)
        self.late += [each for each in (*self.stores, *self.loads) if each.is_stale]
        self.stores = [each for each in self.stores if not each.is_stale]
        self.loads = [each for each in self.loads if not each.is_stale]


@dataclass
class Work:
    """One batch at a device: what has been copied so far."""

    batch: Batch
    buffers: list[bytearray]  # store: what was read from the slots
    digests: list[bytes]
    pieces: int = 0


class FakeDevice:
    """One tier's storage and the driver in front of it: real bytes, checked digests."""

    def __init__(self, world: World, tier: TestTier) -> None:
        self.world = world
        self.tier = tier
        self.blocks: dict[Key, tuple[bytes, bytes]] = {}  # key → bytes, digest
        self.orphans: list[Batch] = []  # its tier broke; the threads go on
        self._works: dict[int, Work] = {}
        self.stuck: set[Key] = set()  # damaged, and their removal is to fail
        self.taken: set[Key] = set()  # removed by others, and not loaded in vain since
        self.blocks_max = 0  # more than the capacity after a restart with less of it
        self._at_start: list[Key] = []
        self.untold: list[Key] = []  # of what there was at the start, as it was taken down then
        self._gone = Unannounced()  # the driver's own

    def restart(self, *, keeps: bool, more: int) -> None:
        """Begin anew, with the blocks from before or without; so many more, if they are known."""
        self._works.clear()
        if not keeps:
            self.blocks.clear()
        known = ((key, data) for key, data in self.world.committed.items() if data)
        for key, versions in islice((e for e in known if e[0] not in self.blocks), more):
            data = min(versions)
            self.blocks[key] = (data, block_digest(key, memoryview(data)))
        self.blocks_max = len(self.blocks)
        self._gone = Unannounced()
        # Each is told twice, the second time in a batch with others: nobody promised otherwise.
        self._at_start = list(self.blocks) if self.tier.policy is not None else []
        self.untold = []

    def announce_contents(self, message: d.AnnounceContents) -> None:
        """Tell the tier of what there was at the start, or of what it has asked for."""
        if message.keys:
            self.tier.mailbox.post(d.ContentsFound(message.keys, again=True))
        else:
            self.untold = self._at_start
            self._tell_end()

    def tell(self, count: int) -> None:
        """Tell the tier of so many blocks more, and once more of the one before."""
        if self.untold:
            found = self._gone.still_there(self.untold[:count] + self.untold[:1])
            del self.untold[:count]
            self.tier.mailbox.post(d.ContentsFound(keys=found))
            self._tell_end()

    def _tell_end(self) -> None:
        if not self.untold:
            self.tier.mailbox.post(d.ContentsAnnounced())

    def lose(self, key: Key) -> None:
        """Lose a block, and say so."""
        self.blocks.pop(key, None)
        self._gone.removed((key,))

    def break_down(self) -> None:
        """Go on with what it was asked for, though nobody waits for it any more."""
        self.orphans = list(self.tier.batches)
        self.untold = []

    def fence(self) -> None:
        """Release all slots."""
        self.orphans = []

    def is_at_work(self) -> bool:
        """Tell whether anything goes on here but batches."""
        return bool(self.untold)

    def work(self, only: type[object]) -> bool:
        """End the oldest batch of a kind. False: there is none, and nothing is left to tell."""
        if self.untold and only is object:
            self.tell(1)
            return True
        batch = next((each for each in self.tier.batches if isinstance(each, only)), None)
        if batch is not None:
            self.tier.answer(batch, self.end(batch, 0))
        return batch is not None

    def work_of(self, batch: Batch) -> Work:
        """Begin a batch, or go on with it. A store's digests are taken when it begins."""
        work = self._works.get(batch.batch)
        if work is None:
            work = self._works[batch.batch] = Work(batch, [], [])
            if isinstance(batch, d.StoreBatch):
                for key in batch.remove:
                    self.lose(key)
                views = self.world.memory.views(batch.slots)
                work.buffers = [bytearray(len(view)) for view in views]
                work.digests = [
                    block_digest(key, view) for key, view in zip(batch.keys, views, strict=True)
                ]
        return work

    def copy(self, batch: Batch) -> None:
        """Move the next third of each block of a batch."""
        work = self.work_of(batch)
        if isinstance(batch, d.ProbeBatch | d.RemoveBatch) or work.pieces >= PIECES:
            return
        for number, (key, slot) in enumerate(zip(batch.keys, batch.slots, strict=True)):
            view = self.world.memory.view(slot)
            if isinstance(batch, d.StoreBatch):
                copy_piece(work.buffers[number], view, work.pieces)
            elif key in self.blocks:
                copy_piece(view, self.blocks[key][0], work.pieces)
        work.pieces += 1

    def copy_rest(self, batch: Batch) -> None:
        """Move what is missing."""
        if not isinstance(batch, d.ProbeBatch | d.RemoveBatch):
            while self.work_of(batch).pieces < PIECES:
                self.copy(batch)

    def end(self, batch: Batch, failing: int) -> tuple[Outcome, ...]:
        """Return the outcomes; bit i of ``failing``: block i fails in the middle of the copy."""
        if not failing or isinstance(batch, d.ProbeBatch):
            self.copy_rest(batch)
        else:
            self.work_of(batch)
            if ~failing & ((1 << len(batch.keys)) - 1):
                self.copy_rest(batch)
        outcomes = tuple(
            self._fail_one(batch, number, key)
            if failing >> number & 1
            else self._end_one(batch, number, key)
            for number, key in enumerate(batch.keys)
        )
        self._works.pop(batch.batch, None)
        if isinstance(batch, d.ProbeBatch) and self.untold:
            present = [key for key in batch.keys if key in self.blocks]
            self.tier.mailbox.post(d.ContentsFound(self._gone.still_there(present)))
        return outcomes

    def _fail_one(self, batch: Batch, number: int, key: Key) -> Outcome:
        """Fail a block. What was stored of it may be there all the same: nobody can tell.

        Or there was no room for it, and what was there before stays.
        """
        if isinstance(batch, d.StoreBatch) and number % 2:
            return Outcome.FULL
        if isinstance(batch, d.StoreBatch) and self._has_room_for(key):
            work = self.work_of(batch)
            self.blocks.setdefault(key, (bytes(work.buffers[number]), work.digests[number]))
        return Outcome.FAILED

    def _end_one(self, batch: Batch, number: int, key: Key) -> Outcome:
        if isinstance(batch, d.RemoveBatch):
            self.lose(key)
            return Outcome.DONE
        if isinstance(batch, d.ProbeBatch):
            return Outcome.DONE if key in self.blocks else Outcome.ABSENT
        if isinstance(batch, d.StoreBatch):
            return self.p14_what_a_tier_stores_was_committed(batch, number, key)
        self.taken.discard(key)  # now the tier knows
        held = self.blocks.get(key)
        if held is None:
            return Outcome.ABSENT
        # As the driver of a tier cell: what is in the slot is checked, not what was meant.
        if block_digest(key, self.world.memory.view(batch.slots[number])) != held[1]:
            if key not in self.stuck:
                self.lose(key)
            self.stuck.discard(key)
            return Outcome.DAMAGED
        return Outcome.DONE

    def _has_room_for(self, key: Key) -> bool:
        actor = self.tier.actor
        is_bounded = isinstance(actor, BoundedTier)
        return not is_bounded or key in self.blocks or len(self.blocks) < actor.audit().capacity

    def p14_what_a_tier_stores_was_committed(
        self, batch: d.StoreBatch, number: int, key: Key
    ) -> Outcome:
        """By its name: in the generation that it is stored for."""
        work = self.work_of(batch)
        data = bytes(work.buffers[number])
        assert data in self.world.committed[key], f"a tier was given {data!r} for {key!r}"
        if not self._has_room_for(key):
            return Outcome.FULL
        self.blocks[key] = (data, work.digests[number])
        self._gone.stored((key,), (Outcome.DONE,))
        return Outcome.DONE

    def damage(self, key: Key) -> None:
        """Flip a byte of a copy, behind everybody's back."""
        data, digest = self.blocks[key]
        self.blocks[key] = (bytes([data[0] ^ 0xFF]) + data[1:], digest)

    def is_sound(self, key: Key) -> bool:
        """Tell whether there is a copy that passes its check."""
        held = self.blocks.get(key)
        return held is not None and block_digest(key, memoryview(held[0])) == held[1]
