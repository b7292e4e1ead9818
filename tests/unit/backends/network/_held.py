"""A backend that is held to what it promises: each call ends in time, and no buffer changes after.

No clock is read. A call's own timers are set before a rival's is, for the same time; so the call
ends within some turns of the event loop after the rival's has run out, however slow the machine is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    Connection,
    LoadBlock,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.deadlines import time_limit
from kvtier.plugin_api.slot_memory import SlotMemory
from tests.support.patience import until_true
from tests.unit.backends._media import key_of

if TYPE_CHECKING:
    from collections.abc import Coroutine

BLOCK_BYTES = 256 << 10  # more than a socket takes or gives at once
CONTEXT = BackendContext(BLOCK_BYTES, Namespace({"model_name": "org/m"}), "1:remote")
SLOTS = 640
GUARD = b"\xa5" * BLOCK_BYTES
SHORT_S = 0.3
"""The deadline of a call that is to reach it."""

TURNS = 64
"""Of the event loop: a call needs a few to set its timers, and a few to undo what it has begun; one
that waits for anything takes thousands."""

Answer = TypeVar("Answer")


def data_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * (BLOCK_BYTES // 2)


class Held:
    """A backend, memory for its calls, and what they ended with."""

    def __init__(self, backend: Backend, *, is_cancelled: bool = False, idle_max: int = 0) -> None:
        """``is_cancelled``: its calls can't end by themselves, and are given up at the deadline.

        ``idle_max``: so many sockets more than at first may be open as long as the object lives.
        """
        self.backend = backend
        self.states: list[Connection] = []
        backend.on_connection = self.states.append
        self._is_cancelled = is_cancelled
        self._idle_max = idle_max
        self._slots = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        self._next_slot = 0
        self._guarded: list[memoryview] = []
        self._sockets_open = 0

    async def open(self) -> None:
        await self.backend.open()
        await self.backend.register_memory(self._slots.buffer)
        await self.until(Connection.UP)
        self._sockets_open = sockets()

    async def until(self, state: Connection) -> None:
        await until_true(
            lambda: self.states[-1:] == [state], lambda: (self.states, self.backend.counters())
        )

    async def store(self, *numbers: int, within_s: float | None = None) -> Counter[Outcome]:
        blocks = []
        for number in numbers:
            view = self._slot()
            view[:] = data_of(number)
            blocks.append(
                StoreBlock(key_of(number), view.toreadonly(), block_digest(key_of(number), view))
            )
        outcomes = await self._ends_in_time(self.backend.store(blocks), within_s)
        return Counter(outcomes or [Outcome.FAILED] * len(blocks))

    async def load(self, *numbers: int, within_s: float | None = None) -> Counter[Outcome]:
        """Load each block into a slot of its own, which nobody may write to afterwards."""
        blocks = [LoadBlock(key_of(number), self._slot()) for number in numbers]
        loaded = await self._ends_in_time(self.backend.load(blocks), within_s)
        outcomes = [each.outcome for each in loaded] if loaded else [Outcome.FAILED] * len(blocks)
        for number, block, outcome in zip(numbers, blocks, outcomes, strict=True):
            assert outcome is not Outcome.DAMAGED
            assert outcome is not Outcome.DONE or block.buffer == data_of(number), "wrong bytes"
        if self._is_cancelled and loaded is None:
            # Its slots stay the call's own until its thread is done.
            await until_true(lambda: self.backend.busy_threads() == 0)
        for block in blocks:
            block.buffer[:] = GUARD
            self._guarded.append(block.buffer)
        return Counter(outcomes)

    async def probe(self, *numbers: int, within_s: float | None = None) -> Counter[bool]:
        try:
            found = await self._ends_in_time(
                self.backend.probe([key_of(number) for number in numbers]), within_s
            )
        except StoreFault:
            found = None
        return Counter(found or [False] * len(numbers))

    async def close(self) -> None:
        """Close the backend; nothing of it may be left, and no slot may have been written to."""
        await self.backend.close()
        await until_true(lambda: self.backend.busy_threads() == 0)
        assert all(view == GUARD for view in self._guarded), "a slot was written to after its call"
        me = asyncio.current_task()
        await until_true(lambda: asyncio.all_tasks() == {me}, asyncio.all_tasks)
        await until_true(lambda: sockets() <= self._sockets_open + self._idle_max, sockets)

    async def _ends_in_time(
        self, call: Coroutine[Any, Any, Answer], within_s: float | None
    ) -> Answer | None:
        """Return the answer; None if it was given up."""
        if within_s is None:
            return await call
        with time_limit(within_s):
            task = asyncio.create_task(call)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        over = asyncio.Event()
        rival = asyncio.get_running_loop().call_later(within_s, over.set)
        waiting = asyncio.create_task(over.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._is_cancelled:
            task.cancel()
        turns = 0
        while not task.done():
            turns += 1
            assert turns <= TURNS, f"a call goes on after its deadline: {task}"
            await asyncio.sleep(0)
        rival.cancel()
        waiting.cancel()
        await asyncio.wait([waiting])
        return None if task.cancelled() else task.result()

    def _slot(self) -> memoryview:
        self._next_slot += 1
        return self._slots.view(self._next_slot - 1)


def sockets() -> int:
    """Return how many sockets this process has."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            count += str(each.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count
