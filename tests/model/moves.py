"""The state of a key; how it, and that of a slot, may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core.block_state import BlockState
from kvtier.engine.primary.slot_table import SLOT_TABLE, SlotState

if TYPE_CHECKING:
    from kvtier.engine.primary.audit import PrimaryAudit
    from kvtier.plugin_api.keys import Key

KEY_MOVES = {
    (BlockState.ABSENT, BlockState.PROBING),  # a lookup missed, and a tier may have it
    (BlockState.ABSENT, BlockState.FILLING),
    (BlockState.PROBING, BlockState.ABSENT),  # tiers said no or took too long, or nobody waits
    (BlockState.PROBING, BlockState.FILLING),
    (BlockState.FILLING, BlockState.READY),
    (BlockState.FILLING, BlockState.ABSENT),  # it failed, took too long, or was reset
    (BlockState.ABSENT, BlockState.READY),  # a tier delivers what nobody waits for any more
    (BlockState.PROBING, BlockState.READY),
    (BlockState.READY, BlockState.ABSENT),  # evicted, or reset
}
"""How a key's state may change. It is worked out from others, so nothing else holds it to this."""

SLOT_MOVES = {(int(before), int(after)) for (before, _), after in SLOT_TABLE.items()}


class CheckedStates(bytearray):
    """The states of all slots; each move must be a row of the table."""

    def __setitem__(self, slot: object, after: object) -> None:
        """Move one slot."""
        assert isinstance(slot, int)
        assert isinstance(after, int)
        move = (self[slot], after)
        assert move in SLOT_MOVES, f"slot {slot}: {SlotState(move[0])!r} → {SlotState(after)!r}"
        super().__setitem__(slot, after)


def state_in(seen: PrimaryAudit, key: Key) -> BlockState:
    """Return the key's state. It is worked out without asking the primary tier's lookups."""
    slot = seen.slots.slot_of.get(key)
    if slot is not None:
        is_ready = seen.slots.states[slot] is SlotState.READY
        return BlockState.READY if is_ready else BlockState.FILLING
    return BlockState.PROBING if key in seen.directory.waiters else BlockState.ABSENT
