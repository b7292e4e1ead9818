"""The engine cell's end of one secondary tier.

It keeps the jobs and probes in flight, gives each its deadline, and leaves a
sick tier alone (``kvtier/engine/circuit_breaker.py``). Whatever the tier does or doesn't do,
the primary tier gets exactly one answer to each thing it asked for:

- a probe: ``ProbeEnded``;
- a promotion: ``PromotionEnded``, or at the deadline, or when its request has lost
  patience, ``PromotionAbandoned`` and later, when the tier has let go, ``SlotsReleased``;
- a cascade: ``CascadeEnded``, only when the tier has let go of the slots.

Whatever it sends has the mark of the generation that its primary tier is in
(``kvtier/core/generations.py``); what the tier answers to things sent before is
accounted for, and otherwise says nothing about what can be found now.

An answer whose id isn't in flight is counted and otherwise ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.core import messages as m
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.backend_counts import BackendCounts
from kvtier.core.events import EventKind, EventLog
from kvtier.core.generations import mark_of_name
from kvtier.core.policy_actor import new_policy
from kvtier.core.statistics import Observed, TierCounts, TierStatistics
from kvtier.engine.audits import LinkAudit
from kvtier.engine.circuit_breaker import Breaker, BreakerState, Work
from kvtier.engine.connection import FadingPresence, ServerConnection
from kvtier.engine.in_flight import Job, Probe
from kvtier.engine.load_times import LoadTimes
from kvtier.engine.request_tiers import RequestRelay
from kvtier.engine.tier_health import TierHealth
from kvtier.engine.uses import UseRelay
from kvtier.plugin_api.backend import Connection, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key
    from kvtier.settings.runtime_config import RuntimeConfig, TierConfig


class TierLink(Actor):
    """Stands between the primary tier and one secondary tier."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        *,
        tier: Mailbox,
        primary: Mailbox,
        log: Mailbox,
        reply: Callable[[object], None],
        collect_events: bool,
    ) -> None:
        """``number``: the tier's. ``meet`` its backend before the first job."""
        self._relay = RequestRelay(number, tier, primary)
        super().__init__(f"link:{config.tiers[number].name}", self._all_handlers())
        self.primary = primary
        self.tier = tier
        self.log = log
        self.reply = reply
        self.counts = TierCounts()
        self.backend_counts = BackendCounts()
        self.probe_seconds: Observed[float] = Observed()  #: from asking until the answer
        self.promotion_seconds: Observed[tuple[float, bool]] = Observed()  #: and its success
        self.tells_uses = False  #: whether the tier evicts, and so wants to know what is used
        self.by_request = False  #: whether what it has depends on the request
        self.serves_others = False  #: whether it asks for blocks by itself
        self._number = number
        self._config = config
        self._tier_config: TierConfig = config.tiers[number]
        collects = collect_events and self._tier_config.enable_kv_events
        self._events = EventLog(number, collects=collects)
        self._breaker = Breaker(
            config.breaker_failures_max, config.breaker_pause_s, config.breaker_pause_s_max
        )
        self._connection = ServerConnection(self._tier_config.name, log)
        trust = (self._breaker, self._connection)
        self._health = TierHealth(number, self._tier_config.name, *trust, self.counts, primary, log)
        self._load_times = LoadTimes(number, self.counts, primary)
        self._presence = FadingPresence(config.known_keys_max)
        self._mark = mark_of_name(config.weights_version)  # of the generation
        self._since = 0  # the epoch in which it began
        self._is_told = False  # whether the tier's cell has been told of it
        self._full_until = 0.0
        self._jobs: dict[int, Job] = {}
        self._probes: dict[int, Probe] = {}
        self._uses = UseRelay(tier)
        self._cascade_slots = 0
        self._abandoned_slots = 0
        self._next_id = 0
        self._now = 0.0

    def _all_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            **self._relay.handlers(),
            m.GenerationBegan: self._generation_began,
            m.ProbeKeys: self._probe_keys,
            m.Promote: self._promote,
            m.Cascade: self._cascade,
            m.CascadeRefused: self._cascade_refused,
            m.TouchKeys: self._used,
            m.RequestEnded: self._used,
            m.Tick: self._tick,
            m.TakeEvents: lambda _: self.reply(self._events.drain()),
            m.ProbeAnswer: self._probe_answer,
            m.JobEnded: self._job_ended,
            m.PresenceChanged: self._presence_changed,
            m.BlocksWanted: lambda x: self._relay.want(x, self._since),
            m.ConnectionChanged: self._connection_changed,
            m.Counted: lambda x: self.backend_counts.add(x.counters),
            m.PolicyBroke: self._new_policy,
            m.PolicyReturned: self._new_policy,
            m.TierBroke: self._tier_broke,
            m.TierFenced: self._tier_fenced,
            m.TierRestarted: self._tier_restarted,
        }

    def meet(self, traits: BackendTraits) -> None:
        """Learn what the tier's backend is like."""
        self.tells_uses = traits.capacity_blocks is not None
        if not self.tells_uses:
            self._events.tell_once()
        self.backend_counts.learn_levels(traits.levels)
        self._presence.last(traits.presence_s)
        self._connection.meet(connects=traits.connects)
        self.by_request, self.serves_others = traits.by_request, traits.serves_others
        if traits.by_request:
            self.primary.post(m.GoesByRequest(tier=self._number))
        self._health.tell_usable()

    # --- what the primary tier asks for ---

    def _generation_began(self, message: m.GenerationBegan) -> None:
        self._mark, self._since = message.mark, message.epoch
        self._presence.forget()
        self._tell_generation()
        self._events.add(EventKind.CLEARED)

    def _tell_generation(self) -> None:
        """Have the tier make room. Told again with each job and probe: this may be refused."""
        self._is_told = self.tier.post(m.GenerationBegan(self._since, self._mark))

    def _probe_keys(self, message: m.ProbeKeys) -> None:
        probe = Probe(message, self._since, self._now, self._tier_config.probe_timeout_s)
        has_room = len(self._probes) < self._config.jobs_in_flight_max
        if has_room and self._may_send(Work.PROBE):
            probe_id = self._new_id()
            if self.tier.post(probe.order(probe_id, self._mark)):
                self._probes[probe_id] = probe
                return
            self._health.failed(Work.PROBE, "has a full mailbox")
        self._end_probe(probe)

    def _promote(self, message: m.Promote) -> None:
        # A hit is counted here and not with the probe: most are known without one.
        self.counts.queries += len(message.keys)
        self.counts.hits += len(message.keys)
        # What one request is brought may be all that it is ever brought, so it goes whole.
        size = len(message.keys) if self.by_request else self._config.job_blocks_max
        for start in range(0, len(message.keys), size):
            job = Job(message, start, start + size)
            if not self._send(job):
                self.counts.promotions_dropped += len(job.keys)
                self._end_promotion(job, (Outcome.FAILED,) * len(job.keys))

    def _cascade(self, message: m.Cascade) -> None:
        if message.epoch < self._since:  # Computed with the weights from before.
            self.counts.cascades_dropped += len(message.keys)
            self._end_cascade(message)
            return
        start = 0
        while start < len(message.keys):
            room = self._config.cascade_slots_max - self._cascade_slots
            size = min(room, self._config.job_blocks_max)
            if size > 0 and self._now >= self._full_until:
                job = Job(message, start, start + size)
                if self._send(job):
                    self._cascade_slots += len(job.slots)
                    start += size
                    continue
            # No room, or a sick tier: that holds for the rest as well.
            rest = Job(message, start, len(message.keys))
            self.counts.cascades_dropped += len(rest.keys)
            self._end_cascade(rest)
            if self.by_request:
                self._relay.send(m.BlocksMissing(rest.request, rest.keys))
            return

    def _cascade_refused(self, message: m.CascadeRefused) -> None:
        self.counts.cascades_refused += len(message.keys)
        self._end_cascade(message)

    def _used(self, message: m.TouchKeys | m.RequestEnded) -> None:
        if self.tells_uses:
            self._uses.add(message)

    def _send(self, job: Job) -> bool:
        """Send a job to the tier. False: the tier is sick or has too much to do."""
        if len(self._jobs) >= self._config.jobs_in_flight_max:
            return False
        if job.is_load and self._abandoned_slots > self._config.abandoned_slots_max:
            return False
        if not self._may_send(job.work):
            return False
        tier = self._tier_config
        job.start(self._now, tier.promote_timeout_s if job.is_load else tier.store_timeout_s)
        job_id = self._new_id()
        order = job.order(job_id, self._mark, self._since)
        if not self.tier.post(order):
            self._health.failed(job.work, "has a full mailbox")
            return False
        if job.is_load:
            self.counts.promotion_jobs += 1
            self._load_times.sent(job)
        else:
            self.counts.cascade_jobs += 1
        self._jobs[job_id] = job
        return True

    def _may_send(self, work: Work) -> bool:
        return self._connection.is_up and self._breaker.may_send(work)

    # --- what the tier answers ---

    def _probe_answer(self, message: m.ProbeAnswer) -> None:
        probe = self._probes.pop(message.probe, None)
        if probe is None:
            self._count_stray(message.probe)
            return
        self.probe_seconds.add(self._now - probe.started)
        if len(message.present) != len(probe.keys):
            self._health.failed(Work.PROBE, "answered a probe with the wrong number of answers")
            self._end_probe(probe)
            return
        self._health.succeeded(Work.PROBE)
        self._end_probe(probe, message.present)
        by_itself = self.tells_uses or self.by_request  # bounded, and tells; or has nothing to keep
        if self._events.collects and not by_itself and probe.since == self._since:
            answers = list(zip(probe.keys, message.present, strict=True))
            self._events.add(EventKind.STORED, [key for key, is_there in answers if is_there])
            self._events.add(EventKind.REMOVED, [key for key, is_there in answers if not is_there])

    def _job_ended(self, message: m.JobEnded) -> None:
        job = self._jobs.pop(message.job, None)
        if job is None:
            self._count_stray(message.job)
            return
        outcomes = message.outcomes
        if len(outcomes) != len(job.keys):
            outcomes = (Outcome.FAILED,) * len(job.keys)
        size, seconds = self._config.block_bytes, message.seconds
        complete = self.counts.count_job(outcomes, size, seconds, is_load=job.is_load)
        if job.is_load:
            self.promotion_seconds.add((self._now - job.started, complete))
            self._load_times.ended(job, is_whole=complete)
        if job.counts_for_its_tier and Outcome.FAILED in outcomes:
            self._health.failed(job.work, "failed a load" if job.is_load else "failed a store")
        elif job.counts_for_its_tier:
            self._health.succeeded(job.work)
        if job.abandoned:
            self.counts.late_completions += 1
            if job.is_load:
                self._abandoned_slots -= len(job.slots)
                self.primary.post(m.SlotsReleased(slots=job.slots))
                return
        if job.is_load:
            self._end_promotion(job, outcomes)
        else:
            self._cascade_slots -= len(job.slots)
            self._note_stored(job, outcomes)
            self._end_cascade(job)

    def _note_stored(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        stored = tuple(
            key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome is Outcome.DONE
        )
        if stored and job.epoch >= self._since and not self.by_request:
            self._learned(stored, ())
        if Outcome.FULL in outcomes:
            # No room now: trying each block would only cost its pin. Loads go on.
            self._full_until = self._now + self._config.breaker_pause_s

    def _presence_changed(self, message: m.PresenceChanged) -> None:
        if message.since == self._since:
            self._learned(message.added, message.removed)

    def _learned(self, added: tuple[Key, ...], removed: tuple[Key, ...]) -> None:
        if not (self._connection.is_up or self.tells_uses):
            added = ()  # stored before the server was lost, perhaps with all it had
        self.primary.post(m.PresenceLearned(self._number, added, removed, self._since))
        if added:
            self._presence.learn(added, self._now)
            self._events.add(EventKind.STORED, added)
        if removed:
            self._events.add(EventKind.REMOVED, removed)

    # --- time ---

    def _tick(self, message: m.Tick) -> None:
        self._now = message.now
        self._health.pass_time(self._now)
        if not self._is_told:
            self._tell_generation()
        self._give_up_what_is_due()
        self._uses.send(self._now)
        self._ask_again()
        self._relay.go_on()
        self._load_times.pass_time(self._now)
        self._health.end_pause()

    def _give_up_what_is_due(self) -> None:
        due = [each for each, probe in self._probes.items() if probe.is_due(self._now)]
        for probe in map(self._probes.pop, due):
            self.counts.probes_timed_out += 1
            self._health.failed(Work.PROBE, "did not answer a probe in time")
            self._end_probe(probe)
        for job in self._jobs.values():
            if job.is_due(self._now):
                self.counts.jobs_timed_out += 1
                self._health.failed(job.work, "did not end a job in time")
                if job.is_cut:
                    job.end_cut()
                else:
                    self._give_up(job)
            elif job.has_lost_patience(self._now):  # its request computes: no failure of the tier
                job.cut()
                self.counts.promotions_cut += len(job.keys)
                self._give_up(job)

    def _give_up(self, job: Job) -> None:
        if job.is_load:
            self._load_times.given_up(job, self._now)
        self._abandon(job)

    def _ask_again(self) -> None:
        """Believe in nothing for too long that others may have evicted. That is no removal."""
        faded = self._presence.pop_faded(self._now)
        if faded:
            self.primary.post(m.PresenceLearned(self._number, (), faded, self._since))

    # --- the tier's life ---

    def _connection_changed(self, message: m.ConnectionChanged) -> None:
        """Give the tier nothing while its backend has no server, and have nobody wait for it."""
        if not self._connection.change(message.state):
            return
        self.counts.connections_lost += message.state is Connection.GONE
        if self._connection.is_up:
            self._breaker.reconnected()
        else:
            self._end_all_probes()
            if not self.tells_uses:  # What comes back may have been begun anew.
                self._events.add(EventKind.CLEARED)
                self._forget_contents()
        self._health.tell_usable()

    def _new_policy(self, message: m.PolicyBroke | m.PolicyReturned) -> None:
        self.counts.policies_replaced += isinstance(message, m.PolicyBroke)
        self.log.post(new_policy(self._tier_config.name, message))

    def _tier_broke(self, message: m.TierBroke) -> None:
        """Cut the tier off. Its threads may still be at work, so slots stay as they are."""
        if self._breaker.state is not BreakerState.DISABLED:
            self.counts.broke += 1
            self.log.post(
                m.Notice(event="tier disabled", tier=self._tier_config.name, detail=message.reason)
            )
        self._breaker.broke()
        self._end_all_probes()
        for job in self._jobs.values():
            job.end_cut()
            if not job.abandoned:
                self._abandon(job)
        self._health.tell_usable()

    def _tier_fenced(self, _message: m.TierFenced) -> None:
        """Take back every slot: nothing of the tier is left that could touch one."""
        self._breaker.broke()
        self._connection.begin_anew()
        self._events.add(EventKind.CLEARED)  # nothing is found in it until another cell has opened
        self._end_all_probes()
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            if not job.is_load:
                self._cascade_slots -= len(job.slots)
                self._end_cascade(job)
            elif job.abandoned:
                self._abandoned_slots -= len(job.slots)
                self.primary.post(m.SlotsReleased(slots=job.slots))
            else:
                self._end_promotion(job, (Outcome.FAILED,) * len(job.keys))
        self._load_times.forget()
        self._health.tell_usable()

    def _tier_restarted(self, message: m.TierRestarted) -> None:
        """Go on with a fresh cell. Only after TierFenced."""
        if message.traits is not None:
            self.meet(message.traits)
        self._breaker.restarted()
        self.backend_counts.begin_anew()
        self._full_until = 0.0
        self._tell_generation()
        self._forget_contents()
        self._health.tell_usable()

    def _forget_contents(self) -> None:
        """Believe in nothing that the tier had before; what is there is asked for."""
        self._presence.forget()
        self.primary.post(m.TierForgotten(tier=self._number))

    # --- helpers ---

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _count_stray(self, number: int) -> None:
        """Count an answer that nothing in flight belongs to: late, doubled or invented."""
        was_sent = 0 < number <= self._next_id
        self.counts.late_completions += was_sent
        self.counts.unknown_completions += not was_sent

    def _end_probe(self, probe: Probe, present: tuple[bool, ...] | None = None) -> None:
        """Pass the tier's answer on. None: it gives none, and has nothing."""
        if probe.since != self._since:  # What is there now was not asked for; nobody waits.
            return
        found = (False,) * len(probe.keys) if present is None else present
        self.counts.queries += len(found) - sum(found)
        self.primary.post(m.ProbeEnded(self._number, probe.keys, found, probe.request))

    def _end_all_probes(self) -> None:
        """Answer for a tier that will not: it has nothing of what it was asked for."""
        probes, self._probes = self._probes, {}
        self._breaker.showed_nothing(Work.PROBE)
        for probe in probes.values():
            self._end_probe(probe)

    def _end_promotion(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        ended = m.PromotionEnded(self._number, job.keys, job.slots, outcomes, job.epoch)
        self.primary.post(ended)

    def _abandon(self, job: Job) -> None:
        job.abandon()
        if job.is_load:
            self._abandoned_slots += len(job.slots)
            self.primary.post(m.PromotionAbandoned(self._number, job.keys, job.slots, job.epoch))

    def _end_cascade(self, blocks: Job | m.Cascade | m.CascadeRefused) -> None:
        ended = m.CascadeEnded(self._number, blocks.keys, blocks.slots, blocks.epoch)
        self.primary.post(ended)

    def in_flight(self) -> tuple[int, int, int]:
        """Return the probes, promotion jobs and cascade jobs in flight."""
        loads = sum(job.is_load for job in self._jobs.values())
        return len(self._probes), loads, len(self._jobs) - loads

    def awaited(self) -> int:
        """Return how many probes and jobs may still end in time."""
        return len(self._probes) + sum(not job.abandoned for job in self._jobs.values())

    def audit(self) -> LinkAudit:
        """Return what is in flight, frozen. For tests and diagnosis: it costs O(n)."""
        jobs = {number: job.audit() for number, job in self._jobs.items()}
        return LinkAudit(
            self._breaker.state,
            self._connection.state,
            self._since,
            jobs,
            frozenset(self._probes),
            self._cascade_slots,
            self._abandoned_slots,
            self._load_times.outstanding,
            self._now,
        )

    def statistics(self) -> TierStatistics:
        """Return a frozen snapshot."""
        probes, loads, stores = self.in_flight()
        return TierStatistics(
            name=self._tier_config.name,
            breaker=self._breaker.state.name,
            connection=self._connection.state.name,
            probes_in_flight=probes,
            promotion_jobs_in_flight=loads,
            cascade_jobs_in_flight=stores,
            promotion_slots=sum(len(job.slots) for job in self._jobs.values() if job.is_load),
            cascade_slots=self._cascade_slots,
            counts=self.counts.snapshot(),
            backend=self.backend_counts.total,
            backend_levels=self.backend_counts.levels,
        )
