"""Polls a backend's counters in its tier's cell, and sums them up at the link.

A backend may be third-party code, and ``counters`` may hang or wait for a lock that
a hung call holds. So it is called in a thread of its own, in the tier's cell, and
the result is posted to the link: no caller blocks on it.

A new life of the cell has a new backend, which counts from 0 again. The link
adds up the lives, so that counters only grow. Gauges are shown as they are.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio

from kvtier.core import wire
from kvtier.plugin_api.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from kvtier.core.actor import Mailbox

COUNT_PAUSE_S: Final = 0.1
"""Shortest interval between two polls, while the tier works ..."""

COUNT_PAUSE_S_MAX: Final = 1.0
"""... and the interval while it doesn't."""

FIRST_WAIT_S: Final = 5.0
"""How long a new life waits for its first counts: only a hung call takes that long ..."""

LAST_WAIT_S: Final = 0.2
"""... and how long an ending life waits for its last ones."""


class Counting:
    """Reports a backend's counters and gauges to the link. Loop thread only."""

    def __init__(
        self,
        name: str,
        counters: Callable[[], dict[str, int]],
        gauges: Container[str],
        link: Mailbox,
    ) -> None:
        """``gauges``: names in ``counters`` of values that go up and down."""
        self._counters = counters
        self._gauges = gauges
        self._link = link
        self._threads = DaemonThreads(1, f"kvtier-{name}-counters")
        self._reported = wire.Counted(counters={})
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Note that there may be something new to count."""
        self._wanted.set()

    async def go_on(self) -> None:
        """Poll and report, until cancelled."""
        while True:
            await self._report()
            await anyio.sleep(COUNT_PAUSE_S)
            with anyio.move_on_after(COUNT_PAUSE_S_MAX - COUNT_PAUSE_S):
                await self._wanted.wait()
            self._wanted.clear()

    async def gauges(self) -> dict[str, int]:
        """Return the gauges; none if that takes too long."""
        with suppress(OSError), anyio.move_on_after(FIRST_WAIT_S):
            return (await self._count()).gauges
        return {}

    async def end(self) -> None:
        """Poll and report a last time, if that takes no longer than ``LAST_WAIT_S``."""
        with anyio.move_on_after(LAST_WAIT_S):
            await self._report()
        self._threads.stop()

    async def _report(self) -> None:
        with suppress(OSError):  # no thread can be started: perhaps the next time
            counted = await self._count()
            if counted != self._reported:
                self._reported = counted
                self._link.post(counted)

    async def _count(self) -> wire.Counted:
        counters = await self._threads.run(self._counters)
        gauges = {name: counters.pop(name) for name in [*counters] if name in self._gauges}
        return wire.Counted(counters, gauges)


class BackendCounts:
    """Adds up the counters of one tier's backends, one life after the other."""

    def __init__(self) -> None:
        self.counters: Mapping[str, int] = {}  #: of all lives; replaced, never changed
        self.gauges: Mapping[str, int] = {}  #: of this life
        self._ended: dict[str, int] = {}  # counted in lives that are over
        self._reported: Mapping[str, int] = {}  # in this life

    def add(self, counted: wire.Counted) -> None:
        """Take in what this life's backend has counted so far."""
        reported = counted.counters
        for name, count in self._reported.items():
            # A count that fell restarts, as if in another life.
            if reported.get(name, count) < count:
                self._ended[name] = self._ended.get(name, 0) + count
        self._reported = {**self._reported, **reported}
        self.gauges = counted.gauges
        self._add_up()

    def restart(self) -> None:
        """Note that another life begins, whose gauges are not known yet."""
        for name, count in self._reported.items():
            self._ended[name] = self._ended.get(name, 0) + count
        self._reported = {}
        self.gauges = {}
        self._add_up()

    def _add_up(self) -> None:
        names = self._ended.keys() | self._reported.keys()
        self.counters = {
            name: self._ended.get(name, 0) + self._reported.get(name, 0) for name in names
        }
