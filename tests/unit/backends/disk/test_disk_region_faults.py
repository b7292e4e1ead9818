"""Region faults: sick regions, no room, no memory, and what the log holds on to then."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.log.region_faults import STRIKES_MAX
from kvtier_backends.disk.log.regions import RegionState
from kvtier_backends.disk.log.tables import PagePool
from tests.support.patience import PATIENCE_S
from tests.unit.backends.disk._log import (
    BLOCK_BYTES,
    CAPACITY,
    GEOMETRY,
    KEYS,
    REGIONS,
    SLOTS,
    Engine,
    begun,
    fresh_disk,
)
from tests.unit.backends.disk._simulated import SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.disk.device import Transfer

pytestmark = pytest.mark.anyio


async def test_a_region_that_fails_on_its_own_is_retired_and_its_blocks_are_told(
    engine: Engine,
) -> None:
    """Not with its first failure: that may be the whole medium's, and over in a moment."""
    await engine.store(KEYS[: 2 * SLOTS])
    regions = engine.log.regions
    sick = (engine.log.index.get(KEYS[0]) or 0) // SLOTS
    engine.device.sick.add(sick)
    ((outcome, _),) = await engine.load(KEYS[:1])
    assert outcome is Outcome.FAILED
    for _ in range(STRIKES_MAX):
        assert engine.lost == set()
        await engine.log.heal()
    assert regions.state(sick) is RegionState.RETIRED
    assert engine.lost == set(KEYS[:SLOTS])
    assert await engine.store(KEYS[:SLOTS]) == [Outcome.DONE] * SLOTS
    engine.device.sick.clear()
    engine.now += 301
    await engine.log.heal()
    assert regions.state(sick) is RegionState.FREE


async def test_a_region_that_cannot_be_written_fails_its_store_and_not_the_next(
    engine: Engine,
) -> None:
    await engine.fill(KEYS[:1])
    region = engine.log.regions.open_region
    assert region is not None
    engine.device.sick.add(region)
    assert await engine.store(KEYS[1:3]) == [Outcome.FAILED] * 2
    engine.device.sick.clear()
    again = await begun(SimulatedDevice(engine.device.disk))
    assert [again.log.has(key) for key in KEYS[:3]] == [True, False, False]
    engine.device.sick.add(region)
    assert await engine.store(KEYS[:3]) == [Outcome.DONE] * 3
    assert engine.lost == set(), "what was written there before may be sound"
    assert engine.log.regions.open_region != region


async def test_without_room_the_tier_works_with_what_it_has_and_grows_when_there_is_room(
    engine: Engine,
) -> None:
    await engine.store(KEYS[: 6 * SLOTS])
    engine.device.has_room = False
    here = set(KEYS[: 6 * SLOTS])
    for number in range(3, 16):
        keys = [bytes([number, slot]) for slot in range(SLOTS)]
        outcomes = await engine.store(keys)
        here.update(k for k, o in zip(keys, outcomes, strict=True) if o is Outcome.DONE)
        here -= engine.lost
        assert Outcome.FAILED not in outcomes
        assert {k for r in range(REGIONS) for k in engine.log.index.keys_of(r)} == here
    assert engine.count("no_room_for_a_region") == 1
    assert 3 * SLOTS <= len(here) <= 6 * SLOTS
    engine.device.has_room = True
    engine.now += 31
    await engine.log.heal()
    for number in range(CAPACITY - len(here)):
        assert await engine.store([bytes([99, number])]) == [Outcome.DONE]
    assert len(engine.log.index) == CAPACITY > 6 * SLOTS


async def test_without_any_room_a_store_is_full_and_nothing_is_held_on_to(engine: Engine) -> None:
    engine.device.has_room = False
    for _ in range(20):
        assert await engine.store(KEYS[:SLOTS]) == [Outcome.FULL] * SLOTS
    engine.device.has_room = True
    engine.now += 31
    await engine.log.heal()
    assert await engine.store(KEYS[:SLOTS]) == [Outcome.DONE] * SLOTS


async def test_a_region_that_cannot_be_allocated_ahead_fails_no_store_yet(engine: Engine) -> None:
    await engine.fill(KEYS[:1])
    engine.device.has_room = False
    assert await engine.store(KEYS[1 : SLOTS + 1]) == [Outcome.DONE] * SLOTS
    await engine.log.calls.wait_idle()
    assert engine.count("no_room_for_a_region") == 0
    assert engine.log.regions.count_in(RegionState.RETIRED) == 0


