"""Calls that run to their end, also when who made them is cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class Calls:
    """Runs calls as tasks of their own, and knows which have not ended. Event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def is_idle(self) -> bool:
        """Tell whether no call runs, cancelled ones included."""
        return not self._tasks

    async def wait_idle(self) -> None:
        """Return once no call runs any more."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def shielded(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end, also when the caller is cancelled."""
        return await asyncio.shield(self.start(call))

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a call as a task of its own."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
