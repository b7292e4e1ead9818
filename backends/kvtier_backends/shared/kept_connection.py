"""Keeps a tier connected to its server: connects, checks the connection, and connects again.

    CONNECTING  the server has not been reached yet
    UP          it was reached, and each check since then has passed
    GONE        a check has failed; no request is sent to the server until it is reached again

The connection is checked as soon as a call casts doubt on it, and every ``_check_every_s``.
Each failed attempt is followed by a pause, which doubles from one to the next, with jitter
("Exponential Backoff and Jitter", AWS Architecture Blog, 2015): engines that lost a server together
do not reconnect together. An episode of faults ends once the connection has been up
for ``STEADY_S``. Until then pauses keep growing, and no reason is logged twice.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.incidents import TierCounters

PAUSE_S_MIN: Final = 0.1
"""The first pause, and the shortest time between two checks, however doubtful the connection is."""
PAUSE_S_MAX: Final = 5.0
STEADY_S: Final = 60.0
REASONS_MAX: Final = 16
"""At most this many reasons are logged per episode."""

clock = time.monotonic  #: in seconds; tests replace it
sleep = asyncio.sleep  #: likewise


class KeptConnection(ABC):
    """The tier's own task, which keeps the connection. Loop thread only."""

    _check_every_s: float = math.inf

    def __init__(
        self, backend_type: str, tier_name: str, place: str, counters: TierCounters
    ) -> None:
        """``counters``: ``connects_failed`` and ``connection_gone`` are counted there."""
        self._backend_type = backend_type
        self._tier_name = tier_name
        self._place = place
        self._counters = counters
        self._on_state: Callable[[Connection], None] = lambda _state: None
        self._task: asyncio.Task[None] | None = None
        self._is_doubtful = asyncio.Event()
        self._loss: StoreFault | None = None
        self._problem: StoreFault | None = None  # why it is not up
        self._told: set[str] = set()
        self._has_good_news = False
        self._told_at = 0.0  # of a fault that has not ended
        self._pause_s = PAUSE_S_MIN
        self._up_since = 0.0
        self.state = Connection.CONNECTING

    def start(self, on_state: Callable[[Connection], None]) -> None:
        """Start connecting, in the background. ``on_state``: called with each new state."""
        self._on_state = on_state
        on_state(self.state)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the task. Calling it twice is not an error."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._release()

    def doubt(self) -> None:
        """Request an early check of the connection: a call has seen an anomaly."""
        self._is_doubtful.set()

    def lose(self, loss: StoreFault) -> None:
        """Treat the connection as gone: a call met a fault that other calls would meet, too."""
        self._loss = loss
        self.doubt()

    @abstractmethod
    async def _connect(self) -> None:
        """Reach the server, and compare the description there. Raises ``StoreFault``."""

    @abstractmethod
    async def _check(self) -> None:
        """Check whether the connection still works. Raises ``StoreFault`` if it does not."""

    def _release(self) -> None:  # noqa: B027 - some hold nothing
        """Release the remains of a lost connection. Also called if there are none."""

    def _remedy(self, problem: StoreFault) -> str:  # noqa: ARG002 - for those that know one
        """Return what the operator may do, for the log."""
        return "the tier tries again by itself"

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except asyncio.CancelledError:
                # A timeout that expires just as its body has ended cancels the next wait
                # (until Python 3.13): then this task was not ended.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise

    async def _turn(self) -> None:
        """Connect or check, and wait until the next time."""
        self._problem = await self._attempt()
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        if self._problem is not None:
            self._fail(self._problem)
            pause_s = min(self._pause_s, PAUSE_S_MAX)
            self._pause_s = 2 * pause_s
            await sleep(pause_s * jitter)
            return
        if self.state is not Connection.UP:
            self._succeed()
        await sleep(PAUSE_S_MIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._check_every_s * jitter):
                await self._is_doubtful.wait()

    async def _attempt(self) -> StoreFault | None:
        """Connect, or check the connection if it is up. Return why that failed, else None."""
        is_up = self.state is Connection.UP
        loss, self._loss = self._loss, None
        self._is_doubtful.clear()
        if is_up and loss is not None:
            return loss
        try:
            await (self._check() if is_up else self._connect())
        except StoreFault as problem:
            return problem
        except Exception as defect:  # noqa: BLE001 - else the tier would never be back
            return StoreFault(f"unexpected {type(defect).__name__}")  # its text may hold a secret
        return None

    def _succeed(self) -> None:
        # Faults that calls met before do not concern this connection.
        self._loss = None
        self._is_doubtful.clear()
        self._up_since = clock()
        if self._has_good_news:
            self._has_good_news = False
            seconds = round(self._up_since - self._told_at, 3)
            log.info(f"{self._backend_type} tier: connected", **self._fields(), seconds=seconds)
        self._enter(Connection.UP)

    def _fail(self, problem: StoreFault) -> None:
        self._counters.add("connects_failed")
        if self.state is Connection.UP:
            self._counters.add("connection_gone")
            if clock() - self._up_since >= STEADY_S:
                self._pause_s = PAUSE_S_MIN
                self._told.clear()
        self._tell(problem)
        self._release()
        if self.state is Connection.UP:
            self._enter(Connection.GONE)

    def _tell(self, problem: StoreFault) -> None:
        reason = str(problem)
        if reason in self._told or len(self._told) >= REASONS_MAX:
            return
        self._told.add(reason)
        if not self._has_good_news:
            self._has_good_news, self._told_at = True, clock()
        log.warning(
            f"{self._backend_type} tier: not connected, and not used until it is",
            **self._fields(),
            reason=reason,
            remedy=self._remedy(problem),
        )

    def _fields(self) -> dict[str, str]:
        return {"tier": self._tier_name, "place": self._place}

    def _enter(self, state: Connection) -> None:
        self.state = state
        self._on_state(state)
