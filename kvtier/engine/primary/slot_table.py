"""Tracks the users and the state of each slot of the primary tier.

Purpose of the machine: the GPU and the threads of tiers read and write a slot's bytes while the
scheduler's thread decides about the slot's use, and they can't be interrupted. So a slot that may
still be touched is never given to another key. If its users can't be waited for (a load that is
late, a reset), the slot is taken from its key and quarantined, until each of them has released it.
A tier that hangs forever costs room, but never a wrong byte.

Coupling with others: a key's ``BlockState`` is computed from its slot's state and the tier
directory, and stored nowhere, so the three can't contradict each other. Links report when a tier
has released slots (``PromotionEnded``, ``PromotionLate``, ``SlotsReleased``, ``CascadeEnded``); a
host that knows that a cell's threads are gone sends ``TierFenced``, upon which the link releases
the rest. Time alone releases nothing. Reports from before a reset only release their slots.

# Invariant: a slot is in exactly one of free, filling, ready, quarantined.
#            Checked: SlotMoves, p1_a_slot_is_in_exactly_one_of_free_filling_ready_quarantined.
# Invariant: a filling slot has one source and no reader, from when it was freed on.
#            Checked: _free_ready, fail_fill, fill, p1_a_filling_slot_is_filled_by_one_named_source.
# Invariant: a ready slot's pins are its GPU loads plus its cascades.
#            Checked: unpin, p2_pins_are_gpu_loads_plus_cascades_that_read_now.
# Invariant: a quarantined slot belongs to no key; it has at least one user that
#            has not released it, and is freed once the last one has.
#            Checked: quarantine, release,
#            p1_a_slot_is_in_exactly_one_of_free_filling_ready_quarantined.

Legal moves are the rows of ``SLOT_TABLE``; a move without a row is a bug and raises
``InternalError``. State that all slots have is in one flat list of small numbers, which the
garbage collector handles quickly; state that few slots have at a time is in dicts. An object for
each slot reads better, but a million of them would be walked at each collection, and a lookup
would pay for an attribute where it now indexes a list. For the same reason the rows of the table
are copied into dicts of ints, one per event (``SlotMoves``), and others read the attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from kvtier.core.statistics import PrimaryStatistics
from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvtier.engine.account.sources import Account
    from kvtier.plugin_api.keys import Key, RequestId


class SlotState(IntEnum):
    """The use of a slot of the primary tier's memory."""

    FREE = 0
    FILLING = 1  #: one writer, no reader
    READY = 2  #: holds one key's bytes; readers are counted
    QUARANTINED = 3  #: belongs to no key, but may still be written or read


class SlotEvent(IntEnum):
    """An event that moves a slot."""

    TAKEN = 0
    FILLED = 1
    FILL_FAILED = 2  #: the writer reported failure, and has released it
    EVICTED = 3
    ABANDONED = 4  #: given up before its writer or readers have released it
    RELEASED = 5  #: the last user has released a quarantined slot
    FILLED_LATE = 6  #: the writer of a quarantined slot has filled and released it


SLOT_TABLE: Final[Mapping[tuple[SlotState, SlotEvent], SlotState]] = {
    (SlotState.FREE, SlotEvent.TAKEN): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.FILLED): SlotState.READY,
    (SlotState.FILLING, SlotEvent.FILL_FAILED): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.ABANDONED): SlotState.QUARANTINED,
    (SlotState.READY, SlotEvent.EVICTED): SlotState.FREE,
    (SlotState.READY, SlotEvent.ABANDONED): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.RELEASED): SlotState.FREE,
    (SlotState.QUARANTINED, SlotEvent.FILLED_LATE): SlotState.READY,
}


class SlotMoves(dict[int, int]):
    """The rows of one slot event: from state to state, as ints. No row: ``InternalError``."""

    def __init__(self, event: SlotEvent) -> None:
        rows = {int(state): int(to) for (state, when), to in SLOT_TABLE.items() if when is event}
        super().__init__(rows)
        self._event = event

    def __missing__(self, state: int) -> int:
        """Refuse a move that has no row."""
        raise InternalError(f"slot in state {SlotState(state).name} cannot be {self._event.name}")


SLOT_TAKEN: Final = SlotMoves(SlotEvent.TAKEN)
SLOT_FILLED: Final = SlotMoves(SlotEvent.FILLED)
SLOT_FILL_FAILED: Final = SlotMoves(SlotEvent.FILL_FAILED)
SLOT_EVICTED: Final = SlotMoves(SlotEvent.EVICTED)
SLOT_ABANDONED: Final = SlotMoves(SlotEvent.ABANDONED)
SLOT_RELEASED: Final = SlotMoves(SlotEvent.RELEASED)
SLOT_FILLED_LATE: Final = SlotMoves(SlotEvent.FILLED_LATE)

GPU: Final = -1
"""The source of a fill by the GPU; a fill by a secondary tier has the tier's number."""

_FILLING: Final = int(SlotState.FILLING)
_READY: Final = int(SlotState.READY)


