"""The probes of one tier: asked, answered, or answered for when the tier does not answer.

Part of a link's actor. A probe that nobody waits for is remembered: its answer may come yet, and
says what the tier has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.core.statistics import Observed
from kvtier.engine.circuit_breaker import Work
from kvtier.engine.in_flight import Probe
from kvtier.engine.stall_watch import StallWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.core.actor import Mailbox
    from kvtier.engine.contents_relay import ContentsRelay
    from kvtier.engine.in_flight import Numbers
    from kvtier.engine.tier_health import TierHealth
    from kvtier.settings.runtime_config import RuntimeConfig


class Probes:
    """Of one tier."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        numbers: Numbers,
        health: TierHealth,
        contents: ContentsRelay,
        *,
        tier: Mailbox,
        primary: Mailbox,
    ) -> None:
        """``number``: the tier's."""
        self.seconds: Observed[float] = Observed()  #: from asking until the answer
        self._number = number
        self._limit_s = config.tiers[number].probe_timeout_s
        self._wait_s = config.wait_timeout_s
        self._probes_max = config.jobs_in_flight_max
        self._numbers = numbers
        self._health = health
        self._contents = contents
        self._counts = numbers.counts
        self._tier = tier
        self._primary = primary
        self._awaited: dict[int, Probe] = {}
        self._late: dict[int, Probe] = {}  # the last of them
        self._watch = StallWatch()
        self._now = 0.0

    def __len__(self) -> int:
        """Return how many somebody waits for."""
        return len(self._awaited)

    @property
    def awaited(self) -> frozenset[int]:
        """The numbers of those that somebody waits for."""
        return frozenset(self._awaited)

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of those that would be noticed to be late."""
        return self._watch.watched

    def ask(self, message: m.ProbeKeys, mark: bytes) -> None:
        """Ask the tier. If it is sick or has too much to do, it counts as having nothing."""
        probe = Probe(message, self._contents.since, self._now)
        if len(self._awaited) < self._probes_max and self._health.may_send(Work.PROBE):
            number = self._numbers.take()
            # What the tier has been asked besides may take as long again.
            if self._tier.post(probe.order(number, mark, self._now + 2 * self._limit_s)):
                self._awaited[number] = probe
                self._watch.begun(number, self._now)
                return
            self._health.failed(Work.PROBE, "has a full mailbox")
        self._end(probe)

    def answered(self, message: m.ProbeAnswer) -> None:
        """Take the tier's answer."""
        probe = self._awaited.pop(message.probe, None)
        if probe is None:
            self._answered_late(message)
            return
        self._watch.ended(message.probe, self._now)
        self.seconds.add(self._now - probe.started)
        if len(message.present) != len(probe.keys):
            self._health.failed(Work.PROBE, "answered a probe with the wrong number of answers")
            self._end(probe)
            return
        self._health.succeeded(Work.PROBE)
        self._end(probe, message.present)
        self._contents.answered(probe, message.present)

    def _answered_late(self, message: m.ProbeAnswer) -> None:
        self._numbers.count_stray(message.probe)
        probe = self._late.pop(message.probe, None)
        if probe is None:
            return
        self._watch.ended(message.probe, self._now)
        if len(message.present) == len(probe.keys):
            self._contents.answered(probe, message.present)

    def pass_time(self, now: float) -> None:
        """Answer for the tier where it is late, or where somebody has waited for long enough."""
        self._now = now
        is_stalled = self._watch.is_stalled(now, self._limit_s)
        late = self._leave(self._watch.pop_late(now, self._limit_s))
        self._counts.probes_timed_out += len(late)
        self._health.late(Work.PROBE, len(late), is_stalled=is_stalled)
        since = now - self._wait_s
        impatient = [n for n, probe in self._awaited.items() if probe.started <= since]
        for probe in (*late, *self._leave(impatient)):
            self._end(probe)

    def end_all(self) -> None:
        """Answer for a tier that will not: it has nothing of what it was asked for."""
        self._health.showed_nothing(Work.PROBE)
        self._watch.forget()
        self._late.clear()
        awaited, self._awaited = self._awaited, {}
        for probe in awaited.values():
            self._end(probe)

    def _leave(self, numbers: Iterable[int]) -> list[Probe]:
        """Wait for these no longer; return those that somebody waited for."""
        left = []
        for number in numbers:
            probe = self._awaited.pop(number, None)
            if probe is not None:
                probe.leave()
                self._late[number] = probe
                left.append(probe)
        while len(self._late) > self._probes_max:
            del self._late[next(iter(self._late))]
        return left

    def _end(self, probe: Probe, present: tuple[bool, ...] | None = None) -> None:
        """Pass the tier's answer on. None: it gives none, and has nothing."""
        if probe.since != self._contents.since:  # What is there now was not asked for.
            return
        found = (False,) * len(probe.keys) if present is None else present
        self._counts.queries += len(found) - sum(found)
        self._primary.post(m.ProbeEnded(self._number, probe.keys, found, probe.request))
