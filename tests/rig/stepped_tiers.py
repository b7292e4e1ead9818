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
from tests.rig.slot_watch import watched_driver

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from tests.rig.slot_watch import SlotWatch

STEP_S = 0.001  #: how much time a step of the engine takes
CLOSING_TURNS_MAX = 20_000
THREADS_TURN_STEPS = 4  #: then the threads of a tier that has files get the interpreter
THREADS_S = 0.001  #: how long to wait for them, in real time, where nobody else has work
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
        self._select = self._selector.select
        self._selector.select = lambda _timeout: self._select(0)

    def turn(self, patience_s: float) -> bool:
        """Run what is ready. False: nothing was, which is cheap to tell.

        ``patience_s``: how long to wait for what threads have to tell.
        """
        if not self._is_ready(patience_s):
            return False
        self.call_soon(self.stop)
        self.run_forever()
        return True

    def _is_ready(self, patience_s: float) -> bool:
        # What asyncio's loop itself looks at.
        loop: Any = self
        due = loop._scheduled and loop._scheduled[0].when() <= self.time()
        return bool(loop._ready or due or self._select(patience_s))


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

    def turn(self, *, patiently: bool) -> bool:
        """Let the cell go on. False: it had nothing to do. ``patiently``: nor its threads."""
        if self._life.has_ended:
            return False
        if self._life_task is None:
            self._life_task = self._loop.create_task(self._live())
        went_on = self._loop.turn(THREADS_S if patiently and self.has_threads else 0.0)
        if self._life_task.done():
            error = self._life_task.exception()
            if error is not None:
                raise error
        return went_on

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Take turns until what was begun has ended, half of those that there may be."""
        del timeout_s
        for _ in range(CLOSING_TURNS_MAX // 2):
            self.tiers.clock.now += STEP_S
            self.turn(patiently=True)
            if self._life_task is not None and self._life_task.done():
                break
        else:
            return False
        for task in asyncio.all_tasks(self._loop):  # as the thread's own end of its loop does
            task.cancel()
            self._loop.turn(0.0)
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

    def move(self, *, patiently: bool) -> None:
        """Let a step's time pass, and each tier go on for a while, or not.

        ``patiently``: nobody else has anything to do, so wait for threads.
        """
        self.clock.now += STEP_S
        self._steps += 1
        for host in self.hosts:
            while self._rng.random() > self._laziness and host.turn(patiently=patiently):
                pass
        if self._steps % THREADS_TURN_STEPS == 0 and any(host.has_threads for host in self.hosts):
            time.sleep(0)


@contextmanager
def stepped_tiers(rng: random.Random, laziness: float, watch: SlotWatch) -> Iterator[SteppedTiers]:
    """Have the tiers of the engine that starts now stepped."""
    tiers = SteppedTiers(rng, laziness)
    host: Any = type("SteppedTier", (SteppedTier,), {"tiers": tiers})
    with (
        patch.object(choose, "TierThread", host),
        patch("kvtier.tier.cell.BackendDriver", watched_driver(watch)),
        patch("kvtier.vllm.start.open_runtime", partial(open_runtime, clock=tiers.clock)),
        patch("kvtier.vllm.manager.SPIN_S", 0.0),
        # Looking at all packages that are installed takes longer than a scenario.
        patch("importlib.metadata.entry_points", _ENTRY_POINTS),
    ):
        yield tiers