async def test_a_store_that_meets_no_memory_holds_on_to_nothing(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def no_memory(_: object) -> memoryview:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(PagePool, "borrow", no_memory)
        for key in KEYS[:3]:
            with pytest.raises(MemoryError):
                await engine.store([key])
    assert await engine.store(KEYS[:3]) == [Outcome.DONE] * 3


async def test_a_region_that_is_given_up_while_it_is_reclaimed_stays_retired(
    engine: Engine,
) -> None:
    await engine.fill(KEYS[: 2 * SLOTS])
    regions, device = engine.log.regions, engine.device
    region = regions.victim()
    assert region is not None
    device.held = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.log._reclaimer.make_room)
        await anyio.wait_all_tasks_blocked()
        assert regions.state(region) is RegionState.RECLAIMING
        device.sick.add(region)
        assert regions.retire(region)
        device.held.set()
    assert regions.state(region) is RegionState.RETIRED


class HeldWrites(SimulatedDevice):
    """Writes of whole blocks wait for ``written``, if it is set."""

    written: anyio.Event | None = None

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        if self.written is not None and transfers[0].at >= GEOMETRY.slots_at:
            await self.written.wait()
        return await super().write(transfers)


async def test_a_block_written_into_a_region_that_was_retired_meanwhile_is_not_served() -> None:
    """Its region is given back once it works again, which may be at any time: with no block."""
    device = HeldWrites(fresh_disk())
    engine = await begun(device)
    await engine.fill(KEYS[: SLOTS + 1])
    regions = engine.log.regions
    region = regions.open_region
    assert region is not None
    device.written = anyio.Event()
    outcomes: list[Outcome] = []

    async def store() -> None:
        outcomes.extend(await engine.store(KEYS[SLOTS + 1 : SLOTS + 3]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store)
        await anyio.wait_all_tasks_blocked()
        device.sick.add(region)
        await engine.load(KEYS[SLOTS : SLOTS + 1])
        for _ in range(STRIKES_MAX):
            await engine.log.heal()
        assert regions.state(region) is RegionState.RETIRED
        device.sick.clear()
        device.written.set()
    assert outcomes == [Outcome.FAILED] * 2
    assert not any(map(engine.log.has, KEYS[SLOTS : SLOTS + 3]))
    engine.now += 301
    await engine.log.heal()
    assert regions.state(region) is RegionState.FREE
    await engine.check()


class BreakingDevice(SimulatedDevice):
    """The next write of a table page raises what is no ``OSError``, late."""

    breaks = False

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        if self.breaks and 0 < transfers[0].at < GEOMETRY.slots_at:
            self.breaks = False
            for _ in range(50):  # others come to wait for it
                await anyio.lowlevel.checkpoint()
            raise MemoryError
        return await super().write(transfers)


async def test_a_table_write_that_breaks_lets_those_who_wait_behind_it_go() -> None:
    device = BreakingDevice(fresh_disk())
    engine = await begun(device)
    await engine.store(KEYS[:1])
    device.breaks = True
    ended: list[object] = []

    async def store(key: bytes) -> None:
        try:
            ended.extend(await engine.store([key]))
        except MemoryError as broke:
            ended.append(type(broke))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            for key in KEYS[1:6]:
                tasks.start_soon(store, key)
    assert ended.count(MemoryError) == 1
    assert ended.count(Outcome.FAILED) == 4
    assert await engine.store(KEYS[1:6]) == [Outcome.DONE] * 5
    await engine.check()


class CutDevice(SimulatedDevice):
    """While ``cuts``, ``bytes_there`` of each read are there, and no write is taken."""

    cuts = False
    bytes_there = 0

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        ends = await super().read(transfers)
        return [self.bytes_there] * len(ends) if self.cuts else ends

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        if self.cuts:
            return OSError(errno.EROFS, "read-only")
        return await super().write(transfers)


@pytest.mark.parametrize(("kind", "count"), [("blocks_truncated", 6), ("stores_failed", 3)])
async def test_what_fails_is_counted_and_logged_once_until_it_succeeds(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CutDevice(fresh_disk())
    engine = await begun(device)
    if kind == "blocks_truncated":  # else no region can be opened, either
        await engine.fill(KEYS[:2])
    monkeypatch.setattr("kvtier_backends.incidents.EPISODE_S_MIN", 0.0)
    logged = []
    for key, device.cuts in zip(KEYS[2:], (True, True, False, True), strict=False):
        with capture_logs() as logs:
            if kind == "stores_failed":
                await engine.store([key])
            else:
                await engine.load(KEYS[:2])
        logged.append([(entry["kind"], entry["log_level"]) for entry in logs])
    begins, ends = (kind, "warning"), (kind, "info")
    assert logged == [[begins], [], [ends], [begins]]
    assert engine.count(kind) == count


async def test_of_a_file_that_is_too_short_the_blocks_before_its_end_are_served() -> None:
    device = CutDevice(fresh_disk())
    engine = await begun(device)
    await engine.store(KEYS[:4])
    device.cuts, device.bytes_there = True, 4 * BLOCK_BYTES - 1
    loaded = await engine.load(KEYS[:4])
    assert [outcome for outcome, _ in loaded] == [Outcome.DONE] * 3 + [Outcome.DAMAGED]
    assert engine.count("blocks_truncated") == 1
