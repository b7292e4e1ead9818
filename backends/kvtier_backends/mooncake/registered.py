"""Manages the memory that the client may transfer from and to: the slots, and trays beside them.

A record is a block and its trailer, and is one object in the store. There are two ways:

    direct  the block is gathered from its slot, and the trailer from a tray, and scattered
            likewise: no copy, but two transfers
    staged  both are copied through a tray, one behind the other: one transfer. For small
            blocks, where that costs less, and for payloads that are not the block itself
"""

from __future__ import annotations

import mmap
import queue
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvtier.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_BYTES: Final = 8 << 20
CALL_BLOCKS_MIN: Final = 16
CALL_BLOCKS_MAX: Final = 128
"""Most blocks that a call of the library moves: the hand-over to a thread and back, and the
master's answer, should take little of its time, and no other call should wait for long."""

STAGED_BLOCK_BYTES_MAX: Final = 128 << 10
"""Measured over TCP, in batches of 32 blocks: staged ones of 64 KiB are loaded at 1.9 times the
speed of direct ones, for half the processor time; of 256 KiB at 1.07 times; of 1 MiB at .94."""

TRAILER_ROOM_BYTES: Final = 512
DESCRIPTION_ROOM_BYTES: Final = 1 << 16


class RegisteredRegion(NamedTuple):
    """A stretch of memory, by its address."""

    address: int
    size: int

    def holds(self, address: int, size: int) -> bool:
        """Return whether all of these bytes are in it."""
        return self.address <= address and address + size <= self.address + self.size


class Room(NamedTuple):
    """Bytes that a client may transfer, and their address."""

    view: memoryview
    address: int

    def fill(self, data: bytes | memoryview) -> None:
        """Copy data of its size into it."""
        self.view[:] = data


class Tray:
    """One call's room for trailers and, if blocks are staged, for the payload before each."""

    def __init__(self, memory: memoryview, payload_bytes: int) -> None:
        """``payload_bytes``: room for one payload; 0 if payloads lie in slots."""
        self._memory = memory
        self._address = address_of(memory)
        self._payload_bytes = payload_bytes
        self._stride = stride_of(payload_bytes)

    def trailer(self, index: int, size: int) -> Room:
        """Return the room for a trailer of this size. Raises ``Misuse`` if there is none."""
        if size > TRAILER_ROOM_BYTES:
            raise Misuse(f"a trailer of {size} bytes has no room. Shorten the key.")
        return self._room(index * self._stride + self._payload_bytes, size)

    def payload(self, index: int, size: int) -> Room:
        """Return the room for a payload of this size, right before its trailer's.

        Raises ``Misuse`` if there is none: the payload should have been in the slots.
        """
        if not 0 < size <= self._payload_bytes:
            raise Misuse(
                "a buffer is not part of the memory that was registered. Call register_memory "
                "with all slots first."
            )
        return self._room(index * self._stride + self._payload_bytes - size, size)

    def _room(self, start: int, size: int) -> Room:
        return Room(self._memory[start : start + size], self._address + start)


class RegisteredMemory:
    """All memory that a client must register. Any thread may borrow a tray."""

    def __init__(self, trays: int, block_bytes: int, *, are_plain: bool) -> None:
        """``are_plain``: payloads are the blocks themselves."""
        self._is_direct = are_plain and block_bytes > STAGED_BLOCK_BYTES_MAX
        payload_bytes = 0 if self._is_direct else block_bytes
        self.call_blocks: Final = blocks_of_a_call(block_bytes)
        tray_bytes = self.call_blocks * stride_of(payload_bytes)
        self._own = memoryview(mmap.mmap(-1, DESCRIPTION_ROOM_BYTES + trays * tray_bytes))
        # Last in, first out: its memory is still in the cache, and unneeded trays are never
        # touched: to touch one takes as long as a transfer.
        self._trays: queue.LifoQueue[Tray] = queue.LifoQueue()
        for start in range(DESCRIPTION_ROOM_BYTES, len(self._own), tray_bytes):
            self._trays.put(Tray(self._own[start : start + tray_bytes], payload_bytes))
        self._slots: RegisteredRegion | None = None

    @property
    def description_room(self) -> memoryview:
        """Room for the description of a namespace. For one thread at a time."""
        return self._own[:DESCRIPTION_ROOM_BYTES]

    def add_slots(self, slots: memoryview) -> None:
        """Note where the slots are. Their owner keeps them mapped: nothing here holds them.

        No client registers them if blocks are staged.
        """
        if self._is_direct:
            self._slots = RegisteredRegion(address_of(slots), slots.nbytes)

    def regions(self) -> list[RegisteredRegion]:
        """Return all memory that a new client must register."""
        own = RegisteredRegion(address_of(self._own), self._own.nbytes)
        return [own] if self._slots is None else [own, self._slots]

    def room_in_slots(self, buffer: memoryview) -> Room | None:
        """Return a buffer with its address, if it lies in the slots that clients register."""
        if self._slots is None:
            return None
        address = address_of(buffer)
        return Room(buffer, address) if self._slots.holds(address, buffer.nbytes) else None

    @contextmanager
    def tray(self) -> Iterator[Tray]:
        """Borrow a tray. There is one for each thread that moves blocks."""
        tray = self._trays.get()
        try:
            yield tray
        finally:
            self._trays.put(tray)


def blocks_of_a_call(block_bytes: int) -> int:
    """Return how many blocks one call of the library moves: a tray has room for them."""
    return max(CALL_BLOCKS_MIN, min(CALL_BLOCKS_MAX, CALL_BYTES // block_bytes))


def stride_of(payload_bytes: int) -> int:
    """Return how far apart the rooms of two blocks are in a tray: a multiple of a cache line."""
    return -(-(payload_bytes + TRAILER_ROOM_BYTES) // 64) * 64


def address_of(buffer: memoryview) -> int:
    """Return the start address of a buffer, which may be read-only."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
