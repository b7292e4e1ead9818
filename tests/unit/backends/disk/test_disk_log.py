"""The log on a simulated disk: crashes that tear and lose, reclaimed regions, any order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from kvtier.errors import Misuse
from kvtier.plugin_api.backend import LoadBlock, Outcome, StoreBlock
from kvtier_backends.disk.format import PAGE_BYTES
from kvtier_backends.disk.log.batches import Reinsertion
from kvtier_backends.disk.log.regions import KEPT_BACK_REGIONS, Regions, RegionState
from tests.unit.backends._seeds import seeds
from tests.unit.backends.disk._log import (
    BLOCK_BYTES,
    CAPACITY,
    GEOMETRY,
    KEYS,
    OWN_PAGE_SLOTS,
    REGIONS,
    SLOTS,
    Engine,
    begun,
    data_of,
    fresh_disk,
)
from tests.unit.backends.disk._simulated import SimulatedDevice, SimulatedDisk

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvtier_backends.disk.device import Transfer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seed", seeds(12, of=30))
async def test_after_any_crash_no_wrong_block_is_served(seed: int) -> None:
    """Torn, reordered and lost writes; the versions of a key differ, so that a stale one shows.

    A key is stored anew only after it was removed or lost, as the tier above does. After a
    crash any version that was ever written may come back, whole, or none.
    """
    disk = fresh_disk(seed)
    rng = random.Random(seed)
    written: dict[bytes, set[bytes]] = {}
    for life in range(4):
        engine = await begun(SimulatedDevice(disk))
        await engine.check()
        here = {key for region in range(REGIONS) for key in engine.log.index.keys_of(region)}
        for outcome, key, data in await load_all(engine, sorted(here)):
            assert outcome in (Outcome.DONE, Outcome.DAMAGED)
            if outcome is Outcome.DONE:
                assert data in written[key]
            else:
                engine.log.remove([key])
                here.discard(key)
        for step in range(40):
            await run_a_step(engine, rng, here, written, version=life * 100 + step)
        await engine.check()
        if life % 2:  # in the midst of stores
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.store, list(written)[:5], 7)
                for _ in range(rng.randrange(8)):
                    await anyio.lowlevel.checkpoint()
                disk.crash()
            note(written, list(written)[:5], 7)
        else:
            disk.crash()


def note(written: dict[bytes, set[bytes]], keys: Sequence[bytes], version: int) -> None:
    for key in keys:
        written.setdefault(key, set()).add(data_of(key, version))


async def load_all(engine: Engine, keys: Sequence[bytes]) -> list[tuple[Outcome, bytes, bytes]]:
    answers = await engine.load(keys)
    return [(outcome, key, data) for key, (outcome, data) in zip(keys, answers, strict=True)]


async def run_a_step(
    engine: Engine,
    rng: random.Random,
    here: set[bytes],
    written: dict[bytes, set[bytes]],
    version: int,
) -> None:
    """Do as the tier above does: make room, store and load at once, and believe the answers."""
    fresh = rng.sample([key for key in KEYS if key not in here], rng.randrange(1, 12))
    excess = len(here) + len(fresh) - CAPACITY
    victims = rng.sample(sorted(here), max(0, excess))
    engine.log.remove(victims)
    here.difference_update(victims)
    sample = rng.sample(sorted(here), min(len(here), 6))
    note(written, fresh, version)
    outcomes: list[Outcome] = []

    async def store() -> None:
        outcomes.extend(await engine.store(fresh, version))

    async def load() -> None:
        for outcome, key, data in await load_all(engine, sample):
            # Lost while it was read, or whole: nothing else, as no medium failed in this life.
            assert outcome in (Outcome.DONE, Outcome.ABSENT), outcome
            if outcome is Outcome.DONE:
                assert data in written[key]
            else:
                assert key in engine.lost

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store)
        tasks.start_soon(load)
    here.update(key for key, o in zip(fresh, outcomes, strict=True) if o is Outcome.DONE)
    here -= engine.lost
    engine.lost.clear()
    assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
    assert len(engine.log.index) == len(here)


async def test_random_removal_at_full_capacity_never_stops_the_stores(engine: Engine) -> None:
    """With a tenth overprovisioned, regions are reclaimed fast enough; what is dropped is told."""
    rng = random.Random(5)
    here: set[bytes] = set()
    written: dict[bytes, set[bytes]] = {}
    full = 0
    for version in range(600):
        before = engine.count("stores_full")
        await run_a_step(engine, rng, here, written, version)
        full += engine.count("stores_full") - before
    assert full == 0
    assert engine.count("regions_reclaimed") > 50
    assert engine.count("bytes_reinserted") > 0


async def test_when_the_oldest_go_first_nothing_is_lost_and_hardly_anything_is_written_twice(
    engine: Engine,
) -> None:
    here: list[bytes] = []
    for number in range(20 * CAPACITY):
        if len(here) == CAPACITY:
            engine.log.remove([here.pop(0)])
        key = number.to_bytes(4, "big")
        assert await engine.store([key]) == [Outcome.DONE]
        here.append(key)
    await engine.log.calls.wait_idle()
    assert not engine.lost
    assert engine.count("bytes_reinserted") <= 0.02 * engine.count("bytes_stored")


async def test_what_was_used_least_recently_is_dropped_first_and_tails_before_heads(
    engine: Engine,
) -> None:
    """A prompt's block is of no use without those before it."""
    kept: list[bytes] = []
    engine.budget._credit_max = 0
    for number in range(REGIONS - 1):
        keys = KEYS[number * SLOTS : (number + 1) * SLOTS]
        await engine.store(keys)
        # Half of each region goes; what is left is more than the budget allows.
        engine.log.remove(keys[::2])
        kept.extend(keys[1::2])
        engine.now += 1
    used = kept[1 : SLOTS // 2]  # of the oldest region, all but one
    engine.now += 100
    await engine.load(used)
    engine.budget._credit = 2.5 * BLOCK_BYTES + 3 * 4096
    await engine.fill(KEYS[-2:])
    assert engine.lost == {kept[0], used[-1]}


async def test_a_region_that_is_read_is_not_overwritten_however_long_it_takes(
    engine: Engine,
) -> None:
    await engine.store(KEYS[:SLOTS], version=1)
    read = engine.log.index.get(KEYS[0])
    assert read is not None
    engine.device.held = anyio.Event()
    answers: list[tuple[Outcome, bytes]] = []

    async def load() -> None:
        answers.extend(await engine.load(KEYS[:1]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load)
        while not engine.device.running:
            await anyio.lowlevel.checkpoint()
        engine.log.remove(KEYS[:SLOTS])
        for version in range(4 * REGIONS):
            keys = [bytes([version, slot]) for slot in range(SLOTS)]
            assert await engine.store(keys) == [Outcome.DONE] * SLOTS
            engine.log.remove(keys)
        assert engine.log.regions.state(read // SLOTS) is not RegionState.OPEN
        engine.device.held.set()
    assert answers == [(Outcome.DONE, data_of(KEYS[0], 1))]


async def test_an_old_block_is_absent_and_told() -> None:
    engine = await begun(ttl_s=10)
    await engine.store(KEYS[:2])
    engine.now += 9
    assert engine.log.has(KEYS[0])
    assert (await engine.load(KEYS[:1]))[0][0] is Outcome.DONE
    engine.now += 2
    assert not engine.log.has(KEYS[0])
    assert (await engine.load(KEYS[:1]))[0][0] is Outcome.ABSENT
    assert engine.lost == {KEYS[0]}
    for region in engine.log.regions.oldest_first():
        engine.log.sweep(region)
    assert engine.lost == set(KEYS[:2])
    assert await engine.store(KEYS[:2]) == [Outcome.DONE] * 2
    assert (await engine.load(KEYS[:1]))[0][0] is Outcome.DONE


async def test_stores_that_overlap_keep_within_the_capacity_together(engine: Engine) -> None:
    """Blocks that are on their way count as if they were there."""
    await engine.store(KEYS[: CAPACITY - 6])
    outcomes: list[Outcome] = []

    async def store(first: int) -> None:
        outcomes.extend(await engine.store(KEYS[first : first + 4]))

    async with anyio.create_task_group() as tasks:
        for first in range(CAPACITY, CAPACITY + 12, 4):
            tasks.start_soon(store, first)
    assert outcomes.count(Outcome.DONE) == 6
    assert outcomes.count(Outcome.FULL) == 6
    assert engine.count("stores_full") == 6


async def test_once_the_folder_has_vanished_nothing_is_there_and_stores_fail(
    engine: Engine,
) -> None:
    await engine.fill(KEYS[:3])
    engine.log.abandon()
    assert engine.lost == set(KEYS[:3])
    assert [outcome for outcome, _ in await engine.load(KEYS[:1])] == [Outcome.ABSENT]
    assert await engine.store(KEYS[:2]) == [Outcome.FAILED] * 2


async def test_keys_longer_than_planned_fill_a_table_early_and_are_found_again() -> None:
    disk = fresh_disk()
    engine = await begun(SimulatedDevice(disk))
    keys = [bytes([number]) * 255 for number in range(1, 40)]
    stored = [key for key in keys if await engine.store([key]) == [Outcome.DONE]]
    assert len(stored) >= 30
    disk.before.clear()
    engine = await begun(SimulatedDevice(disk))
    assert [outcome for outcome, _ in await engine.load(stored)] == [Outcome.DONE] * len(stored)


class CountingDevice(SimulatedDevice):
    """Counts how many writes of whole blocks run at once, and keeps what was written where."""

    writing = 0
    writing_max = 0

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__(disk)
        self.writes: list[list[tuple[int, int]]] = []

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        self.writes.append([(transfer.at, transfer.size) for transfer in transfers])
        is_data = any(transfer.size >= BLOCK_BYTES for transfer in transfers)
        self.writing += is_data
        self.writing_max = max(self.writing_max, self.writing)
        try:
            return await super().write(transfers)
        finally:
            self.writing -= is_data


async def test_stores_go_on_one_at_a_time_while_a_load_takes_for_ever() -> None:
    device = CountingDevice(fresh_disk())
    engine = await begun(device)
    await engine.store(KEYS[:1])
    device.held = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.load, KEYS[:1])
        await anyio.wait_all_tasks_blocked()
        device.writing_max = 0
        async with anyio.create_task_group() as stores:
            for key in KEYS[1:9]:
                stores.start_soon(engine.store, [key])
        assert all(engine.log.has(key) for key in KEYS[1:9])
        assert device.writing_max == 1
        device.held.set()
    await engine.check()


async def test_several_regions_are_opened_ahead_at_once_and_take_blocks_in_their_order() -> None:
    """Each header waits behind all that is being written: one after the other took too long.

    Whichever is written first: a later start takes the higher sequence for the newer.
    """
    engine = await begun(ahead=3)
    regions, writing, writing_max = engine.log.regions, 0, 0
    write = engine.device.write

    async def last_first(transfers: Sequence[Transfer]) -> OSError | None:
        nonlocal writing, writing_max
        is_header = transfers[0].at == 0
        writing += is_header
        writing_max = max(writing_max, writing)
        for _ in range(50 // writing if is_header else 0):
            await anyio.lowlevel.checkpoint()
        problem = await write(transfers)
        writing -= is_header
        return problem

    engine.device.write = last_first  # type: ignore[method-assign]
    opened: list[int | None] = []
    for key in KEYS[: 3 * SLOTS + 1]:
        await engine.fill([key])
        opened.append(regions.open_region)
    assert regions.next_count == 3
    assert writing_max > 1
    async with engine.log.opening:  # no header can be written now
        for key in KEYS[3 * SLOTS + 1 : 7 * SLOTS]:
            assert await engine.store([key]) == [Outcome.DONE]
            opened.append(regions.open_region)
    order = [each for each in dict.fromkeys(opened) if each is not None]
    assert len(order) == 7
    assert order == sorted(order, key=regions.sequence)
    await engine.check()


async def test_a_store_that_waits_for_a_region_has_others_opened_with_it() -> None:
    """In a full folder regions empty as new blocks come: stores waited for each region anew."""
    engine = await begun(ahead=3)
    log, regions = engine.log, engine.log.regions
    log._opener.may_open_ahead = lambda: False  # type: ignore[method-assign]
    stored = KEYS[: 9 * SLOTS]  # of all regions but one
    for start in range(0, len(stored), SLOTS):
        await engine.store(stored[start : start + SLOTS])
        log.remove(stored[start - 6 * SLOTS : start - 5 * SLOTS] if start >= 6 * SLOTS else ())
    log.remove(stored[: 6 * SLOTS])
    assert (regions.room, regions.has_next) == (0, False)
    opened: list[int] = []
    real = log._opener.open

    async def counted(several: Sequence[int]) -> OSError | None:
        opened.append(len(several))
        return await real(several)

    log._opener.open = counted  # type: ignore[method-assign]
    new = KEYS[len(stored) : len(stored) + 3 * SLOTS]
    assert await engine.store(new) == [Outcome.DONE] * len(new)
    assert min(opened) > 1
    await engine.check()


async def test_regions_without_blocks_are_reclaimed_for_that_and_others_are_not() -> None:
    """To reclaim a dead one costs nothing; the longer one with blocks waits, the less it costs."""
    engine = await begun(ahead=3)
    regions = engine.log.regions
    held = KEYS[: (REGIONS - 4) * SLOTS]
    for start in range(0, len(held), SLOTS):
        await engine.fill(held[start : start + SLOTS])
    await engine.fill(KEYS[len(held) : len(held) + 1])
    assert (regions.next_count, regions.free_count) == (2, KEPT_BACK_REGIONS)
    assert engine.count("regions_reclaimed") == 0
    engine.log.remove(held[:SLOTS])
    await engine.fill(
        KEYS[len(held) + 1 : len(held) + SLOTS]
    )  # the open one is filled: the next opens
    await engine.fill(KEYS[len(held) + SLOTS : len(held) + SLOTS + 1])
    assert engine.count("regions_reclaimed") == 1
    assert engine.count("bytes_reinserted") == 0
    await engine.check()


async def test_dead_regions_are_searched_for_a_few_times_a_region_and_not_at_each_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search looks at all regions: it took a third of the time of stores of 64 KiB."""
    engine = await begun(ahead=3)
    searches = 0
    real = Regions.victim

    def counted(regions: Regions, exclude: Container[int] = ()) -> int | None:
        nonlocal searches
        searches += 1
        return real(regions, exclude)

    stored = KEYS[: (REGIONS - 3) * SLOTS + 1]  # no region is left to be opened
    for start in range(0, len(stored), SLOTS):
        await engine.fill(stored[start : start + SLOTS])
    assert engine.log.regions.has_next
    monkeypatch.setattr(Regions, "victim", counted)
    # As if the last attempt, and the last search, were another region's.
    engine.log._opener._opened_ahead_in = None
    engine.log._reclaimer._searched_in = (None, 0)
    for _ in range(100):
        engine.log._open_ahead()
    assert searches == 1


async def test_no_region_is_reclaimed_while_the_next_one_is_open_already(engine: Engine) -> None:
    """The longer a reclaim waits, the fewer blocks it has to write twice."""
    regions = engine.log.regions

    async def store_one_by_one(keys: Sequence[bytes]) -> None:
        for key in keys:
            await engine.fill([key])

    await store_one_by_one(KEYS[:SLOTS])
    engine.log.remove(KEYS[:SLOTS])  # a victim that costs nothing
    await store_one_by_one(KEYS[SLOTS : (REGIONS - 2) * SLOTS - 1])
    assert (regions.room, regions.has_next, regions.free_count) == (1, True, KEPT_BACK_REGIONS)
    assert engine.count("regions_reclaimed") == 0
    engine.log.remove(KEYS[SLOTS : 2 * SLOTS])  # within the capacity
    await store_one_by_one(KEYS[:SLOTS])
    assert engine.count("regions_reclaimed") == 1


async def test_a_key_or_buffer_that_is_no_blocks_is_the_callers_mistake_and_takes_no_slot() -> None:
    device = CountingDevice(fresh_disk())
    engine = await begun(device)
    await engine.fill(KEYS[:1])
    device.writes.clear()
    room = engine.log.regions.room
    good = StoreBlock(KEYS[1], memoryview(bytes(BLOCK_BYTES)), bytes(16))
    mistakes = [good._replace(key=key) for key in (b"", bytes(256))]
    for mistake in [*mistakes, good._replace(buffer=memoryview(bytes(BLOCK_BYTES + 1)))]:
        with pytest.raises(Misuse):
            await engine.log.store([good, mistake])
    for size in (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 0):
        with pytest.raises(Misuse, match=f"a buffer of {size} bytes is no block of {BLOCK_BYTES}"):
            await engine.log.load([LoadBlock(KEYS[0], memoryview(bytearray(size)))])
    assert not device.writes
    assert engine.log.regions.room == room
    assert not engine.log.has(KEYS[1])
    await engine.check()


async def test_the_entries_of_many_blocks_go_behind_them_in_one_call() -> None:
    device = CountingDevice(fresh_disk())
    engine = await begun(device)
    await engine.fill(KEYS[:1])
    device.writes.clear()
    await engine.store(KEYS[1 : 1 + OWN_PAGE_SLOTS])
    page = (3 * PAGE_BYTES, PAGE_BYTES)  # behind the header, the shared page and its next version
    assert device.writes == [[(GEOMETRY.slot_at(1), OWN_PAGE_SLOTS * BLOCK_BYTES), page]]
    device.writes.clear()
    few = KEYS[10 : 10 + OWN_PAGE_SLOTS - 1]
    await engine.store(few)
    assert [len(transfers) for transfers in device.writes] == [1, 1]
    headers = 2  # and three pages: the shared one twice, one of their own
    assert engine.count("bytes_of_tables") == (headers + 3) * PAGE_BYTES
    await engine.check()

    again = await begun(SimulatedDevice(device.disk))
    for key in [*KEYS[: 1 + OWN_PAGE_SLOTS], *few]:
        assert again.log.has(key)


async def open_all_regions(engine: Engine) -> None:
    """Open one region after the other, until one is next and none is free any more."""
    log = engine.log
    await log.calls.wait_idle()
    while log.regions.free_count:
        if log.regions.has_next:
            log.regions.fill()
        region = log.regions.next_to_open(for_reinsertion=True)
        assert region is not None
        async with log.opening:
            assert await log._opener.open([region]) is None
    assert (log.regions.room, log.regions.has_next) == (SLOTS, True)


async def test_room_for_reinserted_blocks_is_taken_by_nobody_else(engine: Engine) -> None:
    await open_all_regions(engine)
    appender = engine.log._appender
    appender.reserve(SLOTS - 2)
    assert appender._room(for_reinsertion=False) == SLOTS, "they have room in the next region"
    engine.log.regions.fill()
    assert appender._room(for_reinsertion=False) == 2
    assert appender._room(for_reinsertion=True) == SLOTS
    appender.reserve(SLOTS + 1)  # others have taken some since
    assert appender._room(for_reinsertion=False) == 0
    appender.reserve(0)
    assert appender._room(for_reinsertion=False) == SLOTS


async def test_blocks_that_find_no_room_to_be_reinserted_are_full_and_stay_where_they_are() -> None:
    engine = await begun()
    await engine.store(KEYS[:2])
    index, regions = engine.log.index, engine.log.regions
    await open_all_regions(engine)
    regions.fill()
    regions.allocate(SLOTS - 1)  # by a store that goes on
    items = []
    for at, key in enumerate(KEYS[:2]):
        buffer = memoryview(data_of(key, 0))
        items.append(Reinsertion(key, buffer, index.record(at), at))
    assert index.find(KEYS[:2]) == [0, 1]
    assert await engine.log._appender.reinsert(items) == [Outcome.DONE, Outcome.FULL]
    assert index.find(KEYS[:2]) == [REGIONS * SLOTS - 1, 1]
    for key in KEYS[:2]:
        assert await engine.load([key]) == [(Outcome.DONE, data_of(key, 0))]
