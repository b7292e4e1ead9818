"""Defines the loads and stores of a tier's link, which wait until their tier has room for them.

Part of a link's actor. A request's blocks are sent in the order in which they were requested, from
head to tail; requests in the order of their first blocks, in which vLLM runs them. So a request
that comes back for its next blocks does not queue behind later requests.
"""

from __future__ import annotations

from collections import deque
from itertools import compress
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import structs

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.engine.link.audit import JobAudit
from kvtier.engine.link.circuit_breaker import Work
from kvtier.engine.link.flights import Flight, Flights
from kvtier.plugin_api.backend import Outcome
from kvtier.plugin_api.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.engine.link.flights import LinkTime
    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.settings.runtime_config import RuntimeConfig

FIRST_BYTES: Final = 32 << 20
"""Work given to a tier of unknown speed: at 4 MB/s that is 8 s of work."""


class Job(Flight):
    """A load or a store: some blocks of one message of the primary tier."""

    __slots__ = ("epoch", "is_load", "keys", "patience_end", "slots")

    def __init__(self, message: m.Promote | m.Cascade, start: int, end: int, since: float) -> None:
        """``since``: when the link received it, in seconds of its clock."""
        self.is_load = isinstance(message, m.Promote)
        self.keys = message.keys[start:end]
        self.slots = message.slots[start:end]
        self.epoch = message.epoch
        self.patience_end = since + message.patience_s if isinstance(message, m.Promote) else NEVER
        super().__init__(message.request, len(self.slots), since)

    @property
    def work(self) -> Work:
        """Its kind of work, for the breaker."""
        return Work.LOAD if self.is_load else Work.STORE

    def order(self, mark: bytes, since: int) -> LoadOrStore:
        """Return the message for the tier, once the job has begun."""
        number, request, deadline = self.number, self.request, self.deadline
        if self.is_load:
            return wire.LoadJob(number, self.keys, self.slots, mark, since, request, deadline)
        return wire.StoreJob(number, request, self.keys, self.slots, mark, since, deadline)

    def done(self, outcomes: Sequence[Outcome]) -> tuple[Key, ...]:
        """Return the keys of the blocks that are DONE; one outcome a block."""
        return tuple(compress(self.keys, [outcome is Outcome.DONE for outcome in outcomes]))

    def blocks_of(self, chosen: Sequence[bool]) -> m.Cascade:
        """Return the chosen blocks of a store job as a Cascade again; one bool for each block."""
        keys, slots = tuple(compress(self.keys, chosen)), tuple(compress(self.slots, chosen))
        return m.Cascade(self.request, keys, slots, self.epoch)

    def has_lost_patience(self, now: float) -> bool:
        """Return whether its request should stop waiting for it, though the tier isn't late."""
        return self.is_awaited and now >= self.patience_end

    def audit(self, *, is_watched: bool) -> JobAudit:
        """Return its state, frozen."""
        return JobAudit(
            self.is_load, not self.is_awaited, is_watched, self.slots, self.patience_end
        )


LoadOrStore: TypeAlias = wire.LoadJob | wire.StoreJob


