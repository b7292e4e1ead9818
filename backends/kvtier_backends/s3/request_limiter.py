"""Limits concurrent requests: fewer once the server is busy, then more again, step by step.

Additive increase, multiplicative decrease (AIMD), as in TCP's congestion control (Jacobson,
"Congestion Avoidance and Control", 1988): each successful request raises the limit by its
reciprocal, so a full round of them raises it by one; a server that requests a slowdown halves
it, once a round.
"""

from __future__ import annotations

import asyncio
import heapq
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Urgency(IntEnum):
    """Priority of a turn."""

    PROBE = 0  #: a scheduler waits for it
    LOAD = 1  #: a request waits for it
    STORE = 2  #: nothing waits for it


class RequestLimiter:
    """Grants turns, the most urgent first. Loop thread only."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._limit = float(requests_max)
        self._running = 0
        self._waiting: list[tuple[Urgency, int, asyncio.Future[None]]] = []
        self._order = 0
        self._cuts = 0

    @property
    def limit(self) -> int:
        """Number of requests that may run at once now."""
        return int(self._limit)

    @asynccontextmanager
    async def turn(self, urgency: Urgency) -> AsyncIterator[int]:
        """Wait until one more may run. Yields the argument for ``slow_down``."""
        if self._running >= self.limit or self._waiting:
            await self._wait(urgency)
        else:
            self._running += 1
        try:
            yield self._cuts
        finally:
            self._running -= 1
            self._admit()

    def on_success(self) -> None:
        """Note that the server has kept up with a request."""
        self._limit = min(float(self._requests_max), self._limit + 1.0 / self._limit)
        self._admit()

    def slow_down(self, turn: int) -> None:
        """Halve the limit, unless that has been done since this turn began."""
        if turn == self._cuts:
            self._cuts += 1
            self._limit = max(1.0, self._limit / 2.0)

    async def _wait(self, urgency: Urgency) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._waiting, (urgency, self._order, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted in the same pass: hand it on
                self._running -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and (self._running < self.limit or self._waiting[0][2].done()):
            granted = heapq.heappop(self._waiting)[2]
            if not granted.done():
                self._running += 1
                granted.set_result(None)
