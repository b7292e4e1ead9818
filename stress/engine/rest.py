"""Phase two: the faults have stopped, and a server must be as it was before them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from stress.engine.processes import resources_of
from stress.engine.watch import SCRAPE_S, TIERS, blocks_from, breaker_of, come_to_rest
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from stress.engine.processes import ServerResources
    from stress.engine.vllm_server import Server
    from stress.engine.watch import Watch
    from stress.limits import Limits
    from stress.record import Record

COUNTED_S_MAX: Final = 1.5
"""A machine that others use too may take longer to recover: of the time between two looks, no more
than this counts."""

SERVED_BLOCKS_MIN: Final = 8


class Rest:
    """Goes through phase two. Raises ``Failure``."""

    def __init__(
        self, running: Server, watch: Watch, record: Record, engine_id: str, limits: Limits
    ) -> None:
        self._server = running
        self._limits = limits
        self._watch = watch
        self._record = record
        self._engine_id = engine_id

    async def breakers_close(self) -> None:
        """Wait until all tiers are given work again. Clients ask meanwhile."""

        def states() -> dict[str, str | None]:
            return {tier: breaker_of(self._watch, tier) for tier in TIERS}

        took_s = await self._until(
            lambda: set(states().values()) == {"CLOSED"},
            "breakers stay open",
            lambda: str(states()),
        )
        self._record.checks["breakers"] = f"closed after {took_s:.1f} s"

    async def hits_are_back(self) -> None:
        """Wait until each tier has served. Clients ask meanwhile."""
        for tier in TIERS:
            before = blocks_from(self._watch, tier)

            def served(tier: str = tier, before: float = before) -> bool:
                return blocks_from(self._watch, tier) - before >= SERVED_BLOCKS_MIN

            took_s = await self._until(served, f"{tier} serves nothing", lambda: "")
            self._record.checks[f"hits from {tier}"] = f"back after {took_s:.1f} s"

    async def nothing_is_held(self) -> None:
        """Wait until all gauges of what is under way are zero. Nobody asks any more."""
        took_s = await come_to_rest(self._server, self._watch)
        self._record.checks["gauges"] = f"zero after {took_s:.1f} s"

    async def resources_are_as(self, before: ServerResources) -> None:
        """Compare what the server holds with what it held before the faults, at rest."""
        left: dict[str, str] = {}

        def same() -> bool:
            nonlocal left
            now = resources_of(self._server.pid, self._engine_id)
            left = now.left_since(before, judges_memory=self._limits.judges_memory)
            return not left

        await self._until(same, "not as before the faults", lambda: str(left))
        memory = "memory, " * self._limits.judges_memory
        self._record.checks["resources"] = (
            f"descriptors, threads, processes, {memory}and shared memory are as before"
        )

    async def _until(self, done: Callable[[], bool], what: str, tell: Callable[[], str]) -> float:
        """Wait until something holds; returns after how many seconds that count."""
        counted_s, began_s, last_s = 0.0, time.monotonic(), time.monotonic()
        while not done():
            is_late = time.monotonic() - began_s > self._limits.late_s_max
            if counted_s > self._limits.recovery_s_max or is_late:
                raise Failure(f"{what} {counted_s:.0f} s after the last fault: {tell()}")
            await asyncio.sleep(SCRAPE_S)
            now_s = time.monotonic()
            counted_s, last_s = counted_s + min(now_s - last_s, COUNTED_S_MAX), now_s
        return counted_s
