"""Moves blocks between slots and a client, and returns each block's outcome.

All methods block, and are for threads. A call is cut into trays: one that nothing waits for
any more by the time its turn comes is not begun.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Loaded, Outcome, block_digest
from kvtier_backends.mooncake.client import Parts
from kvtier_backends.mooncake.library import (
    ABSENT_CODES,
    FULL_CODES,
    MASTER_CODES,
    Code,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.plugin_api.backend import LoadBlock, StoreBlock
    from kvtier_backends.incidents import IncidentLog
    from kvtier_backends.mooncake.client import StoreClient
    from kvtier_backends.mooncake.registered import RegisteredMemory, Room, Tray
    from kvtier_backends.shared.records import Records

Block = TypeVar("Block", "StoreBlock", "LoadBlock")

_STORED: Final = frozenset({0, Code.EXISTS})
"""An existing object keeps its contents. They are the same block: keys name contents."""

_LOST: Final[Mapping[int, str]] = {
    Code.LEASE_EXPIRED: "leases_expired",  # a compressed block's length is not reported
    Code.TRANSFER_FAILED: "owners_gone",  # the master lists them until --client_ttl has passed
}
"""Codes that are a miss, whatever a lookup returned, and their counters: not tier faults."""

_UNCLEAR_LENGTH: Final = frozenset({Code.BAD_PARAMETERS, Code.TRANSFER_FAILED})
"""Codes for an object that is longer or shorter than the buffers, among others."""


_REMOVE_WAITS_S: Final = (0.005, 0.02, 0.08, 0.3)
"""An object that is being stored can't be removed: it is tried again after these pauses."""


class Moved(NamedTuple):
    """The memory of one block's payload and trailer during a load."""

    payload: Room
    trailer: Room

    def cut(self, length: int) -> tuple[memoryview, memoryview]:
        """Return payload and trailer of a record of this length.

        A shorter one was loaded in one piece, and ends within the payload's room.
        """
        payload, trailer = self.payload.view, self.trailer.view
        size = length - trailer.nbytes
        if size == payload.nbytes:
            return payload, trailer
        return payload[:size], payload[size:length]


