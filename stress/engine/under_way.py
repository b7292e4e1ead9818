"""What is being done to a server just now: what may go together, and what must be alone."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class UnderWay:
    """Faults under way, by what they are done to. Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_closed = False  #: one is alone, or is to be: no other may begin
        self._now: list[str] = []
        self._touched_s: dict[str, float] = {}
        self._nothing = asyncio.Event()
        self._nothing.set()

    @contextmanager
    def beside_others(self, target: str) -> Iterator[None]:
        """Do a fault to ``target``, until the end of the block."""
        assert not self.is_closed, "beside one that wants to be alone"
        self._now.append(target)
        self._nothing.clear()
        try:
            yield
        finally:
            self._now.remove(target)
            self._touched_s[target] = time.monotonic()
            if not self._now:
                self._nothing.set()

    @asynccontextmanager
    async def alone(self, *targets: str) -> AsyncIterator[None]:
        """Wait until nothing is under way, and keep everything else out."""
        assert not self.is_closed, "beside one that wants to be alone"
        self.is_closed = True
        try:
            await self._nothing.wait()
            yield
        finally:
            now_s = time.monotonic()
            self._touched_s.update(dict.fromkeys(targets, now_s))
            self.is_closed = False

    def touched(self, target: str, within_s: float = float("inf")) -> bool:
        """Tell whether something is, or has just been, done to a target."""
        ended_s = self._touched_s.get(target, float("-inf"))
        return target in self._now or time.monotonic() - ended_s < within_s
