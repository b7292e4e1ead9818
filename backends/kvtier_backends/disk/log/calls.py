"""Runs calls that begin at once, and run to their end even if their caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Calls:
    """Runs calls as tasks of their own, and tracks which have not ended. Event loop only."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    def is_idle(self) -> bool:
        """Return whether no call runs, cancelled ones included."""
        return not self._running

    async def wait_idle(self) -> None:
        """Return once no call runs any more."""
        while self._running:
            await asyncio.wait(set(self._running))

    async def shielded(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end, even if the caller is cancelled."""
        return await asyncio.shield(self.start(call))

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run a call up to its first wait, and the rest as a task of its own."""
        running = begin(call)
        if not running.done():
            self._running.add(running)
            running.add_done_callback(self._running.discard)
        return running


def begin(call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Run a coroutine up to its first wait, here and now, and the rest as a task.

    An asyncio task begins in the loop's next round: if a dozen calls
    come together, the disk would wait until all of them are ready for it.
    The part up to the first wait runs in the caller's task: such a coroutine
    must not have a timeout that spans the wait. (From Python 3.12 on, asyncio's
    eager tasks do the same.)
    """
    loop = asyncio.get_running_loop()
    try:
        first = call.send(None)
    except StopIteration as end:
        ended: asyncio.Future[T] = loop.create_future()
        ended.set_result(end.value)
        return ended
    except Exception as error:  # noqa: BLE001 - it is the caller's, who may look later
        failed: asyncio.Future[T] = loop.create_future()
        failed.set_exception(error)
        return failed
    return loop.create_task(cast("Coroutine[Any, Any, T]", _Begun(call, first)))


@Coroutine.register
class _Begun:
    """A coroutine that already waits, for the task that continues it."""

    def __init__(self, call: Coroutine[Any, Any, Any], waits_for: object) -> None:
        self._call = call
        self._first = [waits_for]  # until the task has it

    def send(self, value: object) -> object:
        return self._first.pop() if self._first else self._call.send(value)

    def throw(self, error: BaseException) -> object:
        self._first.clear()
        return self._call.throw(error)

    def close(self) -> None:
        self._call.close()
