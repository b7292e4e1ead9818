"""Defines the jobs of a tier's link, and numbers the jobs and probes that it sends."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.engine.link.audit import JobAudit
from kvtier.engine.link.circuit_breaker import Work
from kvtier.plugin_api.backend import Outcome
from kvtier.plugin_api.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.statistics import TierCounts
    from kvtier.plugin_api.keys import Key


class Sent(Protocol):
    """A job or a probe, as seen by the code that measures how long the tier takes."""

    started: float
    backlog: int
    peer: str

    @property
    def size(self) -> int:
        """The number of its blocks or keys."""
        ...

    @property
    def counts_for_its_tier(self) -> bool:
        """Whether its end is a success or a failure of its tier."""
        ...

    def start(self, now: float, backlog: int) -> None:
        """Note when it was sent, and how much was outstanding at the tier with its own."""
        ...


class Job:
    """One job: it waits at the link, or is at the tier."""

    __slots__ = (
        "abandoned",
        "backlog",
        "epoch",
        "is_cut",
        "is_load",
        "keys",
        "patience_end",
        "peer",
        "request",
        "slots",
        "started",
    )

    def __init__(self, message: m.Promote | m.Cascade, start: int, end: int, since: float) -> None:
        """``since``: when the link received it, in seconds of its clock."""
        self.is_load = isinstance(message, m.Promote)
        self.request = message.request
        self.keys = message.keys[start:end]
        self.slots = message.slots[start:end]
        self.epoch = message.epoch
        self.started = since
        self.patience_end = since + message.patience_s if isinstance(message, m.Promote) else NEVER
        self.backlog = 0  #: blocks outstanding at the tier when it was sent, its own included
        self.peer = ""  #: the address that is to do it, if its tier has several
        self.abandoned = False
        self.is_cut = False  #: abandoned for lack of patience, though its tier is not late with it

    def assign(self, peer: str) -> None:
        """Set the peer of its tier that is to do it."""
        self.peer = peer

    def start(self, now: float, backlog: int) -> None:
        """Note when it was sent, and how many blocks were outstanding at the tier with its own."""
        self.started = now
        self.backlog = backlog

    def order(self, number: int, mark: bytes, since: int, deadline: float) -> LoadOrStore:
        """Return the message for the tier, once the job has been started."""
        if self.is_load:
            return wire.LoadJob(number, self.keys, self.slots, mark, since, self.request, deadline)
        return wire.StoreJob(number, self.request, self.keys, self.slots, mark, since, deadline)

    @property
    def size(self) -> int:
        """The number of its blocks."""
        return len(self.slots)

    @property
    def counts_for_its_tier(self) -> bool:
        """Whether its end is a success or a failure of its tier."""
        return self.is_cut or not self.abandoned

    def done(self, outcomes: Sequence[Outcome]) -> tuple[Key, ...]:
        """Return the keys of the blocks that are DONE; one outcome a block."""
        return tuple(compress(self.keys, [outcome is Outcome.DONE for outcome in outcomes]))

    def blocks_of(self, chosen: Sequence[bool]) -> m.Cascade:
        """Return the chosen blocks of a store job as a Cascade, as they came; one bool a block."""
        keys, slots = tuple(compress(self.keys, chosen)), tuple(compress(self.slots, chosen))
        return m.Cascade(self.request, keys, slots, self.epoch)

    def has_lost_patience(self, now: float) -> bool:
        """Return whether its request should stop waiting for it, though the tier isn't late."""
        return not self.abandoned and now >= self.patience_end

    def cut(self) -> None:
        """Note that it is given up though its tier is not late with it."""
        self.is_cut = True

    def end_cut(self) -> None:
        """Note that its end no longer counts for its tier."""
        self.is_cut = False

    def abandon(self) -> None:
        """Wait for it no longer; its end is still counted."""
        assert not self.abandoned, "a job is abandoned once"
        self.abandoned = True

    def audit(self) -> JobAudit:
        """Return its state, frozen."""
        return JobAudit(
            self.is_load, self.abandoned, self.counts_for_its_tier, self.slots, self.patience_end
        )

    @property
    def work(self) -> Work:
        """Its kind of work, for the breaker."""
        return Work.LOAD if self.is_load else Work.STORE


LoadOrStore: TypeAlias = wire.LoadJob | wire.StoreJob


class Numbers:
    """Allocates the numbers of the jobs and probes that a link sends: from 1, each once."""

    def __init__(self, counts: TierCounts) -> None:
        self.counts = counts
        self._last = 0

    def next(self) -> int:
        """Return an unused number."""
        self._last += 1
        return self._last

    def count_stray(self, number: int) -> None:
        """Count a completion that matches nothing in flight: late, duplicate or invented."""
        was_sent = 0 < number <= self._last
        self.counts.late_completions += was_sent
        self.counts.unknown_completions += not was_sent