class Transfers(Flights[Job]):
    """The jobs of one tier and one kind of work: those at the tier, and ``waiting``."""

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
        super().__init__(time, max(1, FIRST_BYTES // config.block_bytes), limit_s)
        self.work = work
        self._are_apart = False
        self.waiting = WaitingJobs(remembers=work is Work.LOAD)
        self._peer_of = peer_of
        self._job_blocks_max = config.job_blocks_max

    def set_calls(self, calls_max: int, *, are_apart: bool) -> None:
        """Set how many jobs the backend does at once, and whether it keeps requests apart."""
        self.pacing.set_calls_max(calls_max)
        self._are_apart = are_apart

    def stop(self) -> None:
        """Forget all jobs: those of a link that broke."""
        self.pop_all()
        self.waiting = WaitingJobs(remembers=False)

    @property
    def has_work(self) -> bool:
        """Whether any job waits, is at the tier, or has ended and was not learnt from."""
        return bool(self.waiting) or not self.is_idle

    @property
    def blocks(self) -> int:
        """The number of blocks that wait or are at the tier."""
        return self.waiting.blocks + self.outstanding

    def add_load(self, message: m.Promote, now: float) -> None:
        """Queue a load for the tier; its request waits longer for it if the tier is slow now."""
        patience_s = message.patience_s
        if self._are_apart:  # it may never come, though the tier serves others meanwhile
            patience_s = min(patience_s, self.pacing.limit_s)
        elif (cost := self.cost(self.waiting.blocks)) is not None:
            patience_s = cost.patience_s(len(message.keys), patience_s, message.patience_max_s)
        self.waiting.add(structs.replace(message, patience_s=patience_s), now)

    def pop_next(self, *, whole: bool) -> Job | None:
        """Return the job to send next; None: none waits, or the tier has enough work.

        ``whole``: the job gets all waiting blocks of its message.
        """
        blocks_max = self.waiting.blocks
        if not (whole or self._are_apart):  # apart, it may get only those requested first
            half = max(1, self.pacing.window // 2)  # while one ends, the tier should have another
            blocks_max = min(self.room, self._job_blocks_max, half, blocks_max)
        if blocks_max <= 0:
            return None
        job = self.waiting.pop(blocks_max)
        job.assign(self._peer_of(job.request))
        return job


class _Part:
    """A message whose blocks from ``start`` on wait."""

    __slots__ = ("message", "since", "start")

    def __init__(self, message: m.Promote | m.Cascade, now: float) -> None:
        self.message = message
        self.since = now
        self.start = 0

    @property
    def blocks(self) -> int:
        return len(self.message.keys) - self.start

    def is_due(self, now: float) -> bool:
        """Return whether it has waited for as long as its request has patience."""
        message = self.message
        return isinstance(message, m.Promote) and now - self.since >= message.patience_s

    def pop(self, blocks: int) -> Job:
        """Return its first blocks as a job."""
        job = Job(self.message, self.start, self.start + blocks, self.since)
        self.start += len(job.keys)
        return job


class WaitingJobs:
    """The waiting jobs of one tier and one kind of work."""

    def __init__(self, *, remembers: bool) -> None:
        """``remembers``: requests keep their places, even without blocks, until forgotten."""
        self.blocks = 0  #: number of waiting blocks
        self._remembers = remembers
        self._parts: dict[RequestId, deque[_Part]] = {}  # in the order of the requests

    def __bool__(self) -> bool:
        """Return whether any block waits."""
        return self.blocks > 0

    def add(self, message: m.Promote | m.Cascade, now: float) -> None:
        """Queue a message's blocks, behind its request's others."""
        if message.keys:
            self._parts.setdefault(message.request, deque()).append(_Part(message, now))
            self.blocks += len(message.keys)

    def pop(self, blocks_max: int) -> Job:
        """Remove and return up to ``blocks_max`` of the next blocks. At least one must wait."""
        request, parts = next((name, parts) for name, parts in self._parts.items() if parts)
        job = self._pop(parts, min(blocks_max, parts[0].blocks))
        if not (parts or self._remembers):
            del self._parts[request]
        return job

    def pop_all(self) -> list[Job]:
        """Remove and return all waiting jobs, which will not be sent."""
        return [*self._pop_where(lambda _: True)]

    def pop_request(self, request: RequestId) -> list[Job]:
        """Remove and return the waiting jobs of a request, which loses its place."""
        parts = self._parts.pop(request, None)
        jobs = []
        while parts:
            jobs.append(self._pop(parts, parts[0].blocks))
        return jobs

    def forget(self, request: RequestId) -> None:
        """Forget the place of a request that is over, if none of its blocks wait."""
        if not self._parts.get(request):
            self._parts.pop(request, None)

    def pop_due(self, now: float) -> list[Job]:
        """Remove and return the jobs that have waited as long as their requests have patience."""
        return [*self._pop_where(lambda part: part.is_due(now))]

    def pop_before(self, epoch: int) -> list[Job]:
        """Remove and return the jobs from before an epoch."""
        return [*self._pop_where(lambda part: part.message.epoch < epoch)]

    def slots(self) -> tuple[int, ...]:
        """Return the slots of all waiting blocks. For tests and diagnosis: it costs O(n)."""
        waiting = (part for parts in self._parts.values() for part in parts)
        return tuple(slot for part in waiting for slot in part.message.slots[part.start :])

    def _pop_where(self, is_meant: Callable[[_Part], bool]) -> Iterator[Job]:
        for request, parts in list(self._parts.items()):
            for part in [part for part in parts if is_meant(part)]:
                parts.remove(part)
                self.blocks -= part.blocks
                yield part.pop(part.blocks)
            if not (parts or self._remembers):
                del self._parts[request]

    def _pop(self, parts: deque[_Part], blocks: int) -> Job:
        job = parts[0].pop(blocks)
        if not parts[0].blocks:
            parts.popleft()
        self.blocks -= blocks
        return job
