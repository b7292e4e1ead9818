"""Every state machine of kvtier, as tables.

Legal moves are rows; a move without a row is a bug and raises
``InternalError``. The documentation draws its diagrams from these tables, and
the model checker asserts that nothing else ever happens.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping


class BlockState(IntEnum):
    """What the primary tier knows of one key."""

    ABSENT = 0  #: not here; ``lookup()`` says False
    PROBING = 1  #: tiers are being asked, or one has it and no slot is free yet; None
    FILLING = 2  #: a slot is being written; None
    READY = 3  #: readable; True


class BlockEvent(IntEnum):
    """What moves a key."""

    PROBE_WANTED = 0  #: a lookup missed and a tier may have it
    PROBE_MISSED = 1  #: every tier said no, or the deadline passed, or nobody waits any more
    FILL_STARTED = 2  #: a slot was given to the key
    FILL_DONE = 3
    FILL_FAILED = 4  #: also: its deadline passed, or a reset
    EVICTED = 5  #: also: a reset


BLOCK_TABLE: Final[Mapping[tuple[BlockState, BlockEvent], BlockState]] = {
    (BlockState.ABSENT, BlockEvent.PROBE_WANTED): BlockState.PROBING,
    (BlockState.ABSENT, BlockEvent.FILL_STARTED): BlockState.FILLING,
    (BlockState.PROBING, BlockEvent.PROBE_MISSED): BlockState.ABSENT,
    (BlockState.PROBING, BlockEvent.FILL_STARTED): BlockState.FILLING,
    (BlockState.FILLING, BlockEvent.FILL_DONE): BlockState.READY,
    (BlockState.FILLING, BlockEvent.FILL_FAILED): BlockState.ABSENT,
    (BlockState.READY, BlockEvent.EVICTED): BlockState.ABSENT,
}

ANSWERS: Final[Mapping[BlockState, bool | None]] = {
    BlockState.ABSENT: False,
    BlockState.PROBING: None,
    BlockState.FILLING: None,
    BlockState.READY: True,
}
"""What ``lookup()`` says for a key in each state."""


class SlotState(IntEnum):
    """What a slot of the primary tier's memory is used for."""

    FREE = 0
    FILLING = 1  #: one writer, no reader
    READY = 2  #: holds one key's bytes; readers are counted
    QUARANTINED = 3  #: belongs to nobody, but somebody may still write or read it


class SlotEvent(IntEnum):
    """What moves a slot."""

    TAKEN = 0
    FILLED = 1
    FILL_FAILED = 2  #: the writer reported failure: it has let go
    EVICTED = 3
    ABANDONED = 4  #: given up while its writer or readers have not let go
    RELEASED = 5  #: the last one has let go of a quarantined slot


SLOT_TABLE: Final[Mapping[tuple[SlotState, SlotEvent], SlotState]] = {
    (SlotState.FREE, SlotEvent.TAKEN): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.FILLED): SlotState.READY,
    (SlotState.FILLING, SlotEvent.FILL_FAILED): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.ABANDONED): SlotState.QUARANTINED,
    (SlotState.READY, SlotEvent.EVICTED): SlotState.FREE,
    (SlotState.READY, SlotEvent.ABANDONED): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.RELEASED): SlotState.FREE,
}


class BreakerState(IntEnum):
    """Whether a tier is given work."""

    CLOSED = 0  #: healthy: all work goes through
    OPEN = 1  #: sick: nothing is sent until the pause is over
    TRIAL = 2  #: one piece of work is sent, to see
    CUT_OFF = 3  #: its actor or backend broke; nothing is sent until it is restarted


class BreakerEvent(IntEnum):
    """What moves a breaker."""

    FAILED_TOO_OFTEN = 0
    PAUSE_OVER = 1
    SUCCEEDED = 2
    FAILED = 3
    BROKE = 4
    RESTARTED = 5


BREAKER_TABLE: Final[Mapping[tuple[BreakerState, BreakerEvent], BreakerState]] = {
    (BreakerState.CLOSED, BreakerEvent.FAILED_TOO_OFTEN): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PAUSE_OVER): BreakerState.TRIAL,
    (BreakerState.TRIAL, BreakerEvent.SUCCEEDED): BreakerState.CLOSED,
    (BreakerState.TRIAL, BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.BROKE): BreakerState.CUT_OFF,
    (BreakerState.OPEN, BreakerEvent.BROKE): BreakerState.CUT_OFF,
    (BreakerState.TRIAL, BreakerEvent.BROKE): BreakerState.CUT_OFF,
    (BreakerState.CUT_OFF, BreakerEvent.RESTARTED): BreakerState.CLOSED,
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
