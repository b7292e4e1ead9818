"""How the time of a plan passes beside a server: as ``stress.pace``, for tasks that wait."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from stress.limits import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTS_A_SECOND: Final = 45.0  #: half as many again as by the clock: a round is half a minute
LOOK_S: Final = 0.1
IDLE_FRACTION: Final = 0.25
"""Of the time in which no request ends. Clients that wait for what hangs would wait for ever."""

GATE_S_MAX: Final = 3 * PATIENCE_S


class ByClock:
    """The plan's seconds are the clock's."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Return the time of the plan."""
        return time.monotonic() - self._began_s

    async def until(self, at_s: float) -> None:
        """Wait for a time of the plan."""
        await asyncio.sleep(at_s - self.now_s())

    async def run(self) -> None:
        """Have time pass: it does."""


class ByRequests:
    """The plan's seconds are requests that ended."""

    def __init__(self, requests: Callable[[], int]) -> None:
        self._requests = requests
        self._now_s = 0.0
        self._passes = asyncio.Condition()

    def now_s(self) -> float:
        """Return the time of the plan."""
        return self._now_s

    async def until(self, at_s: float) -> None:
        """Wait for a time of the plan."""
        async with self._passes:
            await self._passes.wait_for(lambda: self._now_s >= at_s)

    async def run(self) -> None:
        """Have time pass, until cancelled."""
        before = self._requests()
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._requests()
            passed_s = (now - before) / REQUESTS_A_SECOND or IDLE_FRACTION * LOOK_S
            before = now
            async with self._passes:
                self._now_s += passed_s
                self._passes.notify_all()
