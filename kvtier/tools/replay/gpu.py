"""Simulates the GPU: fills slots with the right bytes, and reads and checks them.

A store writes each block's bytes into its slot. A load copies slots into a
scratch buffer, as the GPU would, and compares the copy with the bytes of the key, so a slot that is
written while it is read is detected too.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tools.replay.content import WORD_BYTES, BlockContent

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_BYTES: Final = 4096
"""Bytes of each block that ``Verify.HEAD`` compares."""

SCRATCH_BYTES: Final = 1 << 20
"""Bytes copied and checked at once: they fit into a processor's cache."""


class Verify(Enum):
    """The part of each loaded block that is compared."""

    FULL = "full"
    HEAD = "head"
    OFF = "off"


class WrongBlock(NamedTuple):
    """The place at which a loaded block has other bytes than those of its key."""

    key: bytes
    slot: int
    offset_bytes: int
    expected: int  #: the 8 bytes from there on, as a number
    found: int


class StandInGpu:
    """Owns the slots' memory, and does the work of an engine's GPU on it."""

    def __init__(self, slot_count: int, block_bytes: int, verify: Verify) -> None:
        self._content = BlockContent(block_bytes)
        self.memory = SlotMemory.anonymous(slot_count, block_bytes)
        self._rows = np.frombuffer(self.memory.buffer, dtype=np.uint64).reshape(slot_count, -1)
        self._verify = verify
        self._scratch = np.empty(
            (max(1, SCRATCH_BYTES // block_bytes), self._content.words), dtype=np.uint64
        )
        self.blocks_stored = 0
        self.blocks_loaded = 0
        self.blocks_checked = 0

    def store(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Write the bytes of ``keys`` into ``slots``."""
        for key, slot in zip(keys, slots, strict=True):
            self._content.fill(self._rows[slot], key)
        self.blocks_stored += len(keys)

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[WrongBlock]:
        """Read ``slots``; return those that do not hold the bytes of ``keys``."""
        wrong = []
        for start in range(0, len(keys), len(self._scratch)):
            end = start + len(self._scratch)
            wrong += self._load_batch(keys[start:end], slots[start:end])
        self.blocks_loaded += len(keys)
        return wrong

    def _load_batch(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[WrongBlock]:
        copies = self._scratch[: len(slots)]
        # With "clip" numpy copies straight into ``out``; slots are never out of range.
        np.take(self._rows, slots, axis=0, out=copies, mode="clip")
        if self._verify is Verify.OFF:
            return []
        if self._verify is Verify.HEAD:
            copies = copies[:, : HEAD_BYTES // WORD_BYTES]
        self.blocks_checked += len(keys)
        return [
            WrongBlock(
                key=keys[found.block],
                slot=slots[found.block],
                offset_bytes=found.offset_bytes,
                expected=found.expected,
                found=found.found,
            )
            for found in self._content.check(copies, keys)
        ]
