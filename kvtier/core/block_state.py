"""Defines the state that ``lookup()`` sees of one key: computed at each lookup, never stored.

It has no table of moves, since nothing moves it: a key has a slot or it has none, and a slot has
a state (``kvtier/engine/primary/slot_table.py``). For a key without one, the tier directory has
the tiers it may be in (``kvtier/engine/primary/tier_directory.py``). So the state can contradict
neither. The model checker asserts in which order a key's states may follow one another.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class BlockState(IntEnum):
    """State of one key in the primary tier."""

    ABSENT = 0  #: no slot, and no tier has it
    PROBING = 1  #: no slot; tiers are being probed, or one has it and no slot is free
    FILLING = 2  #: its slot is being written
    READY = 3  #: its slot is readable


ANSWERS: Final[Mapping[BlockState, bool | None]] = {
    BlockState.ABSENT: False,
    BlockState.PROBING: None,
    BlockState.FILLING: None,
    BlockState.READY: True,
}
"""Result of ``lookup()`` for a key in each state."""
