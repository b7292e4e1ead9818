"""Both phases of a run, over a server that is up."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from stress.engine.clients import Clients
from stress.engine.faults import FOLDER_KINDS, FULL_KINDS, PROCESS_KINDS, Faults, UnderWay
from stress.engine.lost_folder import Operator
from stress.engine.neighbours import Neighbours
from stress.engine.pace import GATE_S_MAX, LOOK_S, ByClock, ByRequests
from stress.engine.processes import processes_of, resources_of
from stress.engine.resets import Resets, WeightChanges, check_log
from stress.engine.rest import Rest
from stress.engine.restarts import Restarts
from stress.engine.small_disk import FullDisk, Sweeper
from stress.engine.tools import Tools
from stress.engine.vllm_server import ITS_OWN
from stress.engine.watch import (
    DISK,
    FS,
    SCRAPE_S,
    TIERS,
    Watch,
    blocks_from,
    come_to_rest,
    noticed_by,
    sample_of,
)
from stress.failure import Failure
from stress.limits import limits_of
from stress.plan import draw_round
from stress.runtime.files import FolderFaults
from stress.runtime.processes import ProcessFaults, tier_processes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from stress.engine.faults import Deed
    from stress.engine.places import Places
    from stress.engine.questions import Question
    from stress.engine.referee import Referee
    from stress.engine.vllm_server import Server
    from stress.filesystem.volume import Volume
    from stress.layer import Injector
    from stress.plan import Kind, Plan
    from stress.record import Record

WARM_S: Final = 10.0
WARM_REQUESTS: Final = 60  #: instead, in the gate
TOKENS_MIN: Final = 2_000  #: that the gate must have compared
BLOCKS_MIN: Final = 20  #: that each tier must have served in the gate


class Run:
    """One run's state. Raises ``Failure``."""

    def __init__(
        self,
        plan: Plan,
        record: Record,
        places: Places,
        running: Server,
        questions: Sequence[Question],
        referee: Referee,
        *,
        volume: Volume | None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._places = places
        self._server = running
        self._questions = questions
        self._began_s = time.monotonic()
        self._limits = limits_of(is_gate=plan.is_gate)
        self._watch = Watch(running)
        self._clients = Clients(running, questions, plan.seed, referee)
        self._pace: ByClock | ByRequests = (
            ByRequests(lambda: self._clients.requests) if plan.is_gate else ByClock()
        )
        self._rest = Rest(running, self._watch, record, places.engine_id, self._limits)
        self._sweeper = Sweeper(places.tiers[FS], tuple(places.asides.values()))
        under_way = UnderWay()
        self._operator = Operator(running, under_way)
        self._restarts = Restarts(
            running,
            self._watch,
            under_way,
            record,
            self._now_s,
            disk=places.tiers[DISK],
            engine_id=places.engine_id,
        )
        neighbours = Neighbours(
            {"same_fs": places.config(FS), "same_disk": places.config(DISK)},
            places.models[ITS_OWN],
            questions,
            under_way,
            record,
            self._now_s,
            log=places.folder / "second.log",
            engine_id=places.engine_id,
        )
        deeds: dict[str, Deed] = {
            "reset": Resets(running),
            "tools": Tools(places.tiers[DISK], places.config_file, under_way, is_gate=plan.is_gate),
            "weights": WeightChanges(running, places.models, on_reset=places.config()["on_reset"]),
            "restart": self._restarts,
            "second_engine": neighbours,
        }
        self._injected_by = self._injectors(volume)
        self._is_small = volume is not None
        self._deeds = deeds
        self._under_way = under_way

    def _injectors(self, volume: Volume | None) -> dict[tuple[str, str], Injector]:
        """Return who does what to which tier."""
        processes = ProcessFaults(lambda tier: tier_processes(tier, processes_of(self._server.pid)))
        full = FullDisk(volume)
        found: dict[tuple[str, str], Injector] = {}
        for tier in TIERS:
            folders = FolderFaults({tier: self._places.tiers[tier]}, self._places.asides[tier])
            found |= {(kind.name, tier): folders for kind in FOLDER_KINDS}
            found |= {(kind.name, tier): processes for kind in PROCESS_KINDS}
            found |= {(kind.name, tier): full for kind in FULL_KINDS}
        return found

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self, clients: int) -> None:
        """Warm up, and do both phases; figures there are however it ends."""
        try:
            await self._run(clients)
        finally:
            self._note_figures()
        self._see_that_it_shows_something()

    async def _run(self, clients: int) -> None:
        """Serve under faults, serve without, and come to rest."""
        self._restarts.log_from = self._server.log_bytes()
        await self._warm_up(clients)
        before = resources_of(self._server.pid, self._places.engine_id)
        self._began_s = time.monotonic()
        if not self._plan.is_gate:
            self._pace = ByClock()  # the time of the plan begins now
        try:
            await self._serve(clients)
        except* Failure as failures:
            raise first_of(failures) from None
        await self._rest.nothing_is_held()
        await self._rest.resources_are_as(before)
        check_log(self._server.log(self._restarts.log_from))
        await self._server.stop()
        self._record.seconds = self._now_s()

    async def _warm_up(self, clients: int) -> None:
        """Serve for a moment, so that all is there, and as large, as it becomes with use."""
        warm = Clients(self._server, self._questions, self._plan.seed)
        work = asyncio.create_task(warm.run(clients))
        try:
            if self._plan.is_gate:
                while not work.done() and warm.requests < WARM_REQUESTS:
                    await asyncio.wait([work], timeout=LOOK_S)
            else:
                await asyncio.wait([work], timeout=WARM_S)
            warm.stop()
            await work
        except* Failure as failures:
            raise first_of(failures) from None
        finally:
            work.cancel()
        await come_to_rest(self._server, self._watch)

    async def _serve(self, clients: int) -> None:
        """Serve while faults last, and until all has come back after them."""
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._watch.watch(self._sample)),
                group.create_task(self._sweeper.run()),
                group.create_task(self._operator.run()),
                group.create_task(self._pace.run()),
            ]
            work = group.create_task(self._clients.run(clients))
            await self._harm()
            self._record.faults_ended_s = self._now_s()
            await self._rest.breakers_close()
            self._clients.ask_all()
            await self._rest.hits_are_back()
            self._clients.stop()
            await work
            for each in beside:
                each.cancel()

    async def _harm(self) -> None:
        """Do the plan's faults; in the gate, until they have shown what they are to show."""
        faults = Faults(
            self._injected_by, self._deeds, self._under_way, self._record, self._pace, self._now_s
        )
        if self._plan.gate is None:
            await faults.run(self._plan.faults, self._plan.seconds)
            await self._pace.until(self._plan.seconds)
            return
        await faults.run(self._plan.faults, float("inf"))
        rounds, give_up_s = 0, time.monotonic() + GATE_S_MAX
        while missing := self._missing(self._plan.gate):
            if time.monotonic() > give_up_s:
                raise Failure(f"not shown within {GATE_S_MAX:g} s: {'; '.join(missing)}")
            again = {kind for kinds in missing.values() for kind in kinds}
            rounds += 1
            kinds = [kind for kind in self._plan.gate if kind.name in again]
            await faults.run(draw_round(self._plan.seed, rounds, kinds), float("inf"))
            await asyncio.sleep(SCRAPE_S)

    def _missing(self, kinds: Sequence[Kind]) -> Mapping[str, Collection[str]]:
        """Return what the gate has not shown yet, and which faults may show it."""
        found: dict[str, Collection[str]] = {
            f"a fault {kind.name} that was done": (kind.name,)
            for kind in kinds
            if not self._record.injected[kind.name] and self._can_be_done(kind)
        }
        reached = {
            "preemptions": (self._watch.total("vllm:num_preemptions"), 1),
            "evictions": (self._watch.total("kvtier:primary_evictions"), 1),
            "tokens compared": (self._clients.counts["tokens"], TOKENS_MIN),
            **{f"blocks of {tier}": (blocks_from(self._watch, tier), BLOCKS_MIN) for tier in TIERS},
        }
        return found | {
            f"{count:g} of {wanted} {what}": ()
            for what, (count, wanted) in reached.items()
            if count < wanted
        }

    def _can_be_done(self, kind: Kind) -> bool:
        """Tell whether there is such a fault with this configuration, and on this machine."""
        keeps = self._places.config()["on_reset"] == "keep"
        never = {"weights": keeps, "full_disk": not self._is_small}
        return not never.get(kind.name, False)

    def _sample(self) -> None:
        now_s, requests = self._now_s(), self._clients.requests
        sample = sample_of(self._watch, now_s, requests, self._sweeper.blocks)
        self._record.samples.append(sample)

    # --- at the end ---

    def _note_figures(self) -> None:
        record, counts = self._record, self._clients.counts
        record.noticed = {tier: noticed_by(self._watch, tier) for tier in TIERS}
        record.figures |= {
            "requests a minute": round(self._clients.requests / self._now_s() * 60),
            "tokens compared": counts["tokens"],
            "ties": counts["ties"],
            "answers of more than one kind of weights": counts["of_more_weights"],
            "requests cut off by a restart": counts["cut_off"],
            "requests refused by a paused server": counts["paused"],
            "tiers started again, as they asked for": self._operator.started_again,
            "preemptions": self._watch.total("vllm:num_preemptions"),
            "evictions": self._watch.total("kvtier:primary_evictions"),
            **{f"blocks read from {tier}": blocks_from(self._watch, tier) for tier in TIERS},
        }

    def _see_that_it_shows_something(self) -> None:
        needed = ("preemptions", "evictions", *(f"blocks read from {tier}" for tier in TIERS))
        never = [name for name in needed if not self._record.figures[name]]
        if never:
            raise Failure(f"the run shows nothing, there were none: {', '.join(never)}")


def first_of(failures: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first failure of tasks that ran side by side."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
