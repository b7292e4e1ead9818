"""Tiers that move when they are told to: kvtier's own cells, on event loops without a thread.

A tier's host is kvtier's thread host, but for the thread: its loop turns some times
after each step of the engine, or not at all. Time is the scenario's, too: deadlines
and delays pass as fast as steps do.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvtier.hosts import choose
from kvtier.hosts.thread_host import TierThread
from kvtier.runtime import open_runtime

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

STEP_S = 0.001  #: how much time a step of the engine takes
CLOSING_TURNS_MAX = 20_000
THREADS_TURN_STEPS = 4  #: then the threads of a tier that has files get the interpreter
_ENTRY_POINTS = cache(entry_points)


class Clock:
    """The scenario's time, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return what time it is."""
        return self.now


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose time is the scenario's, and that never waits."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.time = clock  # type: ignore[method-assign]
        # No timer is waited for: it is due when the clock says so.
        select = self._selector.select
        self._selector.select = lambda _timeout: select(0)

    def turn(self) -> None:
        """Run what is ready."""
        self.call_soon(self.stop)
        self.run_forever()


class SteppedTier(TierThread):
    """A tier's host without a thread."""

    tiers: SteppedTiers

    def start(self) -> None:
        """Open the backend, in turns."""
        self._loop = _Loop(self.tiers.clock)
        self._life_task: asyncio.Task[None] | None = None
        self.tiers.hosts.append(self)

    @property
    def has_threads(self) -> bool:
        """Whether the backend does its I/O on threads."""
        return self._tier.type != "memory"

    def turn(self) -> None:
        """Let the cell go on."""
        if self._life.has_ended:
            return
        if self._life_task is None:
            self._life_task = self._loop.create_task(self._live())
        self._loop.turn()
        if self._life_task.done():
            error = self._life_task.exception()
            if error is not None:
                raise error

    def close(self, timeout_s: float) -> bool:
        """End what was begun."""
        del timeout_s
        self.ask_to_end()
        for turn in range(CLOSING_TURNS_MAX):
            self.tiers.clock.now += STEP_S
            self._abandoned = turn > CLOSING_TURNS_MAX // 2
            self.turn()
            if self._life_task is not None and self._life_task.done():
                break
        else:
            return False
        self._loop.close()
        return self._cell is None or self._cell.driver.is_quiet()


class SteppedTiers:
    """All tiers of one engine."""

    def __init__(self, rng: random.Random, laziness: float) -> None:
        self.clock = Clock()
        self.hosts: list[SteppedTier] = []
        self._steps = 0
        self._rng = rng
        self._laziness = laziness

    def move(self) -> None:
        """Let a step's time pass, and each tier go on for a while, or not."""
        self.clock.now += STEP_S
        self._steps += 1
        for host in self.hosts:
            while self._rng.random() > self._laziness:
                host.turn()
        if self._steps % THREADS_TURN_STEPS == 0 and any(host.has_threads for host in self.hosts):
            time.sleep(0)


@contextmanager
def stepped_tiers(rng: random.Random, laziness: float) -> Iterator[SteppedTiers]:
    """Have the tiers of the engine that starts now stepped."""
    tiers = SteppedTiers(rng, laziness)
    host: Any = type("SteppedTier", (SteppedTier,), {"tiers": tiers})
    with (
        patch.object(choose, "TierThread", host),
        patch("kvtier.vllm.start.open_runtime", partial(open_runtime, clock=tiers.clock)),
        patch("kvtier.vllm.manager.SPIN_S", 0.0),
        # Looking at all packages that are installed takes longer than a scenario.
        patch("importlib.metadata.entry_points", _ENTRY_POINTS),
    ):
        yield tiers
