"""What a tier's link waits for: the jobs and probes that it has sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.engine.circuit_breaker import Work

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key


class Job:
    """One job in flight."""

    __slots__ = (
        "abandoned",
        "deadline",
        "epoch",
        "is_load",
        "keys",
        "request",
        "slots",
        "started",
    )

    def __init__(self, message: m.Promote | m.Cascade, start: int, end: int) -> None:
        self.is_load = isinstance(message, m.Promote)
        self.request = "" if isinstance(message, m.Promote) else message.request
        self.keys = message.keys[start:end]
        self.slots = message.slots[start:end]
        self.epoch = message.epoch
        self.started = 0.0
        self.deadline = 0.0
        self.abandoned = False

    def start(self, now: float, timeout_s: float) -> None:
        """Note when it was sent, and from when on it is late. Both in seconds of the clock."""
        self.started = now
        self.deadline = now + timeout_s

    def abandon(self) -> None:
        """Wait for it no longer; its end is still counted."""
        assert not self.abandoned, "a job is abandoned once"
        self.abandoned = True

    @property
    def work(self) -> Work:
        """What the breaker calls it."""
        return Work.LOAD if self.is_load else Work.STORE


class Probe:
    """One probe in flight."""

    __slots__ = ("deadline", "keys", "since", "started")

    def __init__(self, keys: tuple[Key, ...], since: int, started: float, deadline: float) -> None:
        self.keys = keys
        self.since = since
        self.started = started
        self.deadline = deadline
