"""A simulated tier: keeps blocks in memory, and serves them as fast as it is told to.

Its device moves one block after another. A load waits for the tier's latency, then for
its turn at the device. Turns are taken by whole loads, first come, first served, or
block by block among all loads that wait, which then share the bandwidth. The rate may change, and
the device may hang, while loads are under way: the next block goes at the new rate.
Stores take no time, unless it hangs.

It is no tier for users: nothing installs its entry point. ``register`` makes one in a folder, for
processes that have the folder in their path, as a third party's package would.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import anyio

from kvtier.plugin_api.options import Options
from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext, LoadBlock, Loaded, Outcome, StoreBlock

TYPE_NAME: Final = "rated"
SLICE_S: Final = 0.001
"""The device runs ahead of its rate by less than this: no sleep is as short as a fast block."""

LOOK_S: Final = 0.1
"""A device that hangs looks this often whether it still does. With each look, its engine, in the
same process, computes for longer."""


class Rate(NamedTuple):
    """What the device does now."""

    bytes_per_s: float = 1e12
    latency_s: float = 0.0
    hangs: bool = False


class RateFile:
    """A rate in a file: the tier may run in another process than the one that changes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._rate = Rate()

    def write(self, rate: Rate) -> None:
        """Have the tier go at this rate from now on."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(rate._asdict()))
        new.replace(self._path)

    def read(self) -> Rate:
        """Return the rate that was written last."""
        found = os.stat(self._path)
        seen = (found.st_ino, found.st_mtime_ns)
        if seen != self._seen:
            self._rate = Rate(**json.loads(self._path.read_text()))
            self._seen = seen
        return self._rate


class RatedDevice:
    """Lets time pass for blocks. ``rate`` is asked before each of them."""

    def __init__(
        self,
        rate: Callable[[], Rate],
        *,
        shares: bool = False,
        now: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """``shares``: loads that wait take turns block by block, and not one after the other."""
        self.rate = rate
        self._shares = shares
        self._now = now
        self._sleep = sleep
        self._turn = anyio.Lock()
        self._free_at = 0.0

    async def move(self, blocks: int, block_bytes: int) -> None:
        """Return when so many blocks have been moved."""
        await self.answer()
        latency_s = self.rate().latency_s
        if latency_s > 0:
            await self._sleep(latency_s)
        moves = [1] * blocks if self._shares else [blocks]
        for count in moves:
            async with self._turn:
                self._free_at = max(self._free_at, self._now())
                for _ in range(count):
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
    """The ``memory`` backend behind such a device.

    Options: ``capacity_bytes``, as there; ``rate_file``, a path for ``RateFile``; ``shares``.
    """

    type_name: ClassVar[str] = TYPE_NAME
    device: RatedDevice

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> RatedBackend:
        """Check the options; raises ``ConfigError``."""
        own = Options(options, f"secondary tier {context.tier_name}")
        rate = RateFile(Path(own.text("rate_file")))
        shares = own.flag("shares", default=False)
        rest = {key: options[key] for key in options.keys() - {"rate_file", "shares"}}
        backend = super().from_options(rest, context)
        assert isinstance(backend, RatedBackend)
        backend.device = RatedDevice(rate.read, shares=shares)
        return backend

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Copy each block into its buffer, once the device has moved them all."""
        await self.device.move(len(blocks), self._block_bytes)
        return await super().load(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Copy each block, as long as there is room."""
        await self.device.answer()
        return await super().store(blocks)


def register(folder: Path) -> None:
    """Make a folder from which Python finds the entry point of this tier, once in its path."""
    info = folder / "kvtier_rated_tier-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-rated-tier\nVersion: 1\n")
    entry = f"{TYPE_NAME} = {__name__}:{RatedBackend.__name__}"
    (info / "entry_points.txt").write_text(f"[kvtier.backends]\n{entry}\n")
