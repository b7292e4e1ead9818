"""A simulated tier: keeps blocks in memory, and serves them as fast as it is told to.

Its device moves one block after another, and one load after another, first come, first served. The
rate may change, and the device may hang, while loads are under way: the next block goes at the new
rate. Stores take no time, unless it hangs.

It is no tier for users: its entry point is in ``stress/plugins``, as a third party's would be.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import anyio

from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome, StoreBlock

TYPE_NAME: Final = "rated"
SLICE_S: Final = 0.001
"""The device runs ahead of its rate by less than this: no sleep is as short as a fast block."""

LOOK_S: Final = 0.1
"""A device that hangs looks this often whether it still does. With each look, its engine, in the
same process, computes for longer."""


class Rate(NamedTuple):
    """What the device does now."""

    bytes_per_s: float = 1e12
    hangs: bool = False


class RatedDevice:
    """Lets time pass for blocks. ``rate`` is asked before each of them."""

    def __init__(
        self,
        rate: Callable[[], Rate],
        *,
        now: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.rate = rate
        self._now = now
        self._sleep = sleep
        self._turn = anyio.Lock()
        self._free_at = 0.0

    async def move(self, blocks: int, block_bytes: int) -> None:
        """Return when so many blocks have been moved."""
        await self.answer()
        async with self._turn:
            self._free_at = max(self._free_at, self._now())
            for _ in range(blocks):
                await self.answer()
                self._free_at += block_bytes / self.rate().bytes_per_s
                ahead_s = self._free_at - self._now()
                if ahead_s >= SLICE_S:
                    await self._sleep(ahead_s)

    async def answer(self) -> None:
        """Return once it does not hang."""
        while self.rate().hangs:
            await self._sleep(LOOK_S)
            self._free_at = max(self._free_at, self._now())


class RatedBackend(MemoryBackend):
    """The ``memory`` backend behind such a device, in its engine's process."""

    type_name: ClassVar[str] = TYPE_NAME
    rate: ClassVar[Rate] = Rate()
    """What its device does now: set by its engine."""

    @cached_property
    def device(self) -> RatedDevice:
        """The device."""
        return RatedDevice(lambda: RatedBackend.rate)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Copy each block into its buffer, once the device has moved them all."""
        await self.device.move(len(blocks), self._block_bytes)
        return await super().load(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Copy each block, as long as there is room."""
        await self.device.answer()
        return await super().store(blocks)
