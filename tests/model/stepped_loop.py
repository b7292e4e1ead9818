"""An event loop that runs what is ready when it is told to, and no further.

It has no thread, no clock and no I/O: a future that stands for I/O is ended by
the test, time passes when the test says so. So coroutines written for asyncio
run in an order that is the test's alone.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

RUNS_MAX = 100_000
"""More callbacks than that in one go wait for something in a circle."""


class SteppedLoop(asyncio.AbstractEventLoop):
    """What asyncio's tasks, futures, locks and sleeps need of a loop."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []

    def run(self) -> None:
        """Run until everything waits for I/O or for time."""
        asyncio._set_running_loop(self)
        try:
            for _ in range(RUNS_MAX):
                if not self._ready:
                    return
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        raise AssertionError("the loop never comes to rest")

    def pass_time(self, seconds: float) -> None:
        """Let time pass, from one timer to the next."""
        end = self._now + seconds
        while self._timers and self._timers[0].when() <= end:
            timer = heapq.heappop(self._timers)
            self._now = max(self._now, timer.when())
            self._ready.append(timer)
            self.run()
        self._now = end

    # --- what asyncio calls ---

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, timer)
        return timer

    def create_future(self) -> asyncio.Future:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine, *, name: str | None = None, context: Any = None
    ) -> asyncio.Task:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Say nothing: tasks of a cell that was killed are never ended."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing is counted; a cancelled timer does nothing when it is due."""
