"""Who uses which slot of the primary tier, and for what.

# Invariant: a slot is in exactly one of free, filling, ready, quarantined.
# Invariant: a filling slot has one source and no reader.
# Invariant: a ready slot's pins are its GPU loads plus its cascades.
# Invariant: a quarantined slot belongs to no key; it has at least one user that
#            has not let go, and comes free when the last one has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.errors import InternalError
from kvtier.states import (
    SlotState,
    slot_abandoned,
    slot_evicted,
    slot_fill_failed,
    slot_filled,
    slot_released,
    slot_taken,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.messages import Key, RequestId

GPU: Final = -1
"""The source of a fill, where a secondary tier would be its number."""

_READY: Final = int(SlotState.READY)
_FILLING: Final = int(SlotState.FILLING)


class SlotTable:
    """The state, the key, the readers and the writer of every slot."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.state = bytearray(count)
        self.key_of: list[Key | None] = [None] * count
        self.gpu_readers = [0] * count
        self.tier_readers = [0] * count
        self.leases = [0] * count
        self.source = [GPU] * count
        self.writer: list[RequestId] = [""] * count  #: whose GPU store was the last to take it
        self.hit_step = [-1] * count
        self.free = list(range(count - 1, -1, -1))
        self.quarantined: dict[int, int] = {}
        self.pinned = 0  #: slots with a reader
        self.filling_from_gpu = 0
        self.filling_from_tiers = 0
        self._gpu_quarantined: list[int] = []

    def take(self, keys: Sequence[Key], source: int) -> list[int]:
        """Give each key a free slot, to be filled by ``source``. There must be enough."""
        free, state, key_of, sources = self.free, self.state, self.key_of, self.source
        slots = []
        for key in keys:
            slot = free.pop()
            state[slot] = slot_taken(state[slot])
            key_of[slot] = key
            sources[slot] = source
            slots.append(slot)
        if source == GPU:
            self.filling_from_gpu += len(slots)
        else:
            self.filling_from_tiers += len(slots)
        return slots

    def fill(self, slots: Sequence[int]) -> None:
        """Note that these slots' bytes have arrived, all from one source."""
        state = self.state
        for slot in slots:
            state[slot] = slot_filled(state[slot])
        if slots and self.source[slots[0]] == GPU:
            self.filling_from_gpu -= len(slots)
        else:
            self.filling_from_tiers -= len(slots)

    def fail_fill(self, slot: int) -> None:
        """Note that the writer failed, and has let go."""
        self.state[slot] = slot_fill_failed(self.state[slot])
        self._no_longer_filling(slot)
        self._vacate(slot)
        self.free.append(slot)

    def pin(self, readers: list[int], slots: Iterable[int]) -> None:
        """Add a reader to each slot; ``readers`` is ``gpu_readers`` or ``tier_readers``."""
        for slot in slots:
            if not self.gpu_readers[slot] and not self.tier_readers[slot]:
                self.pinned += 1
            readers[slot] += 1

    def unpin(self, readers: list[int], slots: Iterable[int]) -> None:
        """Take a reader from each slot. Each must have one."""
        for slot in slots:
            if readers[slot] < 1:
                raise InternalError(f"slot {slot} has no such reader")
            readers[slot] -= 1
            if not self.gpu_readers[slot] and not self.tier_readers[slot]:
                self.pinned -= 1

    def evict(self, slots: Sequence[int]) -> None:
        """Free ready slots that nobody holds."""
        state, key_of, hit_step = self.state, self.key_of, self.hit_step
        for slot in slots:
            state[slot] = slot_evicted(state[slot])
            key_of[slot] = None
            hit_step[slot] = -1
        self.free += slots

    def quarantine(self, slot: int, users: int) -> None:
        """Take the slot from its key while ``users`` may still write or read it."""
        if self.state[slot] == _FILLING:
            self._no_longer_filling(slot)
        self.state[slot] = slot_abandoned(self.state[slot])
        self._vacate(slot)
        self.quarantined[slot] = users

    def let_go(self, slot: int) -> bool:
        """Note that one user of a quarantined slot has let go. False: it was not quarantined."""
        users = self.quarantined.get(slot)
        if users is None:
            return False
        if users > 1:
            self.quarantined[slot] = users - 1
        else:
            del self.quarantined[slot]
            self.state[slot] = slot_released(self.state[slot])
            self.free.append(slot)
        return True

    def is_ready(self, slot: int) -> bool:
        """Tell whether the slot holds readable bytes."""
        return self.state[slot] == _READY

    def is_filling_from(self, slot: int, source: int) -> bool:
        """Tell whether ``source`` is filling the slot."""
        return self.state[slot] == _FILLING and self.source[slot] == source

    def is_held(self, slot: int) -> bool:
        """Tell whether the slot is pinned, leased or being filled."""
        return bool(
            self.gpu_readers[slot]
            or self.tier_readers[slot]
            or self.leases[slot]
            or self.state[slot] == _FILLING
        )

    def reset(self, unsent: Iterable[int]) -> None:
        """Take every slot from its key; whatever is still in use is quarantined.

        ``unsent``: slots meant for promotions that were never sent to a tier.
        """
        for slot in unsent:
            self.fail_fill(slot)
        for slot, state in enumerate(self.state):
            if state == _FILLING:
                if self.source[slot] == GPU:
                    self._gpu_quarantined.append(slot)
                self.quarantine(slot, 1)
            elif state == _READY:
                users = self.tier_readers[slot]
                if self.gpu_readers[slot]:
                    users += 1
                    self._gpu_quarantined.append(slot)
                if users:
                    self.quarantine(slot, users)
                else:
                    self.leases[slot] = 0
                    self.evict((slot,))

    def gpu_flushed(self) -> None:
        """Note that the GPU has let go of every slot quarantined by a reset."""
        for slot in self._gpu_quarantined:
            self.let_go(slot)
        self._gpu_quarantined.clear()

    def ready_count(self) -> int:
        """How many slots are READY: whatever is in no other state."""
        filling = self.filling_from_gpu + self.filling_from_tiers
        return self.count - len(self.free) - filling - len(self.quarantined)

    def _no_longer_filling(self, slot: int) -> None:
        if self.source[slot] == GPU:
            self.filling_from_gpu -= 1
        else:
            self.filling_from_tiers -= 1

    def _vacate(self, slot: int) -> None:
        if self.gpu_readers[slot] or self.tier_readers[slot]:
            self.pinned -= 1
        self.key_of[slot] = None
        self.gpu_readers[slot] = self.tier_readers[slot] = self.leases[slot] = 0
        self.hit_step[slot] = -1
