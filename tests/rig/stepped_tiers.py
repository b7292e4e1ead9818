"""Tiers that move when they are told to: kvtier's own cells, on event loops without a thread.

A tier's host is kvtier's thread host, but for the thread: its loop turns some times
after each step of the engine, or not at all. The blocking calls of a backend run on the
same loop, and begin and end when it is drawn. Time is the scenario's, too: deadlines
and delays pass as fast as steps do. So a seed plays the same scenario each time, on a
busy machine too, in processes with one ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvtier.hosts import choose
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.runtime import open_runtime
from tests.rig.slot_watch import watched_driver

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from tests.rig.slot_watch import SlotWatch

STEP_S = 0.001  #: how much time a step of the engine takes
CLOSING_TURNS_MAX = 20_000
CALL_TURNS_MAX = 3  #: of the loop, until a blocking call begins, and again until it ends
READ_THE_TIME = (
    "kvtier.vllm.scheduler.manager",
    "kvtier.hosts.machine_time",
    "kvtier.tier.backend_driver",
    "kvtier.plugin_api.deadlines",
    "kvtier_backends.fs.open_root",
)
"""Modules whose ``time`` is the scenario's. No other decides anything by a clock of its own."""
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

    def turn(self) -> bool:
        """Run what is ready. False: nothing was, which is cheap to tell."""
        if not self._is_ready():
            return False
        self.call_soon(self.stop)
        self.run_forever()
        return True

    def _is_ready(self) -> bool:
        # What asyncio's loop itself looks at.
        loop: Any = self
        due = loop._scheduled and loop._scheduled[0].when() <= self.time()
        return bool(loop._ready or due or self._select(0))


class _Calls:
    """In place of ``DaemonThreads.run``: blocking calls begin and end in turns of the loop."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def as_method(self) -> Callable[..., Any]:
        """Return ``run`` as a function that a class may have for a method."""

        async def run(threads: DaemonThreads, call: Callable[[], Any]) -> Any:
            return await self.run(threads, call)

        return run

    async def run(self, threads: DaemonThreads, call: Callable[[], Any]) -> Any:
        """Return what the call returns. As with threads, one that has begun is not called off."""
        future = asyncio.get_running_loop().create_future()
        threads._unended.add(future)
        self._after_some_turns(self._begin, threads, future, call)
        return await future

    def _begin(self, threads: DaemonThreads, future: Any, call: Callable[[], Any]) -> None:
        if future.cancelled():
            threads._unended.discard(future)
        else:
            self._after_some_turns(self._end, threads, future, call)

    def _end(self, threads: DaemonThreads, future: Any, call: Callable[[], Any]) -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - handed to the caller, not swallowed
            error = raised
        threads._unended.discard(future)
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _after_some_turns(self, then: Callable[..., None], *given: object) -> None:
        self._wait(self._rng.randint(0, CALL_TURNS_MAX), then, given)

    def _wait(self, turns: int, then: Callable[..., None], given: tuple[object, ...]) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._wait, turns - 1, then, given)
        else:
            loop.call_soon(then, *given)


class SteppedTier(TierThread):
    """A tier's host without a thread."""

    tiers: SteppedTiers

    def start(self) -> None:
        """Open the backend, in turns."""
        self._loop = _Loop(self.tiers.clock)
        self._life_task: asyncio.Task[None] | None = None
        self.tiers.hosts.append(self)

    def turn(self) -> bool:
        """Let the cell go on. False: it had nothing to do."""
        if self._life.has_ended:
            return False
        if self._life_task is None:
            self._life_task = self._loop.create_task(self._live())
        went_on = self._loop.turn()
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
            self.turn()
            if self._life_task is not None and self._life_task.done():
                break
        else:
            return False
        for task in asyncio.all_tasks(self._loop):  # as the thread's own end of its loop does
            task.cancel()
            self._loop.turn()
        self._loop.close()
        return self._cell is None or self._cell.driver.is_quiet()


class SteppedTiers:
    """All tiers of one engine."""

    def __init__(self, rng: random.Random, laziness: float) -> None:
        self.clock = Clock()
        self.hosts: list[SteppedTier] = []
        self._rng = rng
        self._laziness = laziness

    def move(self) -> None:
        """Let a step's time pass, and each tier go on for a while, or not."""
        self.clock.now += STEP_S
        for host in self.hosts:
            while self._rng.random() > self._laziness and host.turn():
                pass


@contextmanager
def stepped_tiers(rng: random.Random, laziness: float, watch: SlotWatch) -> Iterator[SteppedTiers]:
    """Have the tiers of the engine that starts now stepped."""
    tiers = SteppedTiers(rng, laziness)
    host: Any = type("SteppedTier", (SteppedTier,), {"tiers": tiers})
    scenarios_time = SimpleNamespace(monotonic=tiers.clock, perf_counter=tiers.clock)
    with ExitStack() as stack:
        for module in READ_THE_TIME:
            stack.enter_context(patch(f"{module}.time", scenarios_time))
        for patched in (
            patch.object(choose, "TierThread", host),
            patch.object(DaemonThreads, "run", _Calls(rng).as_method()),
            patch("kvtier.tier.cell.BackendDriver", watched_driver(watch)),
            patch("kvtier.vllm.start.open_runtime", partial(open_runtime, clock=tiers.clock)),
            patch("kvtier.vllm.scheduler.manager.SPIN_S", 0.0),
            # Looking at all packages that are installed takes longer than a scenario.
            patch("importlib.metadata.entry_points", _ENTRY_POINTS),
        ):
            stack.enter_context(patched)
        yield tiers
