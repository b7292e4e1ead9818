"""The faults of a plan, done to a server and its tiers at their time."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from stress.engine.watch import FS, TIERS
from stress.plan import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from stress.engine.pace import ByClock, ByRequests
    from stress.layer import Injector
    from stress.plan import Fault
    from stress.record import Record

QUERIES: Final = {
    "prefix": "",
    "external": "?reset_external=true",
    "running": "?reset_running_requests=true&reset_external=true",
}
"""What a reset resets → vLLM's query for it."""

PROCESS_KINDS: Final = (
    Kind("kill", TIERS, per_minute=3),
    Kind("stop", TIERS, per_minute=2, spell_s=(0.5, 15.0)),
    Kind("few_descriptors", TIERS, per_minute=1, spell_s=(0.5, 10.0)),
    Kind("little_memory", TIERS, per_minute=0.5, spell_s=(0.5, 10.0)),
)
FOLDER_KINDS: Final = (
    Kind("harm_files", TIERS, per_minute=12),
    Kind("special_files", TIERS, per_minute=1, spell_s=(0.5, 10.0)),
    Kind("remove_folder", TIERS, per_minute=0.5),
    Kind("move_folder", TIERS, per_minute=1, spell_s=(0.5, 10.0)),
    Kind("replace_folder", TIERS, per_minute=1, spell_s=(0.5, 10.0)),
)
FULL_KINDS: Final = (Kind("full_disk", (FS,), per_minute=1, spell_s=(1.0, 10.0)),)
DEED_KINDS: Final = (
    Kind("reset", tuple(QUERIES), per_minute=6),
    Kind("weights", ("reset_before", "reset_after", "kept"), per_minute=1),
    Kind("tools", ("ls", "fsck", "repair", "purge", "purge_old", "check"), per_minute=4),
)
ALONE_KINDS: Final = (
    Kind("restart", ("all_killed", "engine_killed", "terminated"), per_minute=1),
    Kind("second_engine", ("same_fs", "same_disk"), per_minute=0.5),
)
"""Done while nothing else is: what a start meets must be known, so that it can be checked."""

KINDS: Final = (*PROCESS_KINDS, *FOLDER_KINDS, *FULL_KINDS, *DEED_KINDS, *ALONE_KINDS)
_ALONE: Final = frozenset(kind.name for kind in ALONE_KINDS)


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


class Deed(Protocol):
    """Does some kinds of faults that take their time, and checks what comes of them."""

    async def do(self, fault: Fault) -> int:
        """Do a fault; returns how many wrongs that was. Raises ``Failure``."""


class Faults:
    """Carries out a plan. Belongs to one event loop."""

    def __init__(
        self,
        injectors: Mapping[tuple[str, str], Injector],
        deeds: Mapping[str, Deed],
        under_way: UnderWay,
        record: Record,
        pace: ByClock | ByRequests,
        now_s: Callable[[], float],
    ) -> None:
        """``injectors``: by kind and target; ``deeds``: by kind; ``now_s``: of the record."""
        self._injectors = injectors
        self._deeds = deeds
        self._under_way = under_way
        self._record = record
        self._pace = pace
        self._now_s = now_s

    async def run(self, faults: Sequence[Fault], ends_s: float) -> None:
        """Do all faults, and return when the last of them is over. Raises ``Failure``.

        They begin after so many seconds from now, by the plan's pace, and end before ``ends_s``.
        """
        began_s = self._pace.now_s()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await self._pace.until(began_s + fault.at_s)
                group.create_task(self._carry_out(fault, ends_s))

    async def _carry_out(self, fault: Fault, ends_s: float) -> None:
        """Do one fault. While one is alone, the others are left out."""
        if self._under_way.is_closed:
            return
        began_s = self._now_s()
        if fault.kind in _ALONE:
            done = await self._deeds[fault.kind].do(fault)  # it says when it is alone
        elif fault.kind in self._deeds:
            with self._under_way.beside_others("tools" if fault.kind == "tools" else "server"):
                done = await self._deeds[fault.kind].do(fault)
        else:
            with self._under_way.beside_others(fault.target):
                done = await self._inject(fault, ends_s)
        if done:
            self._record.injected[fault.kind] += done
            self._record.note(fault, began_s, self._now_s())

    async def _inject(self, fault: Fault, ends_s: float) -> int:
        injector = self._injectors[fault.kind, fault.target]
        done = injector.begin(fault)
        if fault.for_s:
            try:
                await self._pace.until(min(self._pace.now_s() + fault.for_s, ends_s))
            finally:
                injector.end(fault)
        return done
