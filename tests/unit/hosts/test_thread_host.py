"""A tier cell around backends that raise, hang, lie and come back.

The link's end is a queue, so a test waits for a message and never for a clock.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import anyio
import pytest

from kvtier.core import tier_host, wire
from kvtier.errors import ConfigError
from kvtier.hosts import thread_host
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.runtime_config import TierConfig
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import BackendDriver
from tests.support.patience import PATIENCE_S
from tests.unit.hosts._link_end import BLOCK, LinkEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.core.wire import Message

GIVEN_UP_S = 0.05  #: what hangs in a test hangs for good


class DictBackend(Backend):
    """A correct backend; tests override what is to go wrong."""

    type_name = "dict"

    def __init__(self, capacity_blocks: int | None = None, *, batches: int = 2) -> None:
        self.traits = BackendTraits(batches, batches, capacity_blocks=capacity_blocks)
        self.blocks: dict[bytes, tuple[bytes, bytes]] = {}
        self.closed = threading.Event()

    @classmethod
    def from_options(cls, options: Any, context: BackendContext) -> DictBackend:
        raise NotImplementedError

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.blocks for key in keys]

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        answers = []
        for block in blocks:
            found = self.blocks.get(block.key)
            if found is None:
                answers.append(Loaded(Outcome.ABSENT))
                continue
            block.buffer[:] = found[0]
            answers.append(Loaded(Outcome.DONE, found[1]))
        return answers

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        for block in blocks:
            self.blocks[block.key] = (bytes(block.buffer), block.digest)
        return [Outcome.DONE] * len(blocks)

    async def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    async def close(self) -> None:
        self.closed.set()


class Bench:
    """A started cell over eight slots."""

    def __init__(self, backend: Backend, *, capacity: int | None = None) -> None:
        self.memory = SlotMemory.anonymous(8, BLOCK)
        self.link = LinkEnd()
        self.cell = TierThread(
            TierConfig("test", "1:test"),
            self.memory,
            self.link,
            messages_max=16,
            make_backend=lambda: backend,
            policy_of=lambda _: None if capacity is None else lambda: LRUPolicy(capacity),
        )
        self.cell.make()
        self.cell.start()

    def fill(self, slot: int, byte: int) -> None:
        self.memory.view(slot)[:] = bytes([byte]) * BLOCK

    def post(self, message: wire.Message) -> bool:
        """Send a message as the facade does: post it, and wake the cell."""
        taken = self.cell.post(message)
        self.cell.wake()
        return taken

    def store(self, keys: tuple[bytes, ...], slots: tuple[int, ...], job: int = 1) -> Any:
        assert self.post(wire.StoreJob(job=job, request="r", keys=keys, slots=slots))
        return self.link.next()

    def load(self, keys: tuple[bytes, ...], slots: tuple[int, ...], job: int = 2) -> Any:
        assert self.post(wire.LoadJob(job=job, keys=keys, slots=slots))
        ended = self.link.next()
        if isinstance(ended, wire.PresenceChanged):  # first what the load has found to be gone
            ended = self.link.next()
        return ended


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_host, "RESTART_PAUSE_S", 0.001)
    monkeypatch.setattr(thread_host, "QUIET_POLL_S", 0.001)
    monkeypatch.setattr(tier_host, "ABANDON_S", 0.05)


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    started: list[Bench] = []
    yield started
    for bench in started:
        bench.cell.close(GIVEN_UP_S)


def test_blocks_come_back_as_they_were_stored(benches: list[Bench]) -> None:
    bench = Bench(DictBackend())
    benches.append(bench)
    bench.fill(0, 7)
    bench.fill(1, 8)
    assert bench.store((b"a", b"b"), (0, 1)).outcomes == (Outcome.DONE, Outcome.DONE)
    ended = bench.load((b"a", b"x", b"b"), (2, 3, 4))
    assert ended.outcomes == (Outcome.DONE, Outcome.ABSENT, Outcome.DONE)
    assert bytes(bench.memory.view(2)) == b"\x07" * BLOCK
    assert bytes(bench.memory.view(4)) == b"\x08" * BLOCK


def test_wrong_bytes_are_damaged_and_deleted_where_they_came_from(benches: list[Bench]) -> None:
    """The layer above the backend checks, so a lying medium costs a miss."""
    backend = DictBackend()
    bench = Bench(backend)
    benches.append(bench)
    bench.store((b"a",), (0,))
    stored, digest = backend.blocks[b"a"]
    backend.blocks[b"a"] = (b"\x01" + stored[1:], digest)
    assert bench.load((b"a",), (1,)).outcomes == (Outcome.DAMAGED,)
    assert b"a" not in backend.blocks


def test_sound_bytes_under_the_wrong_key_are_damaged(benches: list[Bench]) -> None:
    backend = DictBackend()
    bench = Bench(backend)
    benches.append(bench)
    bench.store((b"a",), (0,))
    backend.blocks[b"b"] = backend.blocks[b"a"]
    assert bench.load((b"b",), (1,)).outcomes == (Outcome.DAMAGED,)


class Raising(DictBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        raise RuntimeError("medium on fire")

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        raise OSError(5, "Input/output error")

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        raise ValueError("no")


def test_a_backend_that_raises_fails_its_blocks_and_nothing_else(benches: list[Bench]) -> None:
    bench = Bench(Raising())
    benches.append(bench)
    assert bench.store((b"a",), (0,)).outcomes == (Outcome.FAILED,)
    assert bench.load((b"a",), (0,)).outcomes == (Outcome.FAILED,)
    assert bench.post(wire.Probe(probe=9, keys=(b"a",)))
    assert bench.link.next() == wire.ProbeAnswer(probe=9, present=(False,))


class Miscounting(DictBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return [Loaded(Outcome.DONE, b"")] * (len(blocks) + 1)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        return []


def test_too_many_or_too_few_answers_fail_the_part(benches: list[Bench]) -> None:
    bench = Bench(Miscounting())
    benches.append(bench)
    assert bench.store((b"a", b"b"), (0, 1)).outcomes == (Outcome.FAILED,) * 2
    assert bench.load((b"a", b"b"), (0, 1)).outcomes == (Outcome.FAILED,) * 2


class HangingLoads(DictBackend):
    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        self.hangs.set()
        await anyio.sleep_forever()
        raise AssertionError

    def busy_threads(self) -> int:
        return 1


def test_stores_go_on_while_a_load_hangs(benches: list[Bench]) -> None:
    backend = HangingLoads()
    bench = Bench(backend)
    benches.append(bench)
    assert bench.post(wire.LoadJob(job=5, keys=(b"a",), slots=(0,)))
    assert backend.hangs.wait(PATIENCE_S)
    assert bench.store((b"b",), (1,), job=6).job == 6


@pytest.mark.promise(15)
def test_close_does_not_wait_for_a_hung_tier_and_says_that_memory_is_in_use() -> None:
    """The caller must leave the slots mapped: a thread may still write them."""
    backend = HangingLoads()
    bench = Bench(backend)
    assert bench.post(wire.LoadJob(job=5, keys=(b"a",), slots=(0,)))
    assert backend.hangs.wait(PATIENCE_S)
    assert bench.cell.close(GIVEN_UP_S) is False


def unstarted(make_backend: Callable[[], Backend], **given: Any) -> TierThread:
    """Return a host whose backend is not made yet."""
    memory, config = SlotMemory.anonymous(8, BLOCK), TierConfig("test", "1:test")
    return TierThread(
        config, memory, LinkEnd(), messages_max=16, make_backend=make_backend, **given
    )


@pytest.mark.parametrize("hangs", [False, True])
def test_a_backend_of_an_engine_that_does_not_start_is_discarded(
    monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    """A tier of vLLM's kept its port, so that a second try to start found it taken."""
    monkeypatch.setattr(thread_host, "ABANDON_S", 0.01 if hangs else PATIENCE_S)
    discarded, goes_on = threading.Event(), threading.Event()

    class Taken(DictBackend):
        def discard(self) -> None:
            discarded.set()
            if hangs:
                goes_on.wait()

    cell = unstarted(Taken)
    cell.make()
    assert cell.close(0.0) is True
    assert discarded.wait(PATIENCE_S)
    goes_on.set()


