"""Sends the probes of one tier, and ends them as misses if the tier does not answer.

Part of a link's actor. As with loads, the tier is sent no more than it can answer soon
(``flights.py``); the rest waits (``waiting_probes.py``). A probe
without waiters is remembered: its answer may still come, and shows which blocks the tier has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.statistics import Observed
from kvtier.engine.link.circuit_breaker import Work
from kvtier.engine.link.flights import Flights
from kvtier.engine.link.waiting_probes import Probe, WaitingProbes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.engine.link.flights import Numbers
    from kvtier.engine.link.presence_feed import PresenceFeed
    from kvtier.engine.link.tier_health import TierHealth
    from kvtier.settings.runtime_config import RuntimeConfig

FIRST_KEYS: Final = 128
"""Keys first sent to a tier of unknown speed: at 5 ms a key, on one thread, that is 0.6 s."""

PART_KEYS_MIN: Final = 16
"""A smaller part of a question costs more than the waiting questions gain from it."""


class Probes:
    """The probes of one tier."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        numbers: Numbers,
        health: TierHealth,
        contents: PresenceFeed,
        *,
        tier: Mailbox,
        primary: Mailbox,
    ) -> None:
        """``number``: the tier's."""
        self.seconds: Observed[float] = Observed()  #: from sending until the answer
        self._number = number
        self._time = health.time
        self._wait_s = config.wait_timeout_s
        self._probes_max = config.jobs_in_flight_max
        self._numbers = numbers
        self._health = health
        self._contents = contents
        self._counts = numbers.counts
        self._tier = tier
        self._primary = primary
        self._waiting = WaitingProbes()
        limit_s = config.tiers[number].probe_timeout_s
        self._flights: Flights[Probe] = Flights(health.time, FIRST_KEYS, limit_s)
        self.pacing = self._flights.pacing
        self.mark = b""  #: of the generation

    def __len__(self) -> int:
        """Return how many probes at the tier are awaited."""
        return self._flights.awaited

    @property
    def waiting(self) -> int:
        """How many questions still have unsent keys."""
        return self._waiting.unasked()

    @property
    def is_under_way(self) -> bool:
        """Whether any question waits, or any probe is at the tier."""
        return bool(self._waiting) or not self._flights.is_idle

    @property
    def awaited(self) -> frozenset[int]:
        """The numbers of the probes that a request waits for."""
        return frozenset(probe.number for probe in self._flights if probe.is_awaited)

    @property
    def watched(self) -> frozenset[int]:
        """The numbers of the probes that are watched for lateness."""
        return self._flights.watched

    def begin_generation(self, mark: bytes) -> None:
        """Probe for another generation from now on; answers about earlier ones are ignored."""
        self.mark = mark
        self._waiting.pop_all()

    def stop(self) -> None:
        """Forget all probes: those of a link that broke."""
        self._flights.pop_all()
        self._waiting = WaitingProbes()

    # --- asking ---

    def ask(self, message: m.ProbeKeys) -> None:
        """Probe the tier, at once or when it has room. A failing tier counts as having no block."""
        self._waiting.add(message, self._contents.since, self._time.now)
        self.send_waiting()

    def withdraw(self, message: m.Withdraw) -> None:
        """Do not send probes that no request waits for any more."""
        if message.request is None:
            self._waiting.pop_all()
        elif message.unwanted:
            dropped = self._waiting.pop_unwanted(message.request, message.unwanted)
            for apart, keys in dropped:
                self._primary.post(m.ProbesWithdrawn(self._number, keys, apart))

    def send_waiting(self) -> None:
        """Send the probes that the tier has room for. If it is failing, end all waiting ones."""
        if self._waiting and not self._health.takes(Work.PROBE):
            self._end_waiting()
        while len(self) < self._probes_max:
            question = self._waiting.next()
            if question is None:
                return
            room = self._flights.room
            if room <= 0 and not question.is_apart:
                return
            peer = self._health.peer_of(question.request)
            if not self._health.trusts(Work.PROBE, peer):
                self._end(self._waiting.pop_part(question, None))
                continue
            if not self._health.try_acquire(Work.PROBE):
                self._end_waiting()
                return
            share = max(PART_KEYS_MIN, self._flights.pacing.window // len(self._waiting))
            # A request-scoped tier gets all keys at once.
            size = None if question.is_apart else min(room, share)
            self._send(self._waiting.pop_part(question, size), peer)

    def _send(self, probe: Probe, peer: str) -> None:
        probe.assign(peer)
        self._flights.begin(probe, self._numbers.next())
        if not self._tier.post(probe.order(self.mark)):
            self._flights.withdraw(probe)
            self._health.failed(Work.PROBE, "has a full mailbox")
            self._end(probe)
            self._end_waiting()
        else:
            self._health.on_sent(Work.PROBE, peer)

    # --- answers ---

    def answered(self, message: wire.ProbeAnswer) -> None:
        """Handle the tier's answer."""
        probe = self._flights.get(message.probe)
        if probe is None or not probe.is_awaited:
            self._numbers.count_stray(message.probe)
        if probe is None:
            return
        is_watched = self._flights.is_watched(probe)
        is_sound = len(message.present) == len(probe.keys)
        self._flights.end(probe, is_whole=is_sound and probe.is_awaited)
        if is_sound and is_watched:  # awaited or not: its request may just be impatient
            self._health.succeeded(Work.PROBE, probe.peer)
        if probe.is_awaited:
            self.seconds.add(self._time.now - probe.started)
            if not is_sound:
                how = "answered a probe with the wrong number of answers"
                self._health.failed(Work.PROBE, how, probe.peer)
            self._end(probe, message.present if is_sound else None)
        if is_sound:
            self._contents.answered(probe, message.present)
        if probe.is_awaited:
            self.send_waiting()

    def pass_time(self) -> None:
        """End probes as misses if the tier is late, or if a request has waited long enough."""
        if not self.is_under_way:  # the case at most steps
            return
        for peer, late, is_stalled in self._flights.pop_late():
            for probe in late:
                self._lose(probe)
            self._health.late(Work.PROBE, len(late), peer, is_stalled=is_stalled)
        self._flights.learn()
        now = self._time.now
        since = now - self._wait_s
        for probe in self._flights:
            if probe.is_awaited and probe.started <= since:
                self._leave(probe)
            elif probe.is_awaited and probe.deadline <= now:
                self._lose(probe)  # the tier may be healthy: ``pop_late`` decides that
        self._end_unasked(self._waiting.pop_impatient(since))
        self.send_waiting()

    def _lose(self, probe: Probe) -> None:
        """Count a probe as lost, and end it as a miss if it is still awaited."""
        self._flights.lose(probe)
        if probe.is_awaited:
            self._counts.probes_timed_out += 1
            self._leave(probe)

    def _leave(self, probe: Probe) -> None:
        """End a probe as a miss. Its late answer is still used, unless too many others are due."""
        self._flights.leave(probe)
        while self._flights.left > self._probes_max:
            self._flights.withdraw(next(each for each in self._flights if not each.is_awaited))
        self._end(probe)

    def end_all(self) -> None:
        """End all probes as misses: the tier will not answer."""
        self._health.showed_nothing(Work.PROBE)
        for probe in self._flights.pop_all():
            if probe.is_awaited:
                self._end(probe)
        self._end_waiting()

    def _end_waiting(self) -> None:
        self._end_unasked(self._waiting.pop_all())

    def _end_unasked(self, probes: Iterable[Probe]) -> None:
        """End unsent probes, as misses."""
        for probe in probes:
            self._tell(probe, (False,) * probe.size)

    def _end(self, probe: Probe, present: Sequence[bool] | None = None) -> None:
        """Report the tier's answer. None: there is none, so all keys are misses."""
        found = (False,) * probe.size if present is None else tuple(present)
        self._tell(probe, found)
        unasked = self._waiting.answered(probe, is_whole=all(found))
        if unasked is not None:
            self._tell(unasked, (False,) * unasked.size)

    def _tell(self, probe: Probe, found: tuple[bool, ...]) -> None:
        if probe.since != self._contents.since:  # not about the current generation
            return
        self._counts.queries += len(found) - sum(found)
        self._primary.post(m.ProbeEnded(self._number, probe.keys, found, probe.request))
