"""A third party's backend that is bounded and persists, and has blocks from before.

They are told while stores go on. What the tier counts is what the backend has,
once all is quiet. The cell is real, in a thread. The backend says by events how far it is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core import wire
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    LoadBlock,
    Loaded,
    Outcome,
)
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.runtime_config import TierConfig
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import CONTENTS_A_PAUSE, BackendDriver
from kvtier.tier.leftovers import REMOVE_BLOCKS_MAX, Leftovers
from tests.support.patience import PATIENCE_S
from tests.unit.hosts._link_end import BLOCK, LinkEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.plugin_api.backend import StoreBlock

DONE, FULL, FAILED = Outcome.DONE, Outcome.FULL, Outcome.FAILED
CAPACITY = 4


def keys(text: str) -> tuple[bytes, ...]:
    return tuple(bytes([letter]) for letter in text.encode())


class Shelf(Backend):
    """Bounded, and outlives its tier. Its contents are told in two halves.

    A first store that comes before the second half ends after it.
    """

    type_name = "shelf"

    def __init__(self, has: str, *, capacity: int = CAPACITY, tells: str | None = None) -> None:
        self.traits = BackendTraits(2, 2, capacity_blocks=capacity)
        self.blocks: dict[bytes, tuple[bytes, bytes]] = dict.fromkeys(keys(has), (b"", b""))
        self.tells = keys(has if tells is None else tells)
        self.fails: list[str] = []  # "store", "remove": the next calls of that name raise
        self.keeps_what_fails = False
        self.is_full = False  # so that it says of each block, also of one that it has
        self.removed: list[bytes] = []
        self.all_told: asyncio.Event | None = None

    @classmethod
    def from_options(cls, options: Any, context: BackendContext) -> Shelf:
        raise NotImplementedError

    async def open(self) -> None:
        self.all_told = asyncio.Event()

    def contents(self) -> Iterator[Sequence[bytes]]:
        assert self.all_told is not None
        half = len(self.tells) // 2
        yield self.tells[:half] * CONTENTS_A_PAUSE  # again and again, and then there is a pause
        yield self.tells[half:]
        asyncio.get_running_loop().call_soon(self.all_told.set)

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.blocks for key in keys]

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return [
            Loaded(DONE, self.blocks[block.key][1])
            if block.key in self.blocks
            else Loaded(Outcome.ABSENT)
            for block in blocks
        ]

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        assert self.all_told is not None
        await self.all_told.wait()
        outcomes = []
        for block in blocks:
            if "store" in self.fails and not self.keeps_what_fails:
                break
            has_room = block.key in self.blocks or len(self.blocks) < self.traits.capacity_blocks  # type: ignore[operator]
            has_room = has_room and not self.is_full
            if has_room:
                self.blocks[block.key] = (bytes(block.buffer), block.digest)
            outcomes.append(DONE if has_room else FULL)
        self._fail("store")
        return outcomes

    async def remove(self, keys: Sequence[bytes]) -> None:
        self._fail("remove")
        for key in keys:
            self.removed.append(key)
            self.blocks.pop(key, None)

    def _fail(self, what: str) -> None:
        if what in self.fails:
            self.fails.remove(what)
            raise OSError(5, "Input/output error")


class Bench:
    """A cell over a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.link = LinkEnd()
        self.jobs = 0
        capacity = shelf.traits.capacity_blocks
        assert capacity is not None
        self.cell = TierThread(
            TierConfig("shelf", "1:shelf"),
            SlotMemory.anonymous(8, BLOCK),
            self.link,
            messages_max=16,
            make_backend=lambda: shelf,
            policy_of=lambda _: lambda: LRUPolicy(capacity),
        )
        self.cell.make()

    def post_store(self, text: str) -> int:
        self.jobs += 1
        stored = keys(text)
        job = wire.StoreJob(
            job=self.jobs, request="r", keys=stored, slots=tuple(range(len(stored)))
        )
        assert self.cell.post(job)
        self.cell.wake()
        return self.jobs

    def post_load(self, text: str) -> int:
        self.jobs += 1
        wanted = keys(text)
        assert self.cell.post(wire.LoadJob(self.jobs, wanted, tuple(range(len(wanted)))))
        self.cell.wake()
        return self.jobs

    def ended(self, job: int) -> tuple[Outcome, ...]:
        while not isinstance(said := self.link.next(), wire.JobEnded) or said.job != job:
            assert not isinstance(said, wire.TierBroke), said.reason
        return tuple(said.outcomes)

    def store(self, text: str) -> tuple[Outcome, ...]:
        return self.ended(self.post_store(text))

    def counted(self) -> set[bytes]:
        """What the tier counts: it is asked, as its link would."""
        every = keys("abcdefghijklmnopqrstuvwxyz")
        assert self.cell.post(wire.Probe(probe=1, keys=every))
        self.cell.wake()
        while not isinstance(said := self.link.next(), wire.ProbeAnswer):
            pass
        return {key for key, is_there in zip(every, said.present, strict=True) if is_there}


