"""Checks a backend's calls: they can be cancelled, block no other, and touch no buffer later.

Hanging storage is simulated by ``_stopped_threads``: a call is cancelled while its thread
is stopped, at each place where the thread calls a function or returns from one.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from kvtier.plugin_api.backend import LoadBlock, StoreBlock
from kvtier.testing import _workbench
from kvtier.testing._stopped_threads import StoppedThreads
from kvtier.testing._workbench import Bench, MakeBackend, expect, new_blocks, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    StartCall = Callable[[], Coroutine[Any, Any, None]]

PASSES_MAX: Final = 1000
"""Passes of the event loop within which a cancelled call must end. It needs a few."""
CANCELLED_AFTER: Final = (*range(100), *range(100, PASSES_MAX, 10))
"""Passes after which a call is cancelled. A call that runs longer waits for something."""
STOPS_MAX: Final = 400
"""Most places at which a thread is stopped, one after the other."""
STALL_S_MAX: Final = 0.1
STALLS_MAX: Final = 10
"""Pauses that the suite's clock can't distinguish from a blocking call (garbage collection, a host
that runs other machines) may stop a process in the midst of a call, but not in each of so many."""
_GUARD: Final = b"\xa5"


async def a_cancelled_call_ends(make: MakeBackend) -> None:
    """The canceller of a call is not kept waiting, neither by its result nor by its storage.

    A tier that is closed cancels its calls, and its engine waits for them to end.
    """
    async with opened(make) as bench:
        await bench.keep(new_blocks(2))
        for name, call in _calls_of(bench).items():
            for passes in CANCELLED_AFTER:
                if not await _ends_if_cancelled_after(passes, name, call):
                    break
    with StoppedThreads() as threads:
        async with opened(make) as bench:
            for name, call in _calls_of(bench).items():
                for stop in range(STOPS_MAX):
                    async with _in_a_stopped_call(threads, stop, call) as task:
                        if task is None:
                            break
                        task.cancel()
                        has_ended = await _has_ended(task)
                        expect(
                            has_ended or threads.has_given_up,
                            f"{name} must end once it is cancelled, though its storage hangs: "
                            "leave the thread behind, and do not wait for it",
                        )


async def busy_threads_counts_who_may_touch_a_buffer(make: MakeBackend) -> None:
    """Once ``busy_threads`` is 0, no buffer of a call that has ended is written any more.

    The memory of the slots is then released: a write would corrupt data allocated there since.
    """
    with StoppedThreads() as threads:
        async with opened(make) as bench:
            blocks = new_blocks(2)
            await bench.keep(blocks)
            views = [bench.slots.view(8 + index) for index in range(len(blocks))]

            async def load() -> None:
                pairs = zip(blocks, views, strict=True)
                await bench.backend.load([LoadBlock(block.key, view) for block, view in pairs])

            for stop in range(STOPS_MAX):
                async with _in_a_stopped_call(threads, stop, load) as task:
                    if task is None:
                        break
                    task.cancel()
                    await _has_ended(task)
                    said = bench.backend.busy_threads()
                    guard = _GUARD * len(views[0])
                    for view in views:
                        view[:] = guard

                    def is_touched(guard: bytes = guard) -> bool:
                        return any(view != guard for view in views)

                    # Alone: work that the loop would continue ends with the loop.
                    threads.go_on_alone(is_touched)
                    expect(
                        said > 0 or threads.has_given_up or not is_touched(),
                        "busy_threads returned 0, and then a thread wrote to the buffer of a load "
                        "that "
                        "was cancelled: it must count each thread that may still touch a buffer",
                    )
                await bench.expect_kept(blocks)  # all stopped threads run again by now
            while bench.backend.busy_threads():  # bounded by the time that a check may take
                await anyio.lowlevel.checkpoint()


async def no_call_blocks_the_event_loop(make: MakeBackend) -> None:
    """While a call waits for its storage, the event loop continues, as other calls need it."""
    async with opened(make) as bench:
        for name, call in _calls_of(bench).items():
            stalls: list[float] = []
            while len(stalls) < STALLS_MAX and min(stalls, default=1.0) >= STALL_S_MAX:
                stalls.append(await _longest_stall(call()))
            expect(
                min(stalls) < STALL_S_MAX,
                f"{name} must not block the event loop: nothing else ran on it for "
                f"{min(stalls):.2f} s in each of {STALLS_MAX} calls. What blocks belongs in a "
                "thread, see kvtier.plugin_api.threads.DaemonThreads",
            )


def _calls_of(bench: Bench) -> dict[str, StartCall]:
    """Return calls of each kind. A store uses blocks that were never stored."""
    backend, slots = bench.backend, bench.slots
    known = new_blocks(2)

    async def store() -> None:
        known[:] = new_blocks(2)
        views = [slots.view(index) for index in range(len(known))]
        for view, block in zip(views, known, strict=True):
            view[:] = block.data
        pairs = zip(known, views, strict=True)
        await backend.store([StoreBlock(block.key, view, block.digest) for block, view in pairs])

    async def load() -> None:
        views = [slots.view(4 + index) for index in range(len(known))]
        pairs = zip(known, views, strict=True)
        await backend.load([LoadBlock(block.key, view) for block, view in pairs])

    async def probe() -> None:
        await backend.probe([block.key for block in known])

    async def remove() -> None:
        await backend.remove([block.key for block in known])

    return {"store": store, "load": load, "probe": probe, "remove": remove}


async def _ends_if_cancelled_after(passes: int, name: str, call: StartCall) -> bool:
    """Cancel a call after ``passes`` of the loop. Return False if it had ended by then."""
    task = asyncio.create_task(call())
    for _ in range(passes + 1):
        await anyio.lowlevel.checkpoint()
    if task.done():
        await task
        return False
    task.cancel()
    await asyncio.wait([task])
    expect(
        task.cancelled(),
        f"{name} must end as cancelled once it is cancelled: it caught the cancellation and "
        "went on",
    )
    return True


@asynccontextmanager
async def _in_a_stopped_call(
    threads: StoppedThreads, stop: int, call: StartCall
) -> AsyncIterator[asyncio.Task[Any] | None]:
    """Begin a call and stop its threads; they go on at the end.

    ``stop``: how many calls and returns of functions they get to. Yields None if the call has
    ended before, or a thread cannot be stopped.
    """
    threads.stop_after(stop)
    task = asyncio.create_task(call())
    try:
        while not (task.done() or threads.has_stopped_one):
            await anyio.lowlevel.checkpoint()
        is_stopped = not (task.done() or threads.has_given_up)
        yield task if is_stopped else None
    finally:
        threads.go_on()
        await asyncio.wait([task])


async def _has_ended(task: asyncio.Task[Any]) -> bool:
    for _ in range(PASSES_MAX):
        if task.done():
            return True
        await anyio.lowlevel.checkpoint()
    return False


async def _longest_stall(call: Coroutine[Any, Any, Any]) -> float:
    """Return how long nothing but the call ran on the event loop, in seconds."""
    clock = _workbench.clock
    longest, last = 0.0, clock()
    task = asyncio.create_task(call)
    while not task.done():
        await anyio.lowlevel.checkpoint()
        now = clock()
        longest, last = max(longest, now - last), now
    await task
    return longest
