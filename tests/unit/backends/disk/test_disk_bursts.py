"""A medium that fails for a while costs nothing that it still has, and stores work right after.

Bursts of errors, of any kind and length, on any of the device's calls.
"""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.log.region_faults import NO_ROOM_PAUSE_S
from kvtier_backends.disk.log.regions import RegionState
from kvtier_backends.posix import NO_ROOM
from tests.unit.backends.disk._log import CAPACITY, KEYS, REGIONS, SLOTS, Engine, begun, fresh_disk
from tests.unit.backends.disk._simulated import SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.disk.device import Transfer

pytestmark = pytest.mark.anyio

ERRNOS = [
    errno.EIO,
    errno.ESTALE,
    errno.EROFS,
    errno.ENOSPC,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EUCLEAN,
    errno.EMFILE,
]
EVERY_CALL = ("read", "write", "allocate")


class BurstDevice(SimulatedDevice):
    """While ``failing`` names a kind of call, each of that kind fails."""

    failing: tuple[str, ...] = ()
    number = errno.EIO
    share = 1.0  #: of the calls

    def _problem(self, kind: str) -> OSError | None:
        if kind in self.failing and self.disk.random.random() < self.share:
            return OSError(self.number, "in a burst")
        return None

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        ends = await super().read(transfers)
        return [self._problem("read") or end for end in ends]

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        return self._problem("write") or await super().write(transfers)

    async def allocate(self, region: int) -> None:
        problem = self._problem("allocate")
        if problem is not None:
            raise problem
        await super().allocate(region)


class Story:
    """A full tier, and what it is told to do. ``here`` is what was stored and not told lost."""

    def __init__(self, seed: int) -> None:
        self.device = BurstDevice(fresh_disk(seed))
        self.engine = Engine(self.device)
        self.random = random.Random(seed)
        self.here: set[bytes] = set()
        self.fresh = (b"new" + number.to_bytes(4, "big") * 8 for number in range(1 << 30))

    async def begin(self) -> None:
        await self.engine.begin()
        for key in KEYS[:CAPACITY]:
            assert await self.store([key]) == [Outcome.DONE]
        await self.engine.log.calls.wait_idle()

    async def store(self, keys: Sequence[bytes]) -> list[Outcome]:
        outcomes = await self.engine.store(keys)
        self.here.update(k for k, end in zip(keys, outcomes, strict=True) if end is Outcome.DONE)
        self.see()
        return outcomes

    async def store_in_a_full_tier(self) -> list[Outcome]:
        """As the tier does: its victims go first, however the store ends."""
        count = self.random.randint(1, SLOTS)
        excess = len(self.engine.log.index) + count - CAPACITY
        self.remove(self.random.sample(sorted(self.here), max(0, excess)))
        return await self.store([next(self.fresh) for _ in range(count)])

    def remove(self, keys: Sequence[bytes]) -> None:
        self.engine.log.remove(keys)
        self.here.difference_update(keys)

    def see(self) -> None:
        self.here -= self.engine.lost
        self.engine.lost.clear()
        index = self.engine.log.index
        assert {key for region in range(REGIONS) for key in index.keys_of(region)} == self.here

    def lost(self) -> int:
        names = ("blocks_dropped", "blocks_lost_with_a_region")
        return sum(map(self.engine.count, names))


async def burst(story: Story, calls: int) -> None:
    """Store, load, do upkeep and let seconds pass while the device fails."""
    for _ in range(calls):
        what = story.random.randrange(4)
        if what == 0 and story.here:
            await story.engine.load(story.random.sample(sorted(story.here), 1))
        elif what == 1:
            story.engine.now += story.random.choice([0.1, 1.0, 31.0])
            await story.engine.log.heal()
        else:
            await story.store_in_a_full_tier()
        await story.engine.log.calls.wait_idle()
        story.see()


