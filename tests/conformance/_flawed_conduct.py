"""Backends that take care of their bytes and break the other rules, each in one way."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.lowlevel

from kvtier.plugin_api.threads import DaemonThreads
from kvtier.testing import backend_books, backend_calls
from kvtier_backends.memory import MemoryBackend
from tests.conformance._shelves import CAPACITY_BYTES, Outlives

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.plugin_api.backend import (
        Backend,
        BackendContext,
        LoadBlock,
        Loaded,
        Outcome,
        StoreBlock,
    )
    from kvtier.testing import BackendCheck


class HasAThread(MemoryBackend):
    """What many drivers are: loads are calls in a thread."""

    def __init__(self, context: BackendContext, *rest: Any) -> None:
        super().__init__(context, *rest)
        self.threads = DaemonThreads(1, "test")

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return await self.threads.run(partial(self.copy, blocks))

    def copy(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return [self._load_one(block, hit=False) for block in blocks]

    def busy_threads(self) -> int:
        return self.threads.busy()

    async def close(self) -> None:
        self.threads.stop()
        await super().close()


class CatchesCancellations(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                await anyio.lowlevel.checkpoint()
        return await super().load(blocks)


class ShieldsItsStores(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        storing = asyncio.ensure_future(self.store_later(blocks))
        try:
            return await asyncio.shield(storing)
        except asyncio.CancelledError:
            return await storing

    async def store_later(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        await anyio.lowlevel.checkpoint()
        return await super().store(blocks)


class WaitsForItsThread(HasAThread):
    """It ends as cancelled, once its storage has answered, which it may never do."""

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loading = asyncio.ensure_future(super().load(blocks))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            await loading
            raise


class KeepsQuietAboutItsThread(HasAThread):
    def busy_threads(self) -> int:
        return 0


class ForgetsThreadsOfCancelledCalls(HasAThread):
    running = 0

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        self.running += 1
        try:
            return await super().load(blocks)
        finally:
            self.running -= 1

    def busy_threads(self) -> int:
        return self.running


class UsesTheLoopsExecutor(HasAThread):
    """Its threads are those of ``asyncio.to_thread``, and nothing counts their calls."""

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return await asyncio.to_thread(self.copy, blocks)


class IsAlwaysBusy(HasAThread):
    def busy_threads(self) -> int:
        return 1


class Clock:
    """The suite's clock, which stands still but for what a backend makes of it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class BlocksTheLoop(MemoryBackend):
    """A call of 300 ms in the midst of each load: of a client that knows no asyncio."""

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        await anyio.lowlevel.checkpoint()
        CLOCK.now += 0.3
        await anyio.lowlevel.checkpoint()
        return await super().load(blocks)


class BlocksTheLoopInAProbe(MemoryBackend):
    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        CLOCK.now += 0.3
        return await super().probe(keys)


class ListsNothing(Outlives):
    def contents(self) -> Iterable[Sequence[bytes]]:
        return ()


class HasNoPlace(Outlives):
    @property
    def place(self) -> str | None:
        return None


class HasAPlaceOfItsOwnEachTime(Outlives):
    @property
    def place(self) -> str | None:
        return f"{id(self)}"


class DropsTheOldest(MemoryBackend):
    """A cache of its own: where others say FULL, or sooner, it makes room."""

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        while len(self._kept) > self._capacity_blocks // 2:
            del self._kept[next(iter(self._kept))]
        return await super().store(blocks)


class TellsOfLossesInAThread(DropsTheOldest):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        before = set(self._kept)
        outcomes = await super().store(blocks)
        threads = DaemonThreads(1, "test")
        await threads.run(lambda: self.on_lost(sorted(before - set(self._kept))))
        threads.stop()
        return outcomes


FLAWS: Mapping[type[MemoryBackend], tuple[BackendCheck, str]] = {
    CatchesCancellations: (
        backend_calls.a_cancelled_call_ends,
        "load must end as cancelled once it is cancelled",
    ),
    ShieldsItsStores: (
        backend_calls.a_cancelled_call_ends,
        "store must end as cancelled once it is cancelled",
    ),
    WaitsForItsThread: (
        backend_calls.a_cancelled_call_ends,
        "load must end once it is cancelled, though its storage hangs",
    ),
    KeepsQuietAboutItsThread: (
        backend_calls.busy_threads_counts_who_may_touch_a_buffer,
        "busy_threads returned 0, and then a thread wrote to the buffer",
    ),
    ForgetsThreadsOfCancelledCalls: (
        backend_calls.busy_threads_counts_who_may_touch_a_buffer,
        "busy_threads returned 0, and then a thread wrote to the buffer",
    ),
    UsesTheLoopsExecutor: (
        backend_calls.busy_threads_counts_who_may_touch_a_buffer,
        "busy_threads returned 0, and then a thread wrote to the buffer",
    ),
    BlocksTheLoop: (
        backend_calls.no_call_blocks_the_event_loop,
        r"load must not block the event loop: nothing else ran on it for 0\.30 s",
    ),
    BlocksTheLoopInAProbe: (
        backend_calls.no_call_blocks_the_event_loop,
        "probe must not block the event loop",
    ),
    ListsNothing: (
        backend_books.what_is_left_after_a_restart_is_listed,
        "contents must name each block that is there after a restart: 64 of 64 are found",
    ),
    HasNoPlace: (
        backend_books.storage_that_outlives_it_has_a_place,
        "place must name the folder or address of storage that outlives the backend",
    ),
    HasAPlaceOfItsOwnEachTime: (
        backend_books.storage_that_outlives_it_has_a_place,
        "place must name .* the same one each time it is opened",
    ),
    DropsTheOldest: (
        backend_books.what_is_lost_is_told,
        "on_lost must be called for blocks that are gone",
    ),
    TellsOfLossesInAThread: (
        backend_books.what_is_lost_is_told,
        "on_lost must be called on the event loop's thread",
    ),
}


def made(kind: type[MemoryBackend], context: BackendContext) -> Backend:
    return kind.from_options({"capacity_bytes": CAPACITY_BYTES}, context)
