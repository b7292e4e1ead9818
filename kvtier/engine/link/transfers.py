"""Tracks the jobs of one kind, loads or stores, that wait for a tier or are at it.

Part of a link's actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from kvtier.engine.link.circuit_breaker import Work
from kvtier.engine.link.in_flight import InFlight
from kvtier.engine.link.waiting_jobs import WaitingJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core import messages as m
    from kvtier.engine.link.jobs import Job
    from kvtier.engine.link.link_time import LinkTime
    from kvtier.plugin_api.keys import RequestId
    from kvtier.settings.runtime_config import RuntimeConfig

FIRST_BYTES: Final = 32 << 20
"""Work given to a tier of unknown speed: at 4 MB/s that is 8 s of work."""


class Transfers:
    """The jobs of one tier and one kind of work."""

    def __init__(
        self,
        work: Work,
        config: RuntimeConfig,
        time: LinkTime,
        limit_s: float,
        peer_of: Callable[[RequestId], str] = lambda _: "",
    ) -> None:
        """``limit_s``: how long the tier may do nothing before it is late.

        ``peer_of``: returns the tier's peer that does a request's work.
        """
        self._peer_of = peer_of
        self.work = work
        self.jobs: dict[int, Job] = {}  #: at the tier, by their numbers
        self.waiting = WaitingJobs(remembers=work is Work.LOAD)
        self._under_way = InFlight(time, max(1, FIRST_BYTES // config.block_bytes), limit_s)
        self.times = self._under_way.times
        self._job_blocks_max = config.job_blocks_max

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or is at the tier, and all that have ended are recorded."""
        return self._under_way.is_idle and not self.waiting

    @property
    def awaited(self) -> int:
        """How many may still end in time: jobs at the tier, plus blocks that wait to be in one."""
        return self.waiting.blocks + sum(not job.abandoned for job in self.jobs.values())

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the jobs that are watched for lateness."""
        return self._under_way.watched

    def add_load(self, message: m.Promote, now: float, limit_s: float | None) -> None:
        """Have a load wait for the tier. Its request waits for its patience, ``limit_s`` at most.

        None: no limit, and it waits for longer if the load should take longer by now.
        """
        patience_s = message.patience_s
        if limit_s is not None:
            patience_s = min(patience_s, limit_s)
        elif (cost := self.times.cost(self.waiting.blocks)) is not None:
            patience_s = cost.patience_s(len(message.keys), patience_s, message.patience_max_s)
        self.waiting.add(structs.replace(message, patience_s=patience_s), now)

    def pop_next(self, *, whole: bool) -> Job | None:
        """Return the job to send next; None: none waits, or the tier has enough work.

        ``whole``: the tier is given all waiting blocks of a request message at once.
        """
        if not self.waiting:
            return None
        if whole:
            return self._pop(self.waiting.blocks)
        room = self.times.room
        if room <= 0:
            return None
        half = max(1, self.times.window // 2)  # while one job ends, the tier should have another
        return self._pop(min(room, self._job_blocks_max, half))

    def _pop(self, blocks_max: int) -> Job:
        job = self.waiting.pop(blocks_max)
        job.assign(self._peer_of(job.request))
        return job

    def on_sent(self, number: int, job: Job) -> float:
        """Note that a job is sent; return the latest time until which it is waited for."""
        self.jobs[number] = job
        return self._under_way.begin(number, job)

    def not_sent(self, number: int) -> None:
        """Note that the tier did not take a job."""
        self._under_way.leave(number, self.jobs.pop(number))

    def on_end(self, number: int, *, is_whole: bool, at: float) -> None:
        """Note that the tier has ended a job. Arguments as for ``TransferTimes.on_end``."""
        self._under_way.end(number, self.jobs.pop(number), is_whole=is_whole, at=at)

    def lose_late(self) -> list[tuple[str, list[Job], bool]]:
        """Return each peer's late jobs, and whether the peer is stalled."""
        late = self._under_way.pop_late()
        return [(peer, self._lost(numbers), is_stalled) for peer, numbers, is_stalled in late]

    def lose_all(self) -> list[Job]:
        """Return the watched jobs of a tier that broke."""
        return self._lost(self._under_way.pop_all())

    def fence(self) -> list[Job]:
        """Return all jobs at the tier, late or not: nothing is left of the tier."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self._under_way.forget()
        return jobs

    def _lost(self, numbers: Sequence[int]) -> list[Job]:
        """Mark jobs as lost, so that they do not keep others from being sent; return them."""
        lost = [self.jobs[number] for number in numbers]
        for job in lost:
            self.times.on_lost(job)
        return lost

    def slots(self) -> int:
        """Return how many slots the jobs at the tier hold."""
        return sum(len(job.slots) for job in self.jobs.values())
