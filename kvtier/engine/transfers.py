"""The jobs of one kind, loads or stores, at one tier: those that wait for it, and those it has.

Part of a link's actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from kvtier.engine.circuit_breaker import Work
from kvtier.engine.in_flight import InFlight
from kvtier.engine.waiting_jobs import WaitingJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core import messages as m
    from kvtier.engine.jobs import Job
    from kvtier.engine.link_time import LinkTime
    from kvtier.plugin_api.keys import RequestId
    from kvtier.settings.runtime_config import RuntimeConfig

FIRST_BYTES: Final = 32 << 20
"""What a tier is given of which nothing is known: at 4 MB/s that is 8 s of work."""


class Transfers:
    """Of one tier and one kind of work."""

    def __init__(
        self,
        work: Work,
        config: RuntimeConfig,
        time: LinkTime,
        limit_s: float,
        peer_of: Callable[[RequestId], str] = lambda _: "",
    ) -> None:
        """``limit_s``: how long the tier may do nothing before it is late.

        ``peer_of``: tells which of the tier's peers is to do a request's work.
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
        """Whether nothing waits and nothing is at the tier, and all that has ended is noted."""
        return self._under_way.is_idle and not self.waiting

    @property
    def awaited(self) -> int:
        """How much may still end in time: jobs at the tier, and blocks that wait to be in one."""
        return self.waiting.blocks + sum(not job.abandoned for job in self.jobs.values())

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the jobs that would be noticed to be late."""
        return self._under_way.watched

    def add_load(self, message: m.Promote, now: float, limit_s: float | None) -> None:
        """Have a load wait for the tier. Its request waits so long at most, or as it says itself.

        None: the latter, and for longer if by now that is what the load should take.
        """
        patience_s = message.patience_s
        if limit_s is not None:
            patience_s = min(patience_s, limit_s)
        elif (cost := self.times.cost(self.waiting.blocks)) is not None:
            patience_s = cost.patience_s(len(message.keys), patience_s, message.patience_max_s)
        self.waiting.add(structs.replace(message, patience_s=patience_s), now)

    def pop_next(self, *, whole: bool) -> Job | None:
        """Return what to send next; None: nothing waits, or the tier has enough to do.

        ``whole``: the tier is given all that there is of a request, and at once.
        """
        if not self.waiting:
            return None
        if whole:
            return self._pop(self.waiting.blocks)
        room = self.times.room
        if room <= 0:
            return None
        half = max(1, self.times.window // 2)  # while one job ends, the tier is to have another
        return self._pop(min(room, self._job_blocks_max, half))

    def _pop(self, blocks_max: int) -> Job:
        job = self.waiting.pop(blocks_max)
        job.assign(self._peer_of(job.request))
        return job

    def on_sent(self, number: int, job: Job) -> float:
        """Note that a job is sent; return from when on nobody waits for it at the latest."""
        self.jobs[number] = job
        return self._under_way.begin(number, job)

    def not_sent(self, number: int) -> None:
        """Note that the tier did not take a job."""
        self._under_way.leave(number, self.jobs.pop(number))

    def on_end(self, number: int, *, is_whole: bool, at: float) -> None:
        """Note that the tier has ended a job. As ``TransferTimes.ended``."""
        self._under_way.end(number, self.jobs.pop(number), is_whole=is_whole, at=at)

    def lose_late(self) -> list[tuple[str, list[Job], bool]]:
        """Return the jobs that each peer is late with, and whether it ends none any more."""
        late = self._under_way.pop_late()
        return [(peer, self._lost(numbers), is_stalled) for peer, numbers, is_stalled in late]

    def lose_all(self) -> list[Job]:
        """Return the jobs that the tier still has, which broke."""
        return self._lost(self._under_way.pop_all())

    def fence(self) -> list[Job]:
        """Return all jobs at the tier, late or not: nothing is left of it."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self._under_way.forget()
        return jobs

    def _lost(self, numbers: Sequence[int]) -> list[Job]:
        """Return jobs that do not keep others from being sent any more."""
        lost = [self.jobs[number] for number in numbers]
        for job in lost:
            self.times.on_lost(job)
        return lost

    def slots(self) -> int:
        """How many slots the jobs at the tier hold."""
        return sum(len(job.slots) for job in self.jobs.values())
