"""What a tier's link waits for: the jobs and probes that it has sent."""

from __future__ import annotations

from kvtier.core import messages as m
from kvtier.engine.audits import JobAudit
from kvtier.engine.circuit_breaker import Work
from kvtier.plugin_api.deadlines import NEVER


class Job:
    """One job in flight."""

    __slots__ = (
        "abandoned",
        "backlog",
        "deadline",
        "epoch",
        "is_cut",
        "is_load",
        "keys",
        "patience_end",
        "patience_s",
        "request",
        "slots",
        "started",
    )

    def __init__(self, message: m.Promote | m.Cascade, start: int, end: int) -> None:
        self.is_load = isinstance(message, m.Promote)
        self.request = message.request
        self.keys = message.keys[start:end]
        self.slots = message.slots[start:end]
        self.epoch = message.epoch
        self.started = 0.0
        self.deadline = 0.0
        self.patience_s = message.patience_s if isinstance(message, m.Promote) else NEVER
        self.patience_end = NEVER
        self.backlog = 0  #: blocks outstanding at the tier when it was sent, its own included
        self.abandoned = False
        self.is_cut = False  #: abandoned for want of patience, while its tier is not late with it

    def start(self, now: float, timeout_s: float) -> None:
        """Note when it was sent, and from when on it is late. Both in seconds of the clock."""
        self.started = now
        self.deadline = now + timeout_s
        self.patience_end = now + self.patience_s

    def order(self, number: int, mark: bytes, since: int) -> m.LoadJob | m.StoreJob:
        """Return what the tier is told, once the job has been started."""
        if self.is_load:
            return m.LoadJob(
                number, self.keys, self.slots, mark, since, self.request, self.deadline
            )
        return m.StoreJob(number, self.request, self.keys, self.slots, mark, since, self.deadline)

    def is_due(self, now: float) -> bool:
        """Tell whether its tier is late with it, and was not before."""
        return self.counts_for_its_tier and now >= self.deadline

    @property
    def counts_for_its_tier(self) -> bool:
        """Whether its end is a success or a failure of its tier."""
        return self.is_cut or not self.abandoned

    def has_lost_patience(self, now: float) -> bool:
        """Tell whether its request is to wait for it no longer, though the tier isn't late."""
        return not self.abandoned and now >= self.patience_end

    def cut(self) -> None:
        """Note that it is given up while its tier is not late with it."""
        self.is_cut = True

    def end_cut(self) -> None:
        """Note that its end is nothing to its tier any more."""
        self.is_cut = False

    def wait_behind(self, blocks: int) -> None:
        """Note how many blocks are outstanding at its tier, its own included."""
        self.backlog = blocks

    def abandon(self) -> None:
        """Wait for it no longer; its end is still counted."""
        assert not self.abandoned, "a job is abandoned once"
        self.abandoned = True

    def audit(self) -> JobAudit:
        """Return what it is, frozen."""
        return JobAudit(
            self.is_load, self.abandoned, self.slots, min(self.deadline, self.patience_end)
        )

    @property
    def work(self) -> Work:
        """What the breaker calls it."""
        return Work.LOAD if self.is_load else Work.STORE


class Probe:
    """One probe in flight."""

    __slots__ = ("deadline", "keys", "request", "since", "started")

    def __init__(self, message: m.ProbeKeys, since: int, started: float, timeout_s: float) -> None:
        self.keys = message.keys
        self.request = message.request
        self.since = since
        self.started = started
        self.deadline = started + timeout_s

    def is_due(self, now: float) -> bool:
        """Tell whether it is to be answered for."""
        return now >= self.deadline

    def order(self, number: int, mark: bytes) -> m.Probe:
        """Return what the tier is asked."""
        return m.Probe(number, self.keys, mark, self.since, self.request, self.deadline)
