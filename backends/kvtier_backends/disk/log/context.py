"""Holds the state that the parts of one log share: its storage, counters and incidents."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier_backends.disk.device import Transfer
from kvtier_backends.disk.format import PAGE_BYTES, time_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_backends.disk.device import Device
    from kvtier_backends.disk.format import RegionGeometry
    from kvtier_backends.disk.log.index import BlockIndex
    from kvtier_backends.disk.log.regions import Budget, Regions
    from kvtier_backends.disk.log.tables import Identity
    from kvtier_backends.incidents import IncidentLog, TierCounters


@dataclass(frozen=True)
class LogContext:
    """The parts of a log that have no rules of their own. ``clock`` returns seconds since 1970."""

    device: Device
    index: BlockIndex
    regions: Regions
    geometry: RegionGeometry
    budget: Budget
    identity: Identity
    counters: TierCounters
    incidents: IncidentLog
    clock: Callable[[], float]
    _padding: memoryview = field(init=False)  # behind each block, if blocks are not whole pages

    def __post_init__(self) -> None:
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        padding_bytes = self.geometry.stride - self.geometry.block_bytes
        object.__setattr__(self, "_padding", page[:padding_bytes])

    def now_s(self) -> int:
        """Return the time as it is stored, even if the clock is far off."""
        return time_s(self.clock())

    async def read_pinned(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Read from regions, pinned against being overwritten; see ``Device.read``."""
        pinned = {transfer.region for transfer in transfers}
        for region in pinned:
            self.regions.pin(region)
        try:
            return await self.device.read(transfers)
        finally:
            for region in pinned:
                self.regions.unpin(region)

    def transfer(
        self,
        location: int,
        buffers: Sequence[memoryview],
        on_read: Callable[[int], object] | None = None,
    ) -> Transfer:
        """Return the transfer of neighbouring blocks, from ``location`` on."""
        if self._padding:
            buffers = [each for buffer in buffers for each in (buffer, self._padding)]
        region, slot = divmod(location, self.geometry.slots)
        return Transfer(region, self.geometry.slot_at(slot), list(buffers), on_read)