@dataclass(frozen=True)
class SlotAudit:
    """The use of every slot. ``sources``: ``GPU``, or the number of the tier that fills."""

    states: tuple[SlotState, ...]
    slot_of: Mapping[Key, int]
    free: tuple[int, ...]  #: a slot that is in it twice would be allocated twice
    sources: Mapping[int, int]
    pins: Mapping[int, int]
    leased: frozenset[int]
    hits: frozenset[int]
    quarantined: Mapping[int, int]


class SlotTable:
    """The key, the state, the pins and the writer of every slot.

    Others read the public attributes, since a call would cost more than the read; only the
    methods here change them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.slot_of: dict[Key, int] = {}  #: of each key that is FILLING or READY
        self.state = [int(SlotState.FREE)] * count  # a bytearray takes twice the time
        self.pins: dict[int, int] = {}  #: each slot's readers (vLLM's ref_cnt), if any
        self.leased: set[int] = set()  #: filling or ready slots kept for one request
        self.gpu_fills: dict[int, RequestId] = {}  #: filling slots, and the request of the store
        self.tier_fills: dict[int, int] = {}  #: filling slots, and the tier that fills them
        self.hits: set[int] = set()  #: slots that a lookup of this step reported READY
        self.note_hit = self.hits.add  #: one slot, for a lookup; ``note_hits``: several
        self.note_hits = self.hits.update
        self.forget_hits = self.hits.clear  #: at the end of a step
        self.quarantined: dict[int, int] = {}
        self._freed: list[int] = []
        self._unused = 0  # slots from this one on were never taken
        self._gpu_quarantined: list[int] = []

    def free_count(self) -> int:
        """Return how many slots are free."""
        return len(self._freed) + self.count - self._unused

    def ready_count(self) -> int:
        """Return how many slots are READY: all that are in no other state."""
        filling = len(self.gpu_fills) + len(self.tier_fills)
        return self.count - self.free_count() - filling - len(self.quarantined)

    def statistics(
        self, promotion_slots: int, requests: int, account: Account
    ) -> PrimaryStatistics:
        """Count the slots in each state now, and add the counts kept by others."""
        return PrimaryStatistics(
            slot_count=self.count,
            free_slots=self.free_count(),
            filling_from_gpu_slots=len(self.gpu_fills),
            filling_from_tiers_slots=len(self.tier_fills),
            ready_slots=self.ready_count(),
            quarantined_slots=len(self.quarantined),
            pinned_slots=len(self.pins),
            promotion_slots=promotion_slots,
            requests=requests,
            counts=account.primary.snapshot(),
            sources=tuple(each.snapshot() for each in account.counts),
            misses=tuple(each.copy() for each in account.misses),
        )

    def audit(self) -> SlotAudit:
        """Return the use of every slot, frozen. For tests and diagnosis: it costs O(n)."""
        return SlotAudit(
            states=tuple(map(SlotState, self.state)),
            slot_of=self.slot_of.copy(),
            free=(*self._freed, *range(self._unused, self.count)),
            sources={**dict.fromkeys(self.gpu_fills, GPU), **self.tier_fills},
            pins=self.pins.copy(),
            leased=frozenset(self.leased),
            hits=frozenset(self.hits),
            quarantined=self.quarantined.copy(),
        )

    # --- filling ---

    def allocate_for_gpu(self, keys: Sequence[Key], request: RequestId) -> list[int]:
        """Take a free slot for each key, which the GPU will fill for ``request``.

        There must be enough free slots.
        """
        slots = self._allocate(len(keys))
        self.gpu_fills.update(dict.fromkeys(slots, request))
        self.slot_of.update(zip(keys, slots, strict=True))
        return slots

    def allocate_for_tier(self, key: Key, tier: int) -> int:
        """Take a free slot for a key, which ``tier`` will fill. There must be one."""
        (slot,) = self._allocate(1)
        self.tier_fills[slot] = tier
        self.slot_of[key] = slot
        return slot

    def unbind(self, key: Key) -> None:
        """Make a key ABSENT whose slot will not be filled for it."""
        del self.slot_of[key]

    def fill(self, slots: Sequence[int], source: dict[int, Any]) -> None:
        """Note that bytes have arrived; ``source`` is ``gpu_fills`` or ``tier_fills``."""
        # The GPU's stores are too many to check here: only the model checks that they have no pins.
        if source is self.tier_fills:
            assert self.pins.keys().isdisjoint(slots), "a slot was read while it was written"
        state = self.state
        for slot in slots:
            state[slot] = SLOT_FILLED[state[slot]]
            del source[slot]

    def fail_fill(self, slot: int) -> None:
        """Note that the writer failed, and has released the slot."""
        assert slot not in self.pins, "a slot was read while it was written"
        self.state[slot] = SLOT_FILL_FAILED[self.state[slot]]
        self._no_longer_filling(slot)
        self._freed.append(slot)

    # --- reading ---

    def pin(self, slots: Sequence[int]) -> None:
        """Add a reader to each slot."""
        pins = self.pins
        once = dict.fromkeys(slots, 1)
        if len(once) == len(slots) and pins.keys().isdisjoint(once):
            pins.update(once)  # the usual case, in half the time
            return
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1

    def unpin(self, slots: Sequence[int]) -> None:
        """Remove a reader from each slot. Each must have one."""
        pins = self.pins
        for slot in slots:
            count = pins.get(slot, 0)
            if count == 1:
                del pins[slot]
            elif count:
                pins[slot] = count - 1
            else:
                raise InternalError(f"slot {slot} has no reader")

    # --- evicting ---

    def is_held(self, slot: int) -> bool:
        """Return whether the slot is pinned, leased or being filled."""
        return slot in self.pins or slot in self.leased or self.state[slot] == _FILLING

    def lease(self, slot: int) -> None:
        """Reserve a filling or ready slot for one request."""
        self.leased.add(slot)

    def end_lease(self, slot: int) -> None:
        """Reserve the slot no longer."""
        self.leased.remove(slot)

    def evict(self, slots: Mapping[Key, int]) -> None:
        """Free ready slots without holders, and make their keys ABSENT."""
        slot_of = self.slot_of
        for key in slots:
            del slot_of[key]
        self._free_ready(slots.values())

    # --- quarantine ---

    def quarantine(self, slot: int, users: int) -> None:
        """Take the slot from its key while ``users`` may still write or read it."""
        assert users > 0, "nothing would ever release it"
        if self.state[slot] == _FILLING:
            self._no_longer_filling(slot)
        self.state[slot] = SLOT_ABANDONED[self.state[slot]]
        self.quarantined[slot] = users

    def release(self, slot: int) -> bool:
        """Note that a user has released a quarantined slot. False: it was not quarantined."""
        users = self.quarantined.get(slot)
        if users is None:
            return False
        assert users > 0, "released twice"
        if users > 1:
            self.quarantined[slot] = users - 1
        else:
            del self.quarantined[slot]
            self.state[slot] = SLOT_RELEASED[self.state[slot]]
            self._freed.append(slot)
        return True

    def restore(self, slot: int, key: Key) -> None:
        """Note that a quarantined slot was filled after all, for an ABSENT key, by its one user."""
        assert self.quarantined[slot] == 1, "others may still touch the slot"
        del self.quarantined[slot]
        self.state[slot] = SLOT_FILLED_LATE[self.state[slot]]
        self.slot_of[key] = slot

    def reset(self, gpu_reads: Mapping[int, int]) -> None:
        """Take every slot from its key; slots still in use are quarantined.

        ``gpu_reads``: how many of the GPU's loads read each slot.
        """
        self.slot_of.clear()
        self.leased.clear()
        going = []
        for slot, state in enumerate(self.state):
            if state == _FILLING:
                if slot in self.gpu_fills:
                    self._gpu_quarantined.append(slot)
                self.quarantine(slot, 1)
            elif state == _READY:
                loads = gpu_reads.get(slot, 0)
                users = self.pins.get(slot, 0) - loads
                if loads:
                    users += 1  # the GPU releases all its loads at once
                    self._gpu_quarantined.append(slot)
                if users:
                    self.quarantine(slot, users)
                else:
                    going.append(slot)
        self._free_ready(going)
        self.pins.clear()
        self.hits.clear()

    def gpu_flushed(self) -> None:
        """Note that the GPU has released every slot quarantined by a reset."""
        for slot in self._gpu_quarantined:
            self.release(slot)
        self._gpu_quarantined.clear()

    # --- the state of single slots; for calls that aren't made thousands of times a step ---

    def is_ready(self, slot: int) -> bool:
        """Return whether the slot holds readable bytes."""
        return self.state[slot] == _READY

    def are_ready(self, slots: Sequence[int]) -> bool:
        """Return whether all slots hold readable bytes; False if one is None, for no slot."""
        if None in slots:
            return False
        return list(map(self.state.__getitem__, slots)).count(_READY) == len(slots)

    def are_evictable(self, slots: Sequence[int]) -> bool:
        """Return whether all hold readable bytes, and none is pinned or leased."""
        nobodys = self.pins.keys().isdisjoint(slots) and self.leased.isdisjoint(slots)
        return nobodys and self.are_ready(slots)

    def _allocate(self, count: int) -> list[int]:
        freed, state = self._freed, self.state
        first = max(0, len(freed) - count)
        slots = freed[first:]
        del freed[first:]
        unused = self._unused + count - len(slots)
        slots += range(self._unused, unused)
        self._unused = unused
        for slot in slots:
            state[slot] = SLOT_TAKEN[state[slot]]
        return slots

    def _free_ready(self, slots: Collection[int]) -> None:
        assert self.pins.keys().isdisjoint(slots), "a slot comes free while it is read"
        state = self.state
        for slot in slots:
            state[slot] = SLOT_EVICTED[state[slot]]
        self._freed += slots

    def _no_longer_filling(self, slot: int) -> None:
        if self.gpu_fills.pop(slot, None) is None:
            del self.tier_fills[slot]
