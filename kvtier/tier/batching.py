"""Cuts the jobs of a tier into parts: each is what one call of the backend handles.

What waits is shared out among all calls that there may be at once, as evenly as
can be: a large job is cut up, and small ones go together, whole.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core import messages as m
from kvtier.core.generations import marked
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvtier.plugin_api.keys import Key

CRUMB_BLOCKS: Final = 8
"""A smaller part costs more than what it could save by running beside others."""


class Job:
    """One job; parts of it may wait, run or have ended."""

    __slots__ = (
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

    def __init__(self, message: m.LoadJob | m.StoreJob) -> None:
        self.id = message.job
        self.is_load = isinstance(message, m.LoadJob)
        self.mark = message.mark
        self.since = message.since
        self.keys = marked(message.keys, message.mark)  #: as the backend knows them
        self.slots = message.slots
        self.request = "" if isinstance(message, m.LoadJob) else message.request
        self.outcomes = [Outcome.FAILED] * len(message.keys)
        self.unended = len(message.keys)
        self.seconds = 0.0

    def end(self, piece: Piece, outcomes: tuple[Outcome, ...], seconds: float) -> None:
        """Note how one of its pieces ended, and how long the backend had it."""
        self.outcomes[piece.start : piece.stop] = outcomes
        self.unended -= len(outcomes)
        self.seconds += seconds

    def ended(self) -> m.JobEnded:
        """Return the answer, once each block has an outcome."""
        return m.JobEnded(job=self.id, outcomes=tuple(self.outcomes), seconds=self.seconds)


class Piece(NamedTuple):
    """Neighbouring blocks of one job."""

    job: Job
    start: int
    stop: int

    @property
    def keys(self) -> tuple[Key, ...]:
        """The blocks' keys."""
        return self.job.keys[self.start : self.stop]

    @property
    def slots(self) -> tuple[int, ...]:
        """Where the blocks are, or are to be."""
        return self.job.slots[self.start : self.stop]


class Part:
    """Blocks of one or more jobs of one kind, or those of a probe or a removal, for one call."""

    __slots__ = ("is_removal", "keys", "pieces", "probe", "remove")

    def __init__(self, keys: tuple[Key, ...], *, probe: int = 0, is_removal: bool = False) -> None:
        self.keys = keys
        self.pieces: list[Piece] = []  # none: it is a removal, or the probe of that number
        self.probe = probe
        self.is_removal = is_removal
        self.remove: tuple[Key, ...] = ()

    @classmethod
    def of(cls, pieces: list[Piece]) -> Part:
        """Return the part that these make up, one behind the other."""
        part = cls(sum([piece.keys for piece in pieces], ()))
        part.pieces = pieces
        return part

    def also_remove(self, keys: tuple[Key, ...]) -> None:
        """Have the backend remove these before it stores."""
        self.remove += keys

    @property
    def slots(self) -> tuple[int, ...]:
        """Where the blocks are, or are to be."""
        return sum([piece.slots for piece in self.pieces], ())


class PartQueue:
    """Jobs of one kind: those with blocks that are in no part yet, in the order they came."""

    def __init__(self, parts_max: int, blocks_min: int, blocks_max: int) -> None:
        """At most ``parts_max`` parts run at once, of ``blocks_min`` to ``blocks_max`` blocks.

        A part is smaller where the jobs are: those that go together go whole.
        """
        self.running = 0  #: parts under way
        self._parts_max = parts_max
        self._blocks_min = blocks_min
        self._blocks_max = blocks_max
        self._jobs: deque[Job] = deque()
        self._next = 0  # the first job's first block that is in no part
        self._waiting = 0  # blocks

    def __bool__(self) -> bool:
        """Tell whether any block waits."""
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        """Have the job's blocks wait. It has some: of none, no part could be made."""
        assert job.keys, "a job without blocks"
        self._jobs.append(job)
        self._waiting += len(job.keys)

    @property
    def next_key(self) -> Key | None:
        """The key of the first block of the next part; None if no part may begin."""
        if not self._jobs or self.running >= self._parts_max:
            return None
        return self._jobs[0].keys[self._next]

    def start_part(self, avoid: AbstractSet[Key] = frozenset()) -> Part:
        """Take the next part, which is under way then. There must be a ``next_key``.

        It ends before a key that is to be avoided; the ``next_key`` must be none.
        """
        share = min(self._share(), self._blocks_max)
        left = len(self._jobs[0].keys) - self._next
        # In equal parts, none of them smaller than its share: the last one would be a crumb.
        size = -(-left // max(left // share, -(-left // self._blocks_max)))
        pieces = [self._take(size, avoid)]
        blocks = pieces[0].stop - pieces[0].start
        taken = set(pieces[0].keys)
        while self._jobs and self._next == 0:
            keys = self._jobs[0].keys
            blocks += len(keys)
            # No backend is asked to store a key twice in one call.
            if blocks > share or not (avoid.isdisjoint(keys) and taken.isdisjoint(keys)):
                break
            taken.update(keys)
            pieces.append(self._take(len(keys)))
        self.running += 1
        return Part.of(pieces)

    def end_part(self) -> None:
        """Note that one part less is under way."""
        assert self.running > 0, "a part ended that had not begun"
        self.running -= 1

    def _share(self) -> int:
        """Return how many blocks are one part's share of what waits.

        Towards the end, where that would be crumbs, it is shared out among those that may
        begin now.
        """
        share = -(-self._waiting // self._parts_max)
        if share < CRUMB_BLOCKS:
            free = self._parts_max - self.running
            share = min(CRUMB_BLOCKS, -(-self._waiting // free))
        return max(share, self._blocks_min)

    def _take(self, size: int, avoid: AbstractSet[Key] = frozenset()) -> Piece:
        job, start = self._jobs[0], self._next
        keys = job.keys[start : start + size]
        if not avoid.isdisjoint(keys):
            keys = tuple(takewhile(lambda key: key not in avoid, keys))
        self._waiting -= len(keys)
        self._next += len(keys)
        if self._next == len(job.keys):
            self._jobs.popleft()
            self._next = 0
        return Piece(job, start, start + len(keys))
