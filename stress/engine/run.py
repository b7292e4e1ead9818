"""Both phases of a run, over a server that is up."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from stress.engine.clients import Clients
from stress.engine.faults import FOLDER_KINDS, FULL_KINDS, PROCESS_KINDS, Faults
from stress.engine.lost_folder import Operator
from stress.engine.neighbours import Neighbours
from stress.engine.processes import resources_of, tiers_of
from stress.engine.resets import Resets, check_log
from stress.engine.rest import REST_S_MAX, Rest
from stress.engine.restarts import Restarts
from stress.engine.samples import DISK, FS, TIERS, blocks_from, noticed_by, sample_of
from stress.engine.small_disk import FullDisk, Sweeper
from stress.engine.tools import Tools
from stress.engine.under_way import UnderWay
from stress.engine.vllm_server import ITS_OWN
from stress.engine.watch import Watch, come_to_rest
from stress.engine.weights import WeightChanges
from stress.failure import Failure
from stress.runtime.files import FolderFaults
from stress.runtime.processes import ProcessFaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stress.engine.clients import Question
    from stress.engine.faults import Deed
    from stress.engine.places import Places
    from stress.engine.referee import Referee
    from stress.engine.vllm_server import Server
    from stress.layer import Injector
    from stress.plan import Plan
    from stress.record import Record

WARM_S: Final = 10.0


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
        is_small: bool,
    ) -> None:
        self._plan = plan
        self._record = record
        self._places = places
        self._server = running
        self._questions = questions
        self._began_s = time.monotonic()
        self._watch = Watch(running)
        self._clients = Clients(running, questions, plan.seed, referee)
        self._rest = Rest(running, self._watch, record, places.engine_id)
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
            "tools": Tools(places.tiers[DISK], places.config_file, under_way),
            "weights": WeightChanges(running, places.models, on_reset=places.config()["on_reset"]),
            "restart": self._restarts,
            "second_engine": neighbours,
        }
        self._faults = Faults(
            self._injectors(is_small=is_small), deeds, under_way, record, self._now_s
        )

    def _injectors(self, *, is_small: bool) -> dict[tuple[str, str], Injector]:
        """Return who does what to which tier."""
        processes = ProcessFaults(lambda tier: tiers_of(self._server.pid, tier))
        full = FullDisk(self._places.small, is_small=is_small)
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
            await asyncio.wait([work], timeout=WARM_S)
            warm.stop()
            await work
        except* Failure as failures:
            raise first_of(failures) from None
        finally:
            work.cancel()
        await come_to_rest(self._server, self._watch, REST_S_MAX)

    async def _serve(self, clients: int) -> None:
        """Serve while faults last, and until all has come back after them."""
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._watch.watch(self._sample)),
                group.create_task(self._sweeper.run()),
                group.create_task(self._operator.run()),
            ]
            work = group.create_task(self._clients.run(clients))
            await self._faults.run(self._plan)
            await asyncio.sleep(self._plan.seconds - self._now_s())
            self._record.faults_ended_s = self._now_s()
            await self._rest.breakers_close()
            self._clients.ask_all()
            await self._rest.hits_are_back()
            self._clients.stop()
            await work
            for each in beside:
                each.cancel()

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
