"""How the state of a key, and that of a slot, may change."""

from __future__ import annotations

from kvtier.core.block_state import BlockState
from kvtier.engine.slot_table import SLOT_TABLE, SlotState

KEY_MOVES = {
    (BlockState.ABSENT, BlockState.PROBING),  # a lookup missed, and a tier may have it
    (BlockState.ABSENT, BlockState.FILLING),
    (BlockState.PROBING, BlockState.ABSENT),  # tiers said no or took too long, or nobody waits
    (BlockState.PROBING, BlockState.FILLING),
    (BlockState.FILLING, BlockState.READY),
    (BlockState.FILLING, BlockState.ABSENT),  # it failed, took too long, or was reset
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
