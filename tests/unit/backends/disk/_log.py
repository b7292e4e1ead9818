"""What the tests of the log share: one on a simulated disk, and blocks in and out of it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import LoadBlock, Outcome, StoreBlock, block_digest
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.disk.folder.recovery import Expected, Recovery
from kvtier_backends.disk.format import NO_KEY_ID, make_region_geometry, region_bytes_for
from kvtier_backends.disk.log.block_log import BlockLog
from kvtier_backends.disk.log.context import LogContext
from kvtier_backends.disk.log.index import BlockIndex, BulkLoad
from kvtier_backends.disk.log.regions import WRITE_AMPLIFICATION_MAX, Budget, Regions
from kvtier_backends.disk.log.tables import Identity
from kvtier_backends.incidents import IncidentLog, TierCounters
from tests.unit.backends.disk._simulated import SimulatedDevice, SimulatedDisk

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_BYTES = 16384
SLOTS = 8
REGIONS = 10
CAPACITY = int((REGIONS - 2) * SLOTS * 0.9)
OWN_PAGE_SLOTS = 3
_OWN_PAGE_BYTES = OWN_PAGE_SLOTS * BLOCK_BYTES
GEOMETRY = make_region_geometry(
    region_bytes_for(SLOTS, BLOCK_BYTES, own_page_bytes=_OWN_PAGE_BYTES),
    BLOCK_BYTES,
    own_page_bytes=_OWN_PAGE_BYTES,
)
KEYS = [number.to_bytes(4, "big") * 9 for number in range(3 * CAPACITY)]


class Engine:
    """One life of an engine on the simulated disk, from recovery to a crash."""

    log: BlockLog

    def __init__(self, device: SimulatedDevice, *, ttl_s: int = 0, ahead: int = 1) -> None:
        self.device = device
        self.lost: set[bytes] = set()
        self.now = 1000.0
        self.counters = TierCounters()
        self.incidents = IncidentLog("disk", "1:disk", "simulated", self.counters)
        self.ttl_s = ttl_s
        self.ahead = ahead

    async def begin(self) -> None:
        index = BlockIndex(REGIONS, SLOTS)
        identity = Identity(b"f" * 16, b"n" * 16, NO_KEY_ID)
        regions = Regions(REGIONS, SLOTS, index.live, ahead_max=self.ahead)
        threads = DaemonThreads(1, "test")
        bulk = BulkLoad(index, int(self.now), 0)
        expected = Expected(b"f" * 16, b"n" * 16, {NO_KEY_ID}, GEOMETRY)
        found = await Recovery(self.device, expected, threads, bulk).run(REGIONS, CAPACITY)
        threads.stop()
        self.found_counts = found.counts
        regions.recover(found.sequences, found.reuse_last, found.highest, found.key_ids)
        self.budget = Budget(2 * GEOMETRY.region_bytes)
        context = LogContext(
            self.device,
            index,
            regions,
            GEOMETRY,
            self.budget,
            identity,
            self.counters,
            self.incidents,
            lambda: self.now,
        )
        self.log = BlockLog(
            context, capacity_blocks=CAPACITY, ttl_s=self.ttl_s, on_lost=self.lost.update
        )

    async def store(self, keys: Sequence[bytes], version: int = 0) -> list[Outcome]:
        blocks = []
        for key in keys:
            data = memoryview(data_of(key, version))
            blocks.append(StoreBlock(key, data, block_digest(key, data)))
        return await self.log.store(blocks)

    async def load(self, keys: Sequence[bytes]) -> list[tuple[Outcome, bytes]]:
        """Load, and judge the bytes by the digest, as the layer above does."""
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
        loaded = await self.log.load([LoadBlock(*each) for each in zip(keys, buffers, strict=True)])
        answers = []
        for key, buffer, found in zip(keys, buffers, loaded, strict=True):
            outcome = found.outcome
            sound = outcome is not Outcome.DONE or block_digest(key, buffer) == found.digest
            answers.append((outcome if sound else Outcome.DAMAGED, bytes(buffer)))
        return answers

    async def fill(self, keys: Sequence[bytes]) -> None:
        """Store blocks, and wait for what that leaves behind."""
        assert await self.store(keys) == [Outcome.DONE] * len(keys)
        await self.log.calls.wait_idle()

    def count(self, name: str) -> int:
        return self.counters.counts().get(name, 0)

    async def check(self) -> None:
        """Wait for rest, and assert what must hold then."""
        log = self.log
        await log.calls.wait_idle()
        assert len(log.index) <= CAPACITY
        assert log.appending == 0
        assert not any(log.regions._readers)
        assert not any(log.regions._writers)
        assert sum(log.index.live(region) for region in range(REGIONS)) == len(log.index)
        stored = self.count("bytes_stored")
        again = self.count("bytes_reinserted")
        assert again <= (WRITE_AMPLIFICATION_MAX - 1) * stored + 1


def data_of(key: bytes, version: int) -> bytes:
    name = hashlib.blake2b(key, digest_size=60).digest()
    return (name + version.to_bytes(4, "big")) * (BLOCK_BYTES // 64)


def fresh_disk(seed: int = 0) -> SimulatedDisk:
    return SimulatedDisk(REGIONS, GEOMETRY.region_bytes, seed)


async def begun(device: SimulatedDevice | None = None, **options: int) -> Engine:
    """Return an engine that has begun; without a device, on a fresh disk."""
    engine = Engine(device or SimulatedDevice(fresh_disk()), **options)
    await engine.begin()
    return engine
