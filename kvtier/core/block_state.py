"""What ``lookup()`` knows of one key. It is worked out when it is asked for, and kept nowhere.

A key has a slot or it has none, and a slot has a state (``kvtier/engine/slot_table.py``).
Of a key without one, the tier directory says where it may be
(``kvtier/engine/tier_directory.py``). So nothing can disagree with either. The
model checker asserts in which order a key's states may follow one another.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class BlockState(IntEnum):
    """What the primary tier knows of one key."""

    ABSENT = 0  #: no slot, and no tier has it
    PROBING = 1  #: no slot; tiers are being asked, or one has it and no slot is free
    FILLING = 2  #: its slot is being written
    READY = 3  #: its slot is readable


ANSWERS: Final[Mapping[BlockState, bool | None]] = {
    BlockState.ABSENT: False,
    BlockState.PROBING: None,
    BlockState.FILLING: None,
    BlockState.READY: True,
}
"""What ``lookup()`` says for a key in each state."""
