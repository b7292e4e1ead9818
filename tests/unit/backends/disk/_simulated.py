"""A disk in memory that may tear, reorder and lose what was written before a crash.

Like a real one without a flush: until ``crash`` the reader sees every write;
after it, each sector of each write since the beginning may or may not be there.
Sectors are 512 bytes, so a page may be torn, and a later write may have
arrived while an earlier one did not.
"""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from kvtier_backends.disk.device import Device, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

SECTOR_BYTES = 512


class SimulatedDisk:
    """What survives a crash: the sectors, and what each may have been before."""

    def __init__(self, regions: int, region_bytes: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.bytes = [bytearray(region_bytes) for _ in range(regions)]
        self.before: dict[tuple[int, int], list[bytes]] = {}
        self.crashes = 0

    def write(self, region: int, at: int, data: bytes) -> None:
        first, last = at // SECTOR_BYTES, (at + len(data) - 1) // SECTOR_BYTES
        for sector in range(first, last + 1):
            place = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
            self.before.setdefault((region, sector), []).append(bytes(self.bytes[region][place]))
        self.bytes[region][at : at + len(data)] = data

    def crash(self) -> None:
        """Let every sector fall back to any of its versions since the last crash."""
        self.crashes += 1
        rate = self.random.choice([0.0, 0.02, 0.3])
        for (region, sector), versions in self.before.items():
            if self.random.random() < rate:
                start = sector * SECTOR_BYTES
                kept = self.random.choice(versions)
                self.bytes[region][start : start + SECTOR_BYTES] = kept
        self.before.clear()


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

    async def write(self, transfers: Sequence[Transfer]) -> list[OSError | None]:
        await self._wait()
        return [self._write(transfer) for transfer in transfers]

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
        return transfer.size

    def _write(self, transfer: Transfer) -> OSError | None:
        if self._fails(transfer):
            return OSError(errno.EIO, "sick")
        data = b"".join(bytes(buffer) for buffer in transfer.buffers)
        assert transfer.at + len(data) <= len(self.disk.bytes[0]), "written beyond the region"
        self.disk.write(transfer.region, transfer.at, data)
        return None
