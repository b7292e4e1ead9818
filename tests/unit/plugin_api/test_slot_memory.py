"""Slots, and what blocks of a KV-cache group leave of them."""

from __future__ import annotations

from kvtier.plugin_api.slot_memory import SlotMemory

BLOCK = 300_000  #: more than is zeroed at a time
WHOLE, SMALL = (group.to_bytes(4, "big") for group in (0, 1))
RESTS = {SMALL: [(10, 20), (100_000, BLOCK)]}


def test_what_a_group_leaves_of_a_slot_is_cleared_and_nothing_else() -> None:
    memory = SlotMemory(memoryview(bytearray(b"x" * 3 * BLOCK)), 3, BLOCK, rests=RESTS)
    memory.clear_rests([b"a" + SMALL, b"b" + WHOLE], [1, 2])
    zeros = [at for at, byte in enumerate(memory.buffer) if not byte]
    wanted = [BLOCK + at for begin, end in RESTS[SMALL] for at in range(begin, end)]
    assert (len(zeros), zeros == wanted) == (len(wanted), True)