@pytest.fixture
def open_bench() -> Iterator[Callable[[Shelf], Bench]]:
    made: list[Bench] = []

    def make(shelf: Shelf) -> Bench:
        made.append(Bench(shelf))
        return made[-1]

    yield make
    for bench in made:
        bench.cell.close(PATIENCE_S)


SHELVES = {
    "full": Shelf("abcd"),
    "has more than the capacity": Shelf("abcdef"),
    "shrank to one block": Shelf("abcdef", capacity=1),
    "tells each block twice": Shelf("abcd", tells="abcdabcd"),
    "tells what it hasn't": Shelf("abc", tells="abcx"),
    "has room": Shelf("ab"),
}


@pytest.mark.parametrize("shelf", SHELVES.values(), ids=SHELVES)
def test_a_restart_over_a_full_backend_goes_on_storing(
    open_bench: Callable[[Shelf], Bench], shelf: Shelf
) -> None:
    """What is found while stores are under way, and no longer fits, is removed."""
    bench = open_bench(shelf)
    first = bench.post_store("yz")
    bench.cell.start()
    bench.ended(first)
    for name in "klmnop":  # what these do at first is a matter of how fast removals go
        bench.store(name)
    assert [bench.store(name) for name in "qrstuvwk"] == [(DONE,)] * 8
    assert bench.counted() - set(keys("x")) <= set(shelf.blocks)
    assert set(shelf.blocks) <= bench.counted()
    assert len(shelf.blocks) == shelf.traits.capacity_blocks


@pytest.mark.parametrize("keeps", [False, True], ids=["keeps nothing", "keeps the blocks"])
@pytest.mark.parametrize("what", ["store", "remove"])
def test_what_a_call_that_failed_may_have_left_is_removed(
    open_bench: Callable[[Shelf], Bench], what: str, *, keeps: bool
) -> None:
    """A store that raises may have kept its blocks, and a victim may be there all the same."""
    shelf = Shelf("abcd")
    shelf.keeps_what_fails = keeps
    bench = open_bench(shelf)
    bench.cell.start()
    while len(bench.counted()) < CAPACITY:
        pass
    for name in "efghij":
        shelf.fails = [what]
        assert bench.store(name) == (FAILED,)
    shelf.fails = []
    assert [bench.store(name) for name in "qrstuv"] == [(DONE,)] * 6
    assert set(shelf.blocks) == bench.counted()


def test_a_damaged_block_whose_removal_failed_is_removed_later(
    open_bench: Callable[[Shelf], Bench],
) -> None:
    """It took its room for ever: nobody counted it, so nobody chose it as a victim."""
    shelf = Shelf("")
    bench = open_bench(shelf)
    bench.cell.start()
    assert bench.store("ab") == (DONE, DONE)
    shelf.blocks[b"a"] = (b"", b"of other bytes")
    shelf.fails = ["remove"]
    assert bench.ended(bench.post_load("ab")) == (Outcome.DAMAGED, DONE)
    assert not shelf.fails
    assert bench.store("c") == (DONE,)
    assert set(shelf.blocks) == bench.counted() == set(keys("bc"))


@pytest.mark.parametrize("first", ["fails and keeps", "fails and keeps, beside another"])
def test_what_a_failed_store_kept_is_removed_if_there_is_no_room_the_next_time(
    open_bench: Callable[[Shelf], Bench], first: str
) -> None:
    """A store of the same block takes it for its own; if that ends FULL, it is nobody's again."""
    shelf = Shelf("")
    shelf.keeps_what_fails = True
    bench = open_bench(shelf)
    bench.cell.start()
    shelf.fails = ["store"]
    assert bench.store("a") == (FAILED,)
    shelf.is_full = True
    again = [bench.post_store("a") for _ in range(1 + ("beside" in first))]
    assert [bench.ended(job) for job in again] == [(FULL,)] * len(again)
    assert set(shelf.blocks) == set(keys("a"))
    shelf.is_full = False
    assert bench.store("b") == (DONE,)
    assert set(shelf.blocks) == bench.counted() == set(keys("b"))


