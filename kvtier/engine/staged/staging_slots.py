"""Tracks the staging slots of one tier: the free ones, and the block that holds each other one.

# Invariant: a slot is either free or held, by one block. Checked: allocate, free,
#            a_staging_slot_is_free_or_held_by_one_block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class StagedTransfer:
    """One job of the other program, until all its blocks have ended."""

    __slots__ = (
        "deadline",
        "epoch",
        "failed",
        "is_given_up",
        "is_load",
        "keys",
        "moved",
        "number",
        "request",
        "slots",
        "succeeded",
    )

    def __init__(
        self,
        number: int,
        request: RequestId,
        keys: tuple[Key, ...],
        slots: tuple[int, ...],
        *,
        is_load: bool,
        epoch: int,
        deadline: float,
    ) -> None:
        """``slots``: the program's own, one for each key. ``deadline``: seconds of the clock."""
        self.number = number
        self.request = request
        self.keys = keys
        self.slots = slots
        self.is_load = is_load
        self.epoch = epoch
        self.deadline = deadline
        self.is_given_up = False
        self.succeeded: list[Key] = []
        self.failed: list[Key] = []
        self.moved = 0

    def give_up(self) -> None:
        """Note that no more work is to be started for it."""
        self.is_given_up = True

    def end_block(self, key: Key, *, success: bool, moved: bool = False) -> bool:
        """Record how one block ended. True: it was the last one."""
        (self.succeeded if success else self.failed).append(key)
        self.moved += moved
        ended = len(self.succeeded) + len(self.failed)
        assert ended <= len(self.keys), "a block ended twice"
        return ended == len(self.keys)


class StagedBlock:
    """One block of a transfer that waits, or holds a staging slot."""

    __slots__ = ("index", "is_copying", "is_wanted", "transfer")

    def __init__(self, transfer: StagedTransfer, index: int) -> None:
        self.transfer = transfer
        self.index = index
        self.is_copying = False  # between its staging slot and the program's
        self.is_wanted = True  # the transfer still waits for it

    @property
    def key(self) -> Key:
        """The block's key."""
        return self.transfer.keys[self.index]

    @property
    def slot(self) -> int:
        """The program's slot."""
        return self.transfer.slots[self.index]

    def begin_copy(self) -> None:
        """Note that the program's slot is being read or written."""
        self.is_copying = True

    def end_copy(self) -> None:
        """Note that the copy has ended."""
        self.is_copying = False

    def stop_waiting(self) -> None:
        """Note that the block has ended for its transfer. Anything later is dropped."""
        assert self.is_wanted, "a block ended twice"
        self.is_wanted = False


class StagingSlots:
    """All staging slots."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._held: dict[int, StagedBlock] = {}
        self._stores = 0  # slots held by stores

    @property
    def free_count(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def store_count(self) -> int:
        """How many slots stores hold."""
        return self._stores

    def allocate(self, blocks: Sequence[StagedBlock]) -> tuple[int, ...]:
        """Give each block a slot. Enough must be free."""
        assert len(blocks) <= len(self._free)
        allocated = tuple(self._free.pop() for _ in blocks)
        for slot, block in zip(allocated, blocks, strict=True):
            assert slot not in self._held
            self._held[slot] = block
            self._stores += not block.transfer.is_load
        return allocated

    def holders(self, slots: Iterable[int]) -> list[StagedBlock]:
        """Return the blocks that hold these slots."""
        return [self._held[slot] for slot in slots]

    def free(self, slots: Iterable[int]) -> None:
        """Take back slots that are not touched any more."""
        for slot in slots:
            block = self._held.pop(slot)
            assert not block.is_copying, "a staging slot is freed while it is copied"
            self._stores -= not block.transfer.is_load
            self._free.append(slot)
        assert len(self._free) + len(self._held) == self._count

    def held(self) -> Collection[StagedBlock]:
        """Return all blocks that hold a slot."""
        return self._held.values()
