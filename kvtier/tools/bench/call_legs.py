"""Runs legs of calls: a number of blocks in each, a number of calls at once, each one timed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import StoreFault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

CALL_S_MAX: Final = 60.0

STORE: Final = "store"
LOAD: Final = "load"
KINDS: Final = (STORE, LOAD)


class CallLeg(NamedTuple):
    """Times of moving all blocks once."""

    seconds: float
    cpu_seconds: float  #: of this process, all of its threads
    call_seconds: list[float]  #: one for each call


async def play(
    call: Callable[[Sequence[int]], Awaitable[None]],
    batches: Sequence[Sequence[int]],
    calls_at_once: int,
) -> CallLeg:
    """Make a call for each batch of block numbers. Raises what a call raises.

    Raises ``StoreFault``, too, for a call that does not end.
    """
    call_seconds: list[float] = []

    async def make_calls(waiting: Iterator[Sequence[int]]) -> None:
        for batch in waiting:
            began = time.perf_counter()
            async with asyncio.timeout(CALL_S_MAX):
                await call(batch)
            call_seconds.append(time.perf_counter() - began)

    waiting = iter(batches)
    cpu_s, began_s = time.process_time(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(calls_at_once, len(batches))):
                group.create_task(make_calls(waiting))
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        if isinstance(first, TimeoutError):
            raise StoreFault(f"a call took more than {CALL_S_MAX:g} s") from None
        raise first from None
    seconds = time.perf_counter() - began_s
    return CallLeg(seconds, time.process_time() - cpu_s, call_seconds)


def batches_of(count: int, size: int) -> list[range]:
    """Cut block numbers from 0 into batches; the last one may be smaller."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
