"""Queues work at a tier's link until the tier has room for it.

A request's blocks go in the order in which they were asked for, which is head to tail, and
requests in the order in which they first asked: that is the order in which vLLM runs
them. So a request that comes back for its next blocks does not queue behind later requests.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.engine.link.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.plugin_api.keys import RequestId


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
        """``remembers``: a request keeps its place until ``pop_request``, even without blocks."""
        self.blocks = 0  #: number of waiting blocks
        self._remembers = remembers
        self._parts: dict[RequestId, deque[_Part]] = {}  # in the order of the requests

    def __bool__(self) -> bool:
        """Return whether any block waits."""
        return self.blocks > 0

    def add(self, message: m.Promote | m.Cascade, now: float) -> None:
        """Have a message's blocks wait, behind its request's others."""
        if message.keys:
            self._parts.setdefault(message.request, deque()).append(_Part(message, now))
            self.blocks += len(message.keys)

    def pop(self, blocks_max: int) -> Job:
        """Return up to ``blocks_max`` of the next blocks as a job. At least one must wait."""
        request, parts = next((name, parts) for name, parts in self._parts.items() if parts)
        job = self._pop(parts, min(blocks_max, parts[0].blocks))
        if not (parts or self._remembers):
            del self._parts[request]
        return job

    def pop_all(self) -> list[Job]:
        """Return all that waits, which will not be sent."""
        return [*self._pop_where(lambda _: True)]

    def pop_request(self, request: RequestId) -> list[Job]:
        """Return the waiting jobs of a request that is over; it comes last if it comes again."""
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
        """Return the jobs that have waited for as long as their requests have patience."""
        return [*self._pop_where(lambda part: part.is_due(now))]

    def pop_before(self, epoch: int) -> list[Job]:
        """Return the jobs from before an epoch."""
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