@pytest.mark.parametrize("at_start", [True, False])
def test_a_backend_whose_policy_cannot_be_made_is_discarded(*, at_start: bool) -> None:
    discarded = threading.Event()

    class Made(DictBackend):
        def discard(self) -> None:
            discarded.set()

    cell = unstarted(Made, policy_of=Mock(side_effect=ConfigError("no such policy")))
    if at_start:
        with pytest.raises(ConfigError):
            cell.make()
    else:
        cell.start_without("its storage was down")
        cell.start()
    assert discarded.wait(PATIENCE_S)
    assert cell.close(PATIENCE_S)


def test_close_ends_what_was_begun() -> None:
    """A store that was taken is carried out, so that a restart finds it."""
    backend = DictBackend()
    bench = Bench(backend)
    for number in range(8):
        assert bench.post(
            wire.StoreJob(job=number, request="r", keys=(bytes([number]),), slots=(number,))
        )
    assert bench.cell.close(PATIENCE_S) is True
    assert len(backend.blocks) == 8
    assert backend.closed.is_set()
    assert not bench.post(wire.Probe(probe=1, keys=(b"a",)))


def test_close_waits_for_a_call_that_ends_after_its_backend() -> None:
    """A marker that a slow disk took a second to remove made a closed tier one that hangs."""

    class EndsLate(DictBackend):
        looks = 0

        def busy_threads(self) -> int:
            self.looks += self.closed.is_set()
            return int(self.looks < 3)

    backend = EndsLate()
    bench = Bench(backend)
    assert bench.store((b"a",), (0,)).outcomes == (Outcome.DONE,)
    assert bench.cell.close(PATIENCE_S) is True
    assert backend.looks == 3


