"""Cuts a tier's jobs into batches, one for each call of the backend.

Waiting blocks are divided among all calls that may run at once, as evenly as possible: a large job
is cut up, and small ones are combined, whole.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core import wire
from kvtier.core.generations import marked
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvtier.plugin_api.keys import Key, RequestId

BATCH_BLOCKS_MIN: Final = 8
"""A smaller batch costs more than it could save by running beside others."""


class TierJob:
    """One job; slices of it may be waiting, running or ended."""

    __slots__ = (
        "deadline",
        "ended_at",
        "id",
        "is_load",
        "keys",
        "mark",
        "outcomes",
        "request",
        "seconds",
        "since",
        "slots",
        "unended",
    )

    def __init__(self, message: wire.LoadJob | wire.StoreJob) -> None:
        self.id = message.job
        self.is_load = isinstance(message, wire.LoadJob)
        self.mark = message.mark
        self.since = message.since
        self.keys = marked(message.keys, message.mark)  #: the backend's form of them
        self.slots = message.slots
        self.request = message.request
        self.deadline = message.deadline
        self.outcomes = [Outcome.FAILED] * len(message.keys)
        self.unended = len(message.keys)
        self.seconds = 0.0
        self.ended_at = 0.0

    def claimed(self) -> tuple[Key, ...]:
        """Return the keys that its end may report present."""
        return self.keys

    def end(
        self, job_slice: JobSlice, outcomes: tuple[Outcome, ...], seconds: float, at: float
    ) -> None:
        """Note a slice's outcomes, how long the backend had it, and when it ended."""
        self.outcomes[job_slice.start : job_slice.stop] = outcomes
        assert self.unended >= len(outcomes), "a block of a job ended twice"
        self.unended -= len(outcomes)
        self.seconds += seconds
        self.ended_at = at

    def ended(self) -> wire.JobEnded:
        """Return the result, once each block has an outcome."""
        assert not self.unended, "a job is answered before each of its blocks has ended"
        return wire.JobEnded(self.id, tuple(self.outcomes), self.seconds, self.ended_at)


class JobSlice(NamedTuple):
    """Neighbouring blocks of one job."""

    job: TierJob
    start: int
    stop: int

    @property
    def keys(self) -> tuple[Key, ...]:
        """The blocks' keys."""
        return self.job.keys[self.start : self.stop]

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that the blocks are in, or are to be in."""
        return self.job.slots[self.start : self.stop]


class BlockBatch:
    """Blocks of one or more jobs of one kind, or those of a removal, for one call."""

    __slots__ = ("keys", "remove", "slices")

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self.slices: list[JobSlice] = []  # none: it is a removal
        self.remove: tuple[Key, ...] = ()

    @classmethod
    def of(cls, slices: list[JobSlice]) -> BlockBatch:
        """Return the batch that these slices make up, one after the other."""
        batch = cls(sum([job_slice.keys for job_slice in slices], ()))
        batch.slices = slices
        return batch

    def also_remove(self, keys: tuple[Key, ...]) -> None:
        """Have the backend remove these before it stores."""
        self.remove += keys

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that the blocks are in, or are to be in."""
        return sum([job_slice.slots for job_slice in self.slices], ())

    @property
    def request(self) -> RequestId:
        """The request of the first job; of all, if jobs are not combined."""
        return self.slices[0].job.request

    @property
    def deadline(self) -> float:
        """The earliest deadline of its jobs."""
        return min(job_slice.job.deadline for job_slice in self.slices)


class BatchQueue:
    """Jobs of one kind with blocks that are in no batch yet, in the order they came."""

    def __init__(
        self, batches_max: int, blocks_min: int, blocks_max: int, *, apart: bool = False
    ) -> None:
        """At most ``batches_max`` batches run at once, of ``blocks_min`` to ``blocks_max`` blocks.

        A batch may be smaller if the jobs are: only whole jobs are combined. ``apart``: never
        combine jobs.
        """
        self.running = 0  #: batches in flight
        self._batches_max = batches_max
        self._blocks_min = blocks_min
        self._blocks_max = blocks_max
        self._apart = apart
        self._jobs: deque[TierJob] = deque()
        self._next = 0  # the first job's first block that is in no batch
        self._waiting = 0  # blocks

    def __bool__(self) -> bool:
        """Return whether any block waits."""
        return bool(self._jobs)

    def is_busy(self) -> bool:
        """Return whether any block waits, or is moved."""
        return bool(self._jobs) or self.running > 0

    def add(self, job: TierJob) -> None:
        """Queue the job's blocks. It must have some: no batch can be made of none."""
        assert job.keys, "a job without blocks"
        self._jobs.append(job)
        self._waiting += len(job.keys)

    @property
    def next_key(self) -> Key | None:
        """The key of the first block of the next batch; None if no batch may begin."""
        if not self._jobs or self.running >= self._batches_max:
            return None
        return self._jobs[0].keys[self._next]

    def start_batch(self, avoid: AbstractSet[Key] = frozenset()) -> BlockBatch:
        """Cut off the next batch, which is then in flight. There must be a ``next_key``.

        It ends before a key to avoid; the ``next_key`` must not be one.
        """
        share = min(self._share(), self._blocks_max)
        left = len(self._jobs[0].keys) - self._next
        # In equal batches, none smaller than its share: otherwise the last would be too small.
        size = -(-left // max(left // share, -(-left // self._blocks_max)))
        slices = [self._pop_slice(size, avoid)]
        blocks = slices[0].stop - slices[0].start
        seen = set(slices[0].keys)
        while self._jobs and self._next == 0 and not self._apart:
            keys = self._jobs[0].keys
            blocks += len(keys)
            # No backend is asked to store a key twice in one call.
            if blocks > share or not (avoid.isdisjoint(keys) and seen.isdisjoint(keys)):
                break
            seen.update(keys)
            slices.append(self._pop_slice(len(keys)))
        self.running += 1
        return BlockBatch.of(slices)

    def end_batch(self) -> None:
        """Note that one batch is no longer in flight."""
        assert self.running > 0, "a batch ended that had not begun"
        self.running -= 1

    def _share(self) -> int:
        """Return one batch's share of the waiting blocks.

        Towards the end, when that is less than ``BATCH_BLOCKS_MIN``, they are shared out among
        the batches that may begin now.
        """
        share = -(-self._waiting // self._batches_max)
        if share < BATCH_BLOCKS_MIN:
            free = self._batches_max - self.running
            share = min(BATCH_BLOCKS_MIN, -(-self._waiting // free))
        return max(share, self._blocks_min)

    def _pop_slice(self, size: int, avoid: AbstractSet[Key] = frozenset()) -> JobSlice:
        job, start = self._jobs[0], self._next
        keys = job.keys[start : start + size]
        if not avoid.isdisjoint(keys):
            keys = tuple(takewhile(lambda key: key not in avoid, keys))
        self._waiting -= len(keys)
        self._next += len(keys)
        if self._next == len(job.keys):
            self._jobs.popleft()
            self._next = 0
        return JobSlice(job, start, start + len(keys))