class BlockTransfers:
    """Moves blocks in and out of one namespace of a store. Any thread may call any method."""

    def __init__(
        self,
        prefix: str,
        records: Records,
        memory: RegisteredMemory,
        incidents: IncidentLog,
        *,
        on_no_master: Callable[[], None],
    ) -> None:
        """``prefix``: the start of all block names, up to the last slash.

        ``on_no_master``: called, in any thread, when the master did not answer.
        """
        self._prefix = prefix
        self._records = records
        self._memory = memory
        self._incidents = incidents
        self._on_no_master = on_no_master

    def store(
        self, client: StoreClient, blocks: Sequence[StoreBlock], until_s: float
    ) -> list[Outcome]:
        """Store blocks. ``until_s``: the deadline, by ``time.monotonic``."""
        outcomes: list[Outcome] = []
        for some in _calls_of(blocks, self._memory.call_blocks):
            if time.monotonic() >= until_s:
                outcomes += [Outcome.FAILED] * len(some)
                continue
            with self._memory.tray() as tray:
                codes = client.put(self._parts_to_store(some, tray))
            outcomes += [self._stored(code) for code in codes]
            if self._is_master_gone(codes):
                until_s = -math.inf  # the next would wait for it, too
        return outcomes

    def load(
        self, client: StoreClient, blocks: Sequence[LoadBlock], until_s: float
    ) -> list[Loaded]:
        """Load blocks. When it returns, nothing writes to their buffers any more."""
        loaded: list[Loaded] = []
        for some in _calls_of(blocks, self._memory.call_blocks):
            if time.monotonic() >= until_s:
                loaded += [Loaded(Outcome.FAILED)] * len(some)
                continue
            with self._memory.tray() as tray:
                moved = [self._room_for(block, index, tray) for index, block in enumerate(some)]
                parts = Parts(
                    self._part(block.key, *room) for block, room in zip(some, moved, strict=True)
                )
                codes = client.get(parts, are_shorter=self._records.are_compressed)
                loaded += [
                    self._loaded(client, block, code, room)
                    for block, code, room in zip(some, codes, moved, strict=True)
                ]
            if self._is_master_gone(codes):
                until_s = -math.inf  # the next would wait for it, too
        return loaded

    def probe(self, client: StoreClient, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks the master has. Raises ``StoreFault`` if it does not answer."""
        if not keys:
            return []
        codes = client.exist([self.name_of(key) for key in keys])
        if self._is_master_gone(codes):
            raise StoreFault(f"the master of the store did not answer: {told(min(codes))}")
        return [code == 1 for code in codes]

    def remove(self, client: StoreClient, keys: Sequence[bytes]) -> None:
        """Remove blocks. Raises ``StoreFault`` if any may still be there."""
        if not keys:
            return
        codes = client.remove([self.name_of(key) for key in keys])
        for wait_s in _REMOVE_WAITS_S:
            busy = [key for key, code in zip(keys, codes, strict=True) if code == Code.NOT_READY]
            if not busy:
                break
            time.sleep(wait_s)  # until the running store has ended
            again = iter(client.remove([self.name_of(key) for key in busy]))
            codes = [next(again) if code == Code.NOT_READY else code for code in codes]
        left = [code for code in codes if code not in {0, Code.NOT_FOUND}]
        if left:
            self._incidents.report("store", "removes_failed", told(left[0]), count=len(left))
            self._is_master_gone(codes)
            raise StoreFault(f"{len(left)} blocks may still be in the store: {told(left[0])}")

    def name_of(self, key: bytes) -> str:
        """Return the name of a block's object."""
        return self._prefix + key.hex()

    def _is_master_gone(self, codes: Sequence[int]) -> bool:
        is_gone = not MASTER_CODES.isdisjoint(codes)
        if is_gone:
            self._on_no_master()
        return is_gone

    def _part(self, key: bytes, payload: Room, trailer: Room) -> tuple[str, list[int], list[int]]:
        name = self._prefix + key.hex()
        sizes = [payload.view.nbytes, trailer.view.nbytes]
        if payload.address + sizes[0] == trailer.address:
            return name, [payload.address], [sum(sizes)]
        return name, [payload.address, trailer.address], sizes

    # --- stores ---

    def _parts_to_store(self, blocks: Sequence[StoreBlock], tray: Tray) -> Parts:
        parts = Parts()
        for index, block in enumerate(blocks):
            record = self._records.encode(block)
            room = self._memory.room_in_slots(record.payload)
            if room is None:
                room = tray.payload(index, record.payload.nbytes)
                room.fill(record.payload)
                self._records.give_back(record.payload)
            trailer = tray.trailer(index, len(record.trailer))
            trailer.fill(record.trailer)
            parts.append(self._part(block.key, room, trailer))
        return parts

    def _stored(self, code: int) -> Outcome:
        if code in _STORED:
            self._incidents.success("store")
            return Outcome.DONE
        if code in FULL_CODES:
            self._incidents.report("store", "stores_full", told(code))
            return Outcome.FULL
        self._incidents.report("store", "stores_failed", told(code))
        return Outcome.FAILED

    # --- loads ---

    def _room_for(self, block: LoadBlock, index: int, tray: Tray) -> Moved:
        trailer = tray.trailer(index, self._records.trailer_bytes(block.key))
        payload = self._memory.room_in_slots(block.buffer) if self._records.are_plain else None
        return Moved(payload or tray.payload(index, block.buffer.nbytes), trailer)

    def _loaded(self, client: StoreClient, block: LoadBlock, code: int, room: Moved) -> Loaded:
        name = self.name_of(block.key)
        if code in _UNCLEAR_LENGTH:
            code = self._code_by_length(client, block.key, code)
        if code in ABSENT_CODES:
            return Loaded(Outcome.ABSENT)
        length = self._length_brought(block.key, code)
        answer = Loaded(Outcome.DAMAGED)
        if length is not None:
            payload, trailer = room.cut(length)
            answer = self._records.decode_untrusted(block.key, payload, trailer, block.buffer)
        is_sound = answer.outcome is Outcome.DONE
        if code == Code.LEASE_EXPIRED and is_sound:  # otherwise it would be removed as damaged
            is_sound = answer.digest == block_digest(block.key, block.buffer)
        if is_sound:
            self._incidents.success("load")
            return answer
        if code >= 0:
            self._incidents.report("load", "blocks_damaged", "not as it was stored", path=name)
            return answer
        if code in _LOST:
            self._incidents.report("load", _LOST[code], told(code), path=name)
            return Loaded(Outcome.ABSENT)
        self._incidents.report("load", "loads_failed", told(code), path=name)
        return Loaded(Outcome.FAILED)

    def _length_brought(self, key: bytes, code: int) -> int | None:
        """Return the length of the loaded record, None if none was loaded."""
        if code == Code.LEASE_EXPIRED and not self._records.are_compressed:
            return self._records.record_bytes(key)  # a compressed one's length is not reported
        return code if self._records.is_record_length(key, code) else None

    def _code_by_length(self, client: StoreClient, key: bytes, code: int) -> int:
        """Return the object's length if no record of ours has it, else the code."""
        try:
            there = client.size(self.name_of(key))
        except StoreFault:  # the client is ending
            return code
        return code if self._records.is_record_length(key, there) else there


def _calls_of(blocks: Sequence[Block], most: int) -> Iterator[list[Block]]:
    """Cut a call into batches for the library without repeated names, which it mixes up."""
    some: dict[bytes, Block] = {}
    for block in blocks:
        if len(some) == most or block.key in some:
            yield list(some.values())
            some = {}
        some[block.key] = block
    if some:
        yield list(some.values())