async def check_burst(
    seed: int, number: int, failing: tuple[str, ...], share: float = 1.0, calls: int = 0
) -> None:
    story = Story(seed)
    await story.begin()
    lost, emptied = story.lost(), story.engine.count("regions_reclaimed")
    story.device.number, story.device.failing, story.device.share = number, failing, share
    await burst(story, calls or story.random.randint(1, 80))
    # An emptied region may cost what the budget does not pay for, as at any other time.
    emptied = story.engine.count("regions_reclaimed") - emptied
    assert story.engine.count("blocks_lost_with_a_region") == 0
    assert story.lost() - lost <= emptied * SLOTS
    if share == 1.0 and set(failing) >= {"read", "write"}:
        # A disk without room for the region that is kept back takes one: it has to come from there.
        takes_one = number == errno.ENOSPC and "allocate" in failing
        assert emptied <= takes_one, "nothing is given up while nothing works"
    if share == 1.0 and failing == EVERY_CALL:
        found = [outcome for outcome, _ in await story.engine.load(sorted(story.here)[:1])]
        assert found == [Outcome.FAILED] * len(found)
    # It ends. A second later, as long as the breaker's pause is, all is as before.
    story.device.failing = ()
    story.engine.now += 1.0
    await story.engine.log.heal()
    story.see()
    assert {outcome for outcome, _ in await story.engine.load(sorted(story.here))} <= {Outcome.DONE}
    assert await story.store_in_a_full_tier() != []
    for _ in range(3 * REGIONS):
        assert set(await story.store_in_a_full_tier()) == {Outcome.DONE}
    story.engine.now += NO_ROOM_PAUSE_S if number in NO_ROOM else 1.0
    await story.engine.log.heal()
    assert story.engine.log.regions.count_in(RegionState.RETIRED) == 0
    await story.engine.check()


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "failing",
    [
        ("write",),
        pytest.param(("read", "write"), marks=pytest.mark.long),  # between the other two
        EVERY_CALL,
    ],
    ids="+".join,
)
async def test_a_burst_of_errors_costs_no_block_and_stores_work_right_after(
    number: int, failing: tuple[str, ...]
) -> None:
    for seed in range(3):
        await check_burst(seed, number, failing)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
async def test_a_burst_of_errors_of_reads_costs_no_block(number: int) -> None:
    for seed in range(6):
        await check_burst(seed, number, ("read",))


async def test_64_writes_that_fail_cost_nothing() -> None:
    """They took 10,000 blocks to none: region after region was retired, and full ones emptied."""
    await check_burst(0, errno.EIO, ("write", "allocate"), calls=64)


async def test_a_region_that_could_not_be_opened_is_tried_again_when_writing_works() -> None:
    device = BurstDevice(fresh_disk())
    engine = await begun(device)
    device.failing = ("write",)
    for _ in range(20):
        assert await engine.store(KEYS[:1]) == [Outcome.FAILED]
    regions = engine.log.regions
    assert regions.count_in(RegionState.RETIRED) == 1, "the others were only tried"
    device.failing = ()
    await engine.log.heal()
    assert regions.count_in(RegionState.RETIRED) == 1, "nobody knows that it is over"
    assert await engine.store(KEYS[:1]) == [Outcome.DONE]
    await engine.log.heal()
    assert regions.count_in(RegionState.RETIRED) == 0
    await engine.check()


async def test_without_room_a_retry_costs_no_block() -> None:
    """The region that was tried again became the one that is kept back, without its room."""
    losses = []
    for pause_s in (0.0, 31.0):
        story = Story(0)
        await story.begin()
        for region in range(REGIONS):  # somebody else takes what the tier gives back
            if story.engine.log.regions.state(region) is RegionState.FREE:
                story.engine.log.regions.forget_allocation(region)
        story.device.has_room = False
        for _ in range(40):
            story.remove(sorted(story.here)[: 2 * SLOTS])
            await story.store_in_a_full_tier()
        before = story.lost()
        for _ in range(40):
            story.engine.now += pause_s
            await story.engine.log.heal()
            story.remove(sorted(story.here)[:SLOTS])
            await story.store([next(story.fresh) for _ in range(SLOTS)])
        losses.append(story.lost() - before)
    assert losses[1] == losses[0]
