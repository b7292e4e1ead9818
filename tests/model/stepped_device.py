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
WRITES = {"header", "blocks", "table"}
SECTOR_BYTES = 512


@dataclass(eq=False)
class Call:
    """One call that has not ended: a read, an allocation, or a write.

    A write begins with a region's header, with blocks, or with a page of a table.
    """

    kind: str
    region: int
    transfers: Sequence[Transfer]
    end: asyncio.Future[Any]
    at: int = 0  # the transfer that moves now: they go one after the other
    left: list[int] = field(default_factory=lambda: list(range(PIECES)))  # its pieces not yet moved
    failed: set[int] = field(default_factory=set)  # regions that were sick when a piece was moved

    def pieces(self, piece: int) -> Iterator[tuple[int, int, memoryview]]:
        """Yield where each part of a piece lies on the disk (region, offset), and its buffer."""
        transfer = self.transfers[self.at]
        sectors = -(-transfer.size // SECTOR_BYTES)
        first = piece * sectors // PIECES * SECTOR_BYTES
        last = (piece + 1) * sectors // PIECES * SECTOR_BYTES
        start = 0
        for buffer in transfer.buffers:
            low, high = max(first - start, 0), min(last - start, buffer.nbytes)
            if low < high:
                yield transfer.region, transfer.at + start + low, buffer[low:high]
            start += buffer.nbytes

    def go_on(self) -> None:
        """Begin the next transfer, unless it was a write that failed."""
        is_over = bool(self.failed) and self.kind in WRITES
        if self.at + 1 < len(self.transfers) and not is_over:
            self.at += 1
            self.left = list(range(PIECES))


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

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        for transfer in transfers:
            if transfer.at + transfer.size > len(self.disk.bytes[transfer.region]):
                self.wrong.append(f"written beyond region {transfer.region}")
        first = transfers[0]
        kind = "blocks" if first.size > PAGE_BYTES else "table" if first.at else "header"
        return await self._begin(kind, transfers)

    async def allocate(self, region: int) -> None:
        await self._begin("allocate", [Transfer(region, 0, [])])

    def busy(self) -> int:
        return len(self.calls)

    def close(self) -> None:
        """Nothing to release."""

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
        if not call.left:
            call.go_on()

    def end(self, call: Call) -> None:
        """Move what is left, and answer."""
        while call.left:
            self.move(call, call.left[0])
        self.calls.remove(call)
        if call.end.done():
            return  # its caller was cancelled
        sick = OSError(errno.EIO, "sick")
        if call.kind == "read":
            sizes = [sick if each.region in call.failed else each.size for each in call.transfers]
            for transfer, size in zip(call.transfers, sizes, strict=True):
                if transfer.on_read is not None and isinstance(size, int):
                    transfer.on_read(size)
            call.end.set_result(sizes)
        elif call.kind == "allocate" and not self.has_room:
            call.end.set_exception(OSError(errno.ENOSPC, "no space left"))
        else:
            call.end.set_result(sick if call.failed else None)

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
