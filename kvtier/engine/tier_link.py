"""The engine cell's end of one secondary tier.

It keeps the jobs and probes in flight, gives each its deadline, and leaves a
sick tier alone (``kvtier/engine/circuit_breaker.py``). Whatever the tier does or doesn't do,
the primary tier gets exactly one answer to each thing it asked for:

- a probe: ``ProbeEnded``;
- a promotion: ``PromotionEnded``, or at the deadline ``PromotionAbandoned``
  and later, when the tier has let go, ``SlotsReleased``;
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
from kvtier.core.policy_actor import POLICY_TIME_S, broken_policy
from kvtier.core.statistics import Observed, TierCounts, TierStatistics
from kvtier.engine.audits import JobAudit, LinkAudit
from kvtier.engine.circuit_breaker import Breaker, BreakerState, Work
from kvtier.engine.in_flight import Job, Probe
from kvtier.plugin_api.backend import Outcome

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
        self._number = number
        self._config = config
        self._tier_config: TierConfig = config.tiers[number]
        collects = collect_events and self._tier_config.enable_kv_events
        self._events = EventLog(number, collects=collects)
        self._breaker = Breaker(
            config.breaker_failures_max, config.breaker_pause_s, config.breaker_pause_s_max
        )
        self._mark = mark_of_name(config.weights_version)  # of the generation
        self._since = 0  # the epoch in which it began
        self._is_told = False  # whether the tier's cell has been told of it
        self._usable = True
        self._full_until = 0.0
        self._jobs: dict[int, Job] = {}
        self._probes: dict[int, Probe] = {}
        self._uses: list[m.TouchKeys | m.RequestEnded] = []  # not sent yet
        self._tiers_time = 0.0  # what the tier was told last
        self._cascade_slots = 0
        self._abandoned_slots = 0
        self._next_id = 0
        self._now = 0.0

    def _all_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
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
            m.Counted: lambda x: self.backend_counts.add(x.counters),
            m.PolicyBroke: self._policy_broke,
            m.TierBroke: self._tier_broke,
            m.TierFenced: self._tier_fenced,
            m.TierRestarted: self._tier_restarted,
        }

    def meet(self, traits: BackendTraits) -> None:
        """Learn what the tier's backend is like."""
        self.tells_uses = traits.capacity_blocks is not None
        self.backend_counts.learn_levels(traits.levels)

    # --- what the primary tier asks for ---

    def _generation_began(self, message: m.GenerationBegan) -> None:
        self._mark, self._since = message.mark, message.epoch
        self._tell_generation()
        self._events.add(EventKind.CLEARED)

    def _tell_generation(self) -> None:
        """Have the tier make room. Told again with each job and probe: this may be refused."""
        self._is_told = self.tier.post(m.GenerationBegan(self._since, self._mark))

    def _probe_keys(self, message: m.ProbeKeys) -> None:
        if len(self._probes) < self._config.jobs_in_flight_max and self._breaker.may_send(
            Work.PROBE
        ):
            probe_id = self._new_id()
            if self.tier.post(m.Probe(probe_id, message.keys, self._mark, self._since)):
                deadline = self._now + self._tier_config.probe_timeout_s
                probe = Probe(message.keys, self._since, self._now, deadline)
                self._probes[probe_id] = probe
                return
            self._failed(Work.PROBE, "has a full mailbox")
        self._end_probe(message.keys, self._since, (False,) * len(message.keys))

    def _promote(self, message: m.Promote) -> None:
        # A hit is counted here and not with the probe: most are known without one.
        self.counts.queries += len(message.keys)
        self.counts.hits += len(message.keys)
        for start in range(0, len(message.keys), self._config.job_blocks_max):
            job = Job(message, start, start + self._config.job_blocks_max)
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
            return

    def _cascade_refused(self, message: m.CascadeRefused) -> None:
        self.counts.cascades_refused += len(message.keys)
        self._end_cascade(message)

    def _used(self, message: m.TouchKeys | m.RequestEnded) -> None:
        if self.tells_uses:
            self._uses.append(message)

    def _send(self, job: Job) -> bool:
        """Send a job to the tier. False: the tier is sick or has too much to do."""
        if len(self._jobs) >= self._config.jobs_in_flight_max:
            return False
        if job.is_load and self._abandoned_slots > self._config.abandoned_slots_max:
            return False
        if not self._breaker.may_send(job.work):
            return False
        job_id = self._new_id()
        order: m.LoadJob | m.StoreJob
        if job.is_load:
            order = m.LoadJob(job_id, job.keys, job.slots, self._mark, self._since)
        else:
            order = m.StoreJob(job_id, job.request, job.keys, job.slots, self._mark, self._since)
        if not self.tier.post(order):
            self._failed(job.work, "has a full mailbox")
            return False
        if job.is_load:
            self.counts.promotion_jobs += 1
            job.start(self._now, self._tier_config.promote_timeout_s)
        else:
            self.counts.cascade_jobs += 1
            job.start(self._now, self._tier_config.store_timeout_s)
        self._jobs[job_id] = job
        return True

    # --- what the tier answers ---

    def _probe_answer(self, message: m.ProbeAnswer) -> None:
        probe = self._probes.pop(message.probe, None)
        if probe is None:
            self._count_stray(message.probe)
            return
        self.probe_seconds.add(self._now - probe.started)
        if len(message.present) != len(probe.keys):
            self._failed(Work.PROBE, "answered a probe with the wrong number of answers")
            self._end_probe(probe.keys, probe.since, (False,) * len(probe.keys))
            return
        self._succeeded(Work.PROBE)
        self._end_probe(probe.keys, probe.since, message.present)

    def _job_ended(self, message: m.JobEnded) -> None:
        job = self._jobs.pop(message.job, None)
        if job is None:
            self._count_stray(message.job)
            return
        outcomes = message.outcomes
        if len(outcomes) != len(job.keys):
            outcomes = (Outcome.FAILED,) * len(job.keys)
        self._count_outcomes(job, outcomes, message.seconds)
        if job.abandoned:
            self.counts.late_completions += 1
            if job.is_load:
                self._abandoned_slots -= len(job.slots)
                self.primary.post(m.SlotsReleased(slots=job.slots))
                return
        elif Outcome.FAILED in outcomes:
            self._failed(job.work, "failed a load" if job.is_load else "failed a store")
        else:
            self._succeeded(job.work)
        if job.is_load:
            self._end_promotion(job, outcomes)
        else:
            self._cascade_slots -= len(job.slots)
            self._note_stored(job, outcomes)
            self._end_cascade(job)

    def _count_outcomes(self, job: Job, outcomes: tuple[Outcome, ...], seconds: float) -> None:
        counts = self.counts
        done = outcomes.count(Outcome.DONE)
        complete = done == len(outcomes)
        moved = done * self._config.block_bytes
        if job.is_load:
            counts.read_bytes += moved
            counts.read_seconds += seconds
            counts.promotion_jobs_failed += not complete
            self.promotion_seconds.add((self._now - job.started, complete))
        else:
            counts.write_bytes += moved
            counts.write_seconds += seconds
            counts.cascade_jobs_failed += not complete
        counts.absent += outcomes.count(Outcome.ABSENT)
        counts.damaged += outcomes.count(Outcome.DAMAGED)
        counts.failed += outcomes.count(Outcome.FAILED)
        counts.full += outcomes.count(Outcome.FULL)

    def _note_stored(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        stored = tuple(
            key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome is Outcome.DONE
        )
        if stored and job.epoch >= self._since:
            self._learned(stored, ())
        if Outcome.FULL in outcomes:
            # No room now: trying each block would only cost its pin. Loads go on.
            self._full_until = self._now + self._config.breaker_pause_s

    def _presence_changed(self, message: m.PresenceChanged) -> None:
        if message.since == self._since:
            self._learned(message.added, message.removed)

    def _learned(self, added: tuple[Key, ...], removed: tuple[Key, ...]) -> None:
        self.primary.post(m.PresenceLearned(self._number, added, removed, self._since))
        if added:
            self._events.add(EventKind.STORED, added)
        if removed:
            self._events.add(EventKind.REMOVED, removed)

    # --- time ---

    def _tick(self, message: m.Tick) -> None:
        self._now = message.now
        if not self._is_told:
            self._tell_generation()
        for probe_id in [each for each, probe in self._probes.items() if self._due(probe)]:
            probe = self._probes.pop(probe_id)
            self.counts.probes_timed_out += 1
            self._failed(Work.PROBE, "did not answer a probe in time")
            self._end_probe(probe.keys, probe.since, (False,) * len(probe.keys))
        for job in self._jobs.values():
            if not job.abandoned and self._due(job):
                job.abandon()
                self.counts.jobs_timed_out += 1
                self._failed(job.work, "did not end a job in time")
                if job.is_load:
                    self._abandon(job)
        self._tell_uses()
        self._breaker.pass_time(self._now)
        self._tell_usable()

    def _tell_uses(self) -> None:
        """Send on what was used. Dropped if the mailbox is full: the tier then evicts worse."""
        if not self._uses:
            return
        if self._now - self._tiers_time >= POLICY_TIME_S:
            self._tiers_time = self._now
            self.tier.post(m.Tick(now=self._now))
        for use in self._uses:
            self.tier.post(use)
        self._uses.clear()

    def _due(self, work: Job | Probe) -> bool:
        return self._now >= work.deadline

    # --- the tier's life ---

    def _policy_broke(self, message: m.PolicyBroke) -> None:
        self.counts.policies_replaced += 1
        self.log.post(broken_policy(self._tier_config.name, message))

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
            if not job.abandoned:
                job.abandon()
                if job.is_load:
                    self._abandon(job)
        self._tell_usable()

    def _tier_fenced(self, _message: m.TierFenced) -> None:
        """Take back every slot: nothing of the tier is left that could touch one."""
        self._breaker.broke()
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
        self._tell_usable()

    def _tier_restarted(self, message: m.TierRestarted) -> None:
        """Go on with a fresh cell. Only after TierFenced."""
        if message.traits is not None:
            self.meet(message.traits)
        self._breaker.restarted()
        self.backend_counts.begin_anew()
        self._full_until = 0.0
        self._tell_generation()
        self.primary.post(m.TierForgotten(tier=self._number))
        self._events.add(EventKind.CLEARED)
        self._tell_usable()

    # --- helpers ---

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _count_stray(self, number: int) -> None:
        """Count an answer that nothing in flight belongs to: late, doubled or invented."""
        if 0 < number <= self._next_id:
            self.counts.late_completions += 1
        else:
            self.counts.unknown_completions += 1

    def _end_probe(self, keys: tuple[Key, ...], since: int, present: tuple[bool, ...]) -> None:
        if since != self._since:  # What is there now was not asked for; nobody waits.
            return
        self.counts.queries += len(keys) - sum(present)
        self.primary.post(m.ProbeEnded(tier=self._number, keys=keys, present=present))

    def _end_all_probes(self) -> None:
        """Answer for a tier that will not: it has nothing of what it was asked for."""
        probes = list(self._probes.values())
        self._probes.clear()
        for probe in probes:
            self._end_probe(probe.keys, probe.since, (False,) * len(probe.keys))

    def _end_promotion(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        self.primary.post(
            m.PromotionEnded(
                tier=self._number,
                keys=job.keys,
                slots=job.slots,
                outcomes=outcomes,
                epoch=job.epoch,
            )
        )

    def _abandon(self, job: Job) -> None:
        self._abandoned_slots += len(job.slots)
        self.primary.post(
            m.PromotionAbandoned(tier=self._number, keys=job.keys, slots=job.slots, epoch=job.epoch)
        )

    def _end_cascade(self, blocks: Job | m.Cascade | m.CascadeRefused) -> None:
        self.primary.post(
            m.CascadeEnded(
                tier=self._number, keys=blocks.keys, slots=blocks.slots, epoch=blocks.epoch
            )
        )

    def _succeeded(self, work: Work) -> None:
        was = self._breaker.state
        self._breaker.succeeded(work)
        if was is BreakerState.HALF_OPEN and self._breaker.state is BreakerState.CLOSED:
            self.log.post(m.Notice(event="tier is back", tier=self._tier_config.name, detail=""))
        self._tell_usable()

    def _failed(self, work: Work, how: str) -> None:
        was = self._breaker.state
        self._breaker.failed(work, self._now)
        if was is BreakerState.CLOSED and self._breaker.state is BreakerState.OPEN:
            self.counts.breaker_opened += 1
            self.log.post(m.Notice(event="tier bypassed", tier=self._tier_config.name, detail=how))
        self._tell_usable()

    def _tell_usable(self) -> None:
        usable = self._breaker.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN)
        if usable is not self._usable:
            self._usable = usable
            self.primary.post(m.TierUsable(tier=self._number, usable=usable))

    def in_flight(self) -> tuple[int, int, int]:
        """Return the probes, promotion jobs and cascade jobs in flight."""
        loads = sum(job.is_load for job in self._jobs.values())
        return len(self._probes), loads, len(self._jobs) - loads

    def awaited(self) -> int:
        """Return how many probes and jobs may still end in time."""
        return len(self._probes) + sum(not job.abandoned for job in self._jobs.values())

    def audit(self) -> LinkAudit:
        """Return what is in flight, frozen. For tests and diagnosis: it costs O(n)."""
        jobs = {
            number: JobAudit(job.is_load, job.abandoned, job.slots)
            for number, job in self._jobs.items()
        }
        return LinkAudit(
            self._breaker.state,
            self._since,
            jobs,
            frozenset(self._probes),
            self._cascade_slots,
            self._abandoned_slots,
        )

    def statistics(self) -> TierStatistics:
        """Return a frozen snapshot."""
        probes, loads, stores = self.in_flight()
        return TierStatistics(
            name=self._tier_config.name,
            breaker=self._breaker.state.name,
            probes_in_flight=probes,
            promotion_jobs_in_flight=loads,
            cascade_jobs_in_flight=stores,
            promotion_slots=sum(len(job.slots) for job in self._jobs.values() if job.is_load),
            cascade_slots=self._cascade_slots,
            counts=self.counts.snapshot(),
            backend=self.backend_counts.total,
            backend_levels=self.backend_counts.levels,
        )