async def driver_over(shelf: Shelf) -> tuple[BackendDriver, list[Any]]:
    """Return the driver of an open shelf that holds no store up, and what it reports."""
    await shelf.open()
    assert shelf.all_told is not None
    shelf.all_told.set()
    reported: list[Any] = []
    memory = SlotMemory.anonymous(4, BLOCK)
    return BackendDriver("1:shelf", shelf, memory, reported.append), reported


@pytest.mark.anyio
async def test_what_was_removed_before_it_was_told_is_not_told() -> None:
    """A backend may have taken down what it had when it was opened."""
    driver, told = await driver_over(Shelf("abcdef"))
    async with asyncio.TaskGroup() as tasks:
        driver.begin(tasks)
        driver.receive(d.RemoveBatch(batch=1, keys=keys("ade")))
        driver.report_lost(keys("f"))
    async with asyncio.TaskGroup() as tasks:
        driver.begin(tasks)
        driver.receive(d.StoreBatch(batch=2, keys=keys("e"), slots=(0,), remove=keys("b")))
    await driver.announce_contents()
    found = [
        key for message in told if isinstance(message, d.ContentsFound) for key in message.keys
    ]
    assert set(found) == set(keys("ce"))
    assert [message.outcomes for message in told if isinstance(message, d.BatchEnded)] == [
        (DONE,) * 3,
        (DONE,),
    ]
    driver.stop()


@pytest.mark.anyio
async def test_the_driver_of_a_tier_without_a_capacity_remembers_no_lost_keys() -> None:
    """It did, for the engine's life: each damaged block's key."""
    shelf = Shelf("")
    shelf.traits = BackendTraits(2, 2)
    driver = BackendDriver("1:shelf", shelf, SlotMemory.anonymous(1, BLOCK), lambda _: True)
    driver.report_lost(keys("abc"))
    assert driver._unannounced.still_there(keys("abc")) == keys("abc")
    driver.stop()


@pytest.mark.anyio
async def test_what_is_lost_is_reported_in_messages_that_hold_up_no_step() -> None:
    """A purge takes hundreds of thousands of blocks at once: one message is decoded as a whole."""
    driver, told = await driver_over(Shelf(""))
    lost = [number.to_bytes(4, "big") for number in range(2 * CONTENTS_A_PAUSE + 1)]
    driver.report_lost(lost)
    assert [len(message.keys) for message in told] == [CONTENTS_A_PAUSE, CONTENTS_A_PAUSE, 1]
    assert [key for message in told for key in message.keys] == lost
    driver.stop()


@pytest.mark.anyio
async def test_what_is_asked_for_is_reported_before_the_rest() -> None:
    """Not what has gone meanwhile, and nothing once all has been reported."""
    driver, told = await driver_over(Shelf("abcdef"))

    async def ask(batch: int, text: str) -> list[Any]:
        told.clear()
        async with asyncio.TaskGroup() as tasks:
            driver.begin(tasks)
            driver.receive(d.ProbeBatch(batch=batch, keys=keys(text)))
        return [each if isinstance(each, d.ContentsFound) else each.outcomes for each in told]

    driver.report_lost(keys("b"))
    assert await ask(1, "aby") == [d.ContentsFound(keys("a")), (DONE, DONE, Outcome.ABSENT)]
    await driver.announce_contents()
    assert isinstance(told[-1], d.ContentsAnnounced)
    assert await ask(2, "aby") == [(DONE, DONE, Outcome.ABSENT)]
    driver.stop()


def test_the_first_request_after_a_restart_finds_its_blocks(
    open_bench: Callable[[Shelf], Bench],
) -> None:
    """However long it takes until all blocks have been reported: here, for ever."""

    class Endless(Shelf):
        def contents(self) -> Iterator[Sequence[bytes]]:
            while True:
                yield keys("a") * CONTENTS_A_PAUSE

    bench = open_bench(Endless("abcd"))
    bench.cell.start()
    assert bench.counted() == set(keys("abcd"))


def test_leftovers_are_removed_in_bounded_batches_one_at_a_time() -> None:
    """A million of them must not keep the backend from anything else."""
    left = Leftovers()
    names = [number.to_bytes(4, "big") for number in range(REMOVE_BLOCKS_MAX + 2)]
    left.add(names)
    first = left.begin_removal()
    assert len(first) == REMOVE_BLOCKS_MAX
    assert left.begin_removal() == ()
    left.end_removal((FAILED, *(DONE,) * (REMOVE_BLOCKS_MAX - 1)))
    assert left.begin_removal() == (), "what failed waits for a store"
    left.wanted([names[-1]])
    assert left.pop_deferred() == (names[-2], names[0]), "and what is stored anew stays"
    assert left.pop_deferred() == left.begin_removal() == ()
