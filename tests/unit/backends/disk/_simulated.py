"""A disk in memory that may tear, reorder and lose what was written before a crash.

Like a real one without a flush: until ``crash`` the reader sees every write;
after it, each sector of each write since the beginning may or may not be there.
So a page may be torn, and a later write may have arrived while an earlier one
did not. Sectors are 512 bytes; where the disk is told to, at the start of each
region, it tears finer than that, so that small tables can be torn as well.
"""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from kvtier_backends.disk.device import Device, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE_BYTES = 4096
SECTOR_BYTES = 512
FINE_SECTOR_BYTES = 32


class SimulatedDisk:
    """What survives a crash: the sectors, and what each may have been before."""

    def __init__(self, regions: int, region_bytes: int, seed: int, *, fine_bytes: int = 0) -> None:
        """``fine_bytes``: so much at the start of each region tears into fine sectors."""
        self.random = random.Random(seed)
        self.bytes = [bytearray(region_bytes) for _ in range(regions)]
        self.before: dict[tuple[int, int], list[bytes]] = {}  # region, start of the sector
        self.lost: set[tuple[int, int]] = set()  # sectors that are not what was written last
        self.crashes = 0
        self._fine_bytes = fine_bytes

    def write(self, region: int, at: int, data: bytes) -> None:
        for place in self.sectors(at, len(data)):
            sector = (region, place.start)
            self.before.setdefault(sector, []).append(bytes(self.bytes[region][place]))
            self.lost.discard(sector)
        self.bytes[region][at : at + len(data)] = data

    def crash(self) -> None:
        """Let every sector fall back to any of its versions since the last crash.

        Each by itself, or those of one page together.
        """
        self.crashes += 1
        rate = self.random.choice([0.0, 0.02, 0.3])
        together_bytes = self.random.choice([1, PAGE_BYTES])
        fates: dict[tuple[int, int], float | None] = {}
        for (region, start), versions in self.before.items():
            unit = (region, start // together_bytes)
            if unit not in fates:
                fates[unit] = self.random.random() if self.random.random() < rate else None
            fate = fates[unit]
            if fate is not None:
                self._fall_back(region, start, versions[int(fate * len(versions))])
        self.before.clear()

    def rot(self, region: int, at: int) -> None:
        """Flip the bits of a byte, behind everybody's back."""
        self.bytes[region][at] ^= 0xFF
        self.lost.update((region, place.start) for place in self.sectors(at, 1))

    def sectors(self, at: int, size: int) -> Iterator[slice]:
        """Yield the sectors of a region that so many bytes lie in."""
        end = at + size
        while at < end:
            sector_bytes = FINE_SECTOR_BYTES if at < self._fine_bytes else SECTOR_BYTES
            start = at // sector_bytes * sector_bytes
            at = start + sector_bytes
            yield slice(start, at)

    def _fall_back(self, region: int, start: int, kept: bytes) -> None:
        place = slice(start, start + len(kept))
        if self.bytes[region][place] != kept:
            self.bytes[region][place] = kept
            self.lost.add((region, start))


class SimulatedDevice(Device):
    """One engine's access to the disk; of no use after the disk's next crash."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.life = disk.crashes
        self.sick: set[int] = set()  # regions that give EIO
        self.has_room = True
        self.running = 0
        self.held: anyio.Event | None = None  # reads wait for it

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        await self._wait()
        if self.held is not None:
            await self.held.wait()
        return [self._read(transfer) for transfer in transfers]

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        for transfer in transfers:
            await self._wait()
            problem = self._write(transfer)
            if problem is not None:
                return problem
        return None

    async def allocate(self, region: int) -> None:
        await self._wait()
        if not self.has_room:
            raise OSError(errno.ENOSPC, "no space left on the simulated device")

    def busy(self) -> int:
        return self.running

    def close(self) -> None:
        pass

    async def _wait(self) -> None:
        """Let others run: calls end in an order of the seed's choice."""
        self.running += 1
        try:
            for _ in range(self.disk.random.randrange(1, 6)):
                await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1

    def _fails(self, transfer: Transfer) -> bool:
        return transfer.region in self.sick or self.life != self.disk.crashes

    def _read(self, transfer: Transfer) -> int | OSError:
        if self._fails(transfer):
            return OSError(errno.EIO, "sick")
        at = transfer.at
        for buffer in transfer.buffers:
            buffer[:] = self.disk.bytes[transfer.region][at : at + buffer.nbytes]
            at += buffer.nbytes
        if transfer.on_read is not None:
            transfer.on_read(transfer.size)
        return transfer.size

    def _write(self, transfer: Transfer) -> OSError | None:
        if self._fails(transfer):
            return OSError(errno.EIO, "sick")
        data = b"".join(bytes(buffer) for buffer in transfer.buffers)
        assert transfer.at + len(data) <= len(self.disk.bytes[0]), "written beyond the region"
        self.disk.write(transfer.region, transfer.at, data)
        return None