class OpensLater(DictBackend):
    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def open(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionRefusedError(111, "Connection refused")


def test_a_backend_that_cannot_be_opened_is_cut_off_and_heals_by_itself(
    benches: list[Bench],
) -> None:
    bench = Bench(OpensLater(3))
    benches.append(bench)
    kinds = [type(bench.link.next()) for _ in range(7)]
    assert kinds == [wire.TierBroke, wire.TierFenced] * 3 + [wire.TierRestarted]
    assert bench.store((b"a",), (0,)).outcomes == (Outcome.DONE,)
    assert bench.link.opened == 0, "the restart was told"


def test_a_backend_that_is_open_is_closed_if_the_memory_cannot_be_registered(
    benches: list[Bench],
) -> None:
    """It once kept its connection and its place, which the next backend found taken."""

    class Refuses(DictBackend):
        failures = 1

        async def register_memory(self, _slots: memoryview) -> None:
            self.failures -= 1
            if self.failures >= 0:
                raise OSError("registration refused")

    backend = Refuses()
    benches.append(bench := Bench(backend))
    kinds = [type(bench.link.next()) for _ in range(3)]
    assert kinds == [wire.TierBroke, wire.TierFenced, wire.TierRestarted]
    assert backend.closed.is_set()


def test_a_cell_that_broke_is_fenced_once_none_of_its_threads_is_busy(
    benches: list[Bench],
) -> None:
    """Its slots are given out then, and a thread may write to one as long as it is busy."""

    class EndsLate(OpensLater):
        looks = 0

        def busy_threads(self) -> int:
            self.looks += 1
            return int(self.looks < 3)

    backend = EndsLate(1)
    bench = Bench(backend)
    benches.append(bench)
    assert isinstance(bench.link.next(), wire.TierBroke)
    assert isinstance(bench.link.next(), wire.TierFenced)
    assert backend.looks == 3


def test_an_actor_that_raises_takes_down_its_own_tier_only(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(DictBackend())
    benches.append(bench)
    bench.store((b"a",), (0,))
    monkeypatch.setattr(
        "kvtier.tier.unbounded_tier.UnboundedTier._start_batches",
        lambda _self: (_ for _ in ()).throw(RuntimeError("a bug")),
    )
    assert bench.post(wire.LoadJob(job=7, keys=(b"a",), slots=(1,)))
    assert bench.link.next() == wire.TierBroke(reason="RuntimeError: a bug")
    assert isinstance(bench.link.next(), wire.TierFenced)
    monkeypatch.undo()
    assert isinstance(bench.link.next(), wire.TierRestarted)
    assert bench.link.opened == 1, "at the start"
    assert bench.load((b"a",), (2,), job=8).outcomes == (Outcome.DONE,)


def test_a_full_mailbox_refuses(benches: list[Bench]) -> None:
    class NeverOpens(DictBackend):
        async def open(self) -> None:
            await anyio.sleep_forever()

    bench = Bench(NeverOpens())
    benches.append(bench)
    taken = [bench.post(wire.Probe(probe=number, keys=(b"a",))) for number in range(20)]
    assert taken == [True] * 16 + [False] * 4


def test_a_tier_with_a_capacity_keeps_to_it_and_says_what_it_dropped(
    benches: list[Bench],
) -> None:
    backend = DictBackend(capacity_blocks=4)
    bench = Bench(backend, capacity=4)
    benches.append(bench)
    keys = tuple(bytes([number]) for number in range(4))
    assert bench.store(keys, (0, 1, 2, 3), job=1).outcomes == (Outcome.DONE,) * 4
    assert bench.post(wire.StoreJob(job=2, request="r", keys=(b"x", b"y"), slots=(4, 5)))
    dropped: list[bytes] = []
    while not isinstance(message := bench.link.next(), wire.JobEnded):
        dropped += message.removed
    assert message.outcomes == (Outcome.DONE,) * 2
    assert dropped == [keys[3], keys[2]], "tails go before heads"
    assert set(backend.blocks) == {keys[0], keys[1], b"x", b"y"}
    assert bench.post(wire.Probe(probe=3, keys=(keys[0], keys[3])))
    assert bench.link.next().present == (True, False)


class Speechless(DictBackend):
    """It cannot even say how it is."""

    def counters(self) -> dict[str, int]:
        raise TypeError("no counts")

    def busy_threads(self) -> int:
        raise TypeError("no threads")


def test_a_backend_that_cannot_say_how_it_is_has_no_counts_and_may_be_busy() -> None:
    bench = Bench(Speechless())
    assert bench.store((b"a",), (0,)).outcomes == (Outcome.DONE,)
    assert bench.cell.close(GIVEN_UP_S) is False, "nobody knows whether it still writes to a slot"
    assert bench.link.counted.empty()


class Panic(BaseException):
    """What extensions in other languages raise."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, Panic, SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_fails_its_blocks_too(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    bench = Bench(DictBackend())
    benches.append(bench)

    async def store(*_: object) -> Sequence[Outcome]:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(DictBackend, "store", store)
        assert bench.store((b"a",), (0,)).outcomes == (Outcome.FAILED,)
    assert bench.store((b"a",), (0,)).outcomes == (Outcome.DONE,)


def test_a_panic_of_the_cell_is_a_broken_tier(benches: list[Bench]) -> None:
    class Panics(OpensLater):
        async def open(self) -> None:
            if self.failures:
                self.failures -= 1
                raise Panic("at the disco")

    bench = Bench(Panics(1))
    benches.append(bench)
    assert bench.link.next() == wire.TierBroke(reason="Panic: at the disco")
    assert isinstance(bench.link.next(), wire.TierFenced)
    assert isinstance(bench.link.next(), wire.TierRestarted)


def test_a_log_that_cannot_be_written_stops_nobody(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk with the log is full, or its reader has gone."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("structlog.get_logger", refuse)
    bench = Bench(OpensLater(2))
    benches.append(bench)
    kinds = [type(bench.link.next()) for _ in range(5)]
    assert kinds == [wire.TierBroke, wire.TierFenced] * 2 + [wire.TierRestarted]


@pytest.mark.anyio
async def test_contents_are_told_only_as_fast_as_the_link_takes_them() -> None:
    """Else the answers to probes would have to queue up behind a million keys."""

    class Full(DictBackend):
        def contents(self) -> list[list[bytes]]:
            return [[number.to_bytes(4, "big")] * 512 for number in range(3)]

    told: list[Message] = []
    asked = 0

    def may_announce() -> bool:
        nonlocal asked
        asked += 1
        assert len(told) <= asked
        return asked % 2 == 0

    driver = BackendDriver(
        "1:test", Full(), SlotMemory.anonymous(1, BLOCK), told.append, may_announce
    )
    await driver.announce_contents()
    assert told.pop() == d.ContentsAnnounced()
    assert (len(told), asked) == (3, 6)
    driver.stop()
