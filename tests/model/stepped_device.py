"""A device whose every call moves its bytes piece by piece, and ends, when the test says so.

What it writes to is the simulated disk: what a crash may tear or lose is kept
there. The device itself sees two mistakes that nobody above it could see: bytes
written that are being read, and bytes written twice at once.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier_backends.disk.device import Device, Transfer
from kvtier_backends.disk.format import PAGE_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence

    from stepped_loop import SteppedLoop

    from tests.unit.backends.disk._simulated import SimulatedDisk

PIECES = 3
WRITES = {"write", "table"}
SECTOR_BYTES = 512


@dataclass(eq=False)
class Call:
    """One call that has not ended: a read, an allocation, a write, or that of a table's page."""

    kind: str
    region: int
    transfers: Sequence[Transfer]
    end: asyncio.Future[Any]
    left: list[int] = field(default_factory=lambda: list(range(PIECES)))  # pieces not yet moved
    failed: set[int] = field(default_factory=set)  # regions that were sick when a piece was moved

    def pieces(self, piece: int) -> Iterator[tuple[int, int, memoryview]]:
        """Yield where each part of a piece lies on the disk (region, offset), and its buffer."""
        for transfer in self.transfers:
            sectors = -(-transfer.size // SECTOR_BYTES)
            first = piece * sectors // PIECES * SECTOR_BYTES
            last = (piece + 1) * sectors // PIECES * SECTOR_BYTES
            start = 0
            for buffer in transfer.buffers:
                low, high = max(first - start, 0), min(last - start, buffer.nbytes)
                if low < high:
                    yield transfer.region, transfer.at + start + low, buffer[low:high]
                start += buffer.nbytes


class SteppedDevice(Device):
    """One life's access to the disk. ``calls`` are those that run, oldest first."""

    def __init__(self, disk: SimulatedDisk, loop: SteppedLoop) -> None:
        self.disk = disk
        self.sick: set[int] = set()  # regions that give EIO
        self.has_room = True
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        self._loop = loop

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        return await self._begin("read", transfers)

    async def write(self, transfers: Sequence[Transfer]) -> list[OSError | None]:
        for transfer in transfers:
            if transfer.at + transfer.size > len(self.disk.bytes[transfer.region]):
                self.wrong.append(f"written beyond region {transfer.region}")
        is_page = transfers[0].at > 0 and transfers[0].size == PAGE_BYTES
        return await self._begin("table" if is_page else "write", transfers)

    async def allocate(self, region: int) -> None:
        await self._begin("allocate", [Transfer(region, 0, [])])

    def busy(self) -> int:
        return len(self.calls)

    def close(self) -> None:
        """Nothing to let go of."""

    # --- what the test does ---

    def move(self, call: Call, piece: int) -> None:
        """Move one of a call's pieces, in any order. What is in a sick region stays as it is."""
        call.left.remove(piece)
        for region, at, buffer in call.pieces(piece):
            if region in self.sick:
                call.failed.add(region)
            elif call.kind == "read":
                buffer[:] = self.disk.bytes[region][at : at + buffer.nbytes]
            else:
                self.disk.write(region, at, bytes(buffer))

    def end(self, call: Call) -> None:
        """Move what is left, and answer."""
        for piece in list(call.left):
            self.move(call, piece)
        ends = [self._end_one(call, transfer) for transfer in call.transfers]
        self.calls.remove(call)
        if call.end.done():
            return  # its caller was cancelled
        if call.kind == "allocate" and ends[0] is not None:
            call.end.set_exception(ends[0])
        else:
            call.end.set_result(ends)

    def _end_one(self, call: Call, transfer: Transfer) -> Any:
        if call.kind == "allocate":
            return None if self.has_room else OSError(errno.ENOSPC, "no space left")
        if transfer.region in call.failed:
            return OSError(errno.EIO, "sick")
        return transfer.size if call.kind == "read" else None

    async def _begin(self, kind: str, transfers: Sequence[Transfer]) -> Any:
        for transfer in transfers:
            self._check_alone(kind, transfer)
        call = Call(kind, transfers[0].region, transfers, self._loop.create_future())
        self.calls.append(call)
        return await call.end

    def _check_alone(self, kind: str, new: Transfer) -> None:
        """Note a write to bytes that another call reads or writes now, or a read of such."""
        for call in self.calls:
            if not WRITES & {kind, call.kind}:
                continue
            for old in call.transfers:
                overlaps = new.at < old.at + old.size and old.at < new.at + new.size
                if new.region == old.region and overlaps:
                    self.wrong.append(f"{kind} of region {new.region} during a {call.kind}: {new}")
