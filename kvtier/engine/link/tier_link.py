"""Represents one secondary tier in the engine cell.

It keeps the jobs and probes in flight, and those that wait until the tier has room for them. It
detects when the tier makes no progress any more, and sends a failing one no work
(``kvtier/engine/link/circuit_breaker.py``). Whatever the tier does or doesn't do, the primary tier
gets exactly one answer to each of these:

- a probe: ``ProbeEnded``, or ``ProbesWithdrawn`` if it was withdrawn before it was sent;
- a promotion: ``PromotionEnded``; ``PromotionWithdrawn`` if it was withdrawn before it was sent;
  or, when the tier is late or its request has lost patience, ``PromotionAbandoned`` and later,
  when the tier has released the slots, ``PromotionLate`` or ``SlotsReleased``;
- a cascade: ``CascadeEnded`` or, for blocks that the tier does not have, ``CascadeDeferred``; only
  when the tier has released the slots.

Each job and probe has the mark of the generation that the primary tier is in
(``kvtier/core/generations.py``). Answers about an earlier generation are accounted for, but
otherwise ignored: they do not show which blocks can be found now.

An answer whose id isn't in flight is counted and otherwise ignored.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.backend_counts import BackendCounts
from kvtier.core.generations import mark_of_name
from kvtier.core.policy_actor import new_policy
from kvtier.core.statistics import JobObservation, Observed, TierCounts, TierStatistics
from kvtier.engine.account.read_share import ReadShare
from kvtier.engine.link.audit import LinkAudit
from kvtier.engine.link.circuit_breaker import Work, worst
from kvtier.engine.link.flights import Numbers
from kvtier.engine.link.jobs import Transfers
from kvtier.engine.link.presence_feed import PresenceFeed
from kvtier.engine.link.probes import Probes
from kvtier.engine.link.relays import AccessRelay, RequestRelay
from kvtier.engine.link.tier_health import NAMES, ServerConnection, TierHealth
from kvtier.engine.link.write_backlog import WriteBacklog
from kvtier.plugin_api.backend import Connection, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.messages import LoadCost
    from kvtier.core.statistics import TierSpeed
    from kvtier.core.wire import Message
    from kvtier.engine.link.jobs import Job
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.settings.runtime_config import RuntimeConfig


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
        collect_events: bool,
    ) -> None:
        """``number``: the tier's. Call ``set_traits`` before the first job."""
        self._relay = relay = RequestRelay(number, tier, primary)
        self.primary = primary
        self.tier = tier
        self.log = log
        self.counts = TierCounts()
        self.backend_counts = BackendCounts()
        self._read_share = ReadShare(self.counts)
        self.ended_jobs: Observed[JobObservation] = Observed()
        self.tells_uses = False  #: whether the tier evicts, and so needs reports of use
        self.serves_others = False  #: whether it requests blocks by itself
        self.write_backlog = WriteBacklog(number, config, self.counts, relay, primary)
        self._number = number
        self._config = config
        tier_config = config.tiers[number]
        self._connection = ServerConnection(tier_config.name, log)
        self._health = TierHealth(
            number, config, self._connection, self.counts, primary, log, relay.peer_of
        )
        self.record = self._health.record
        self.lost_blocks = self._health.lost_blocks
        self.time = time = self._health.time
        limits_s = tier_config.promote_timeout_s, tier_config.store_timeout_s
        self._loads = Transfers(Work.LOAD, config, time, limits_s[0], relay.peer_of)
        self._stores = Transfers(Work.STORE, config, time, limits_s[1])
        self._told_cost: LoadCost | None = None
        self.contents = PresenceFeed(
            number,
            self._connection,
            primary,
            keys_max=config.directory_keys_max,
            collects=collect_events and tier_config.enable_kv_events,
        )
        self._numbers = numbers = Numbers(self.counts)
        self._probes = Probes(
            number, config, numbers, self._health, self.contents, tier=tier, primary=primary
        )
        self.probe_seconds = self._probes.seconds  #: from sending until the answer
        self._probes.begin_generation(mark_of_name(config.weights_version))
        self._is_told = False  # whether the tier was notified of the generation
        self._uses = AccessRelay(tier)
        self._was_idle = True  # at the last Tick
        self._rests = False  # known to be at rest: no message came since
        handlers = {kind: partial(self._hear, each) for kind, each in self._all_handlers().items()}
        super().__init__(f"link:{config.tiers[number].name}", handlers)

    def _all_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            **self._relay.handlers(),
            wire.GenerationBegan: self._generation_began,
            m.ProbeKeys: self._probes.ask,
            m.Promote: self._promote,
            m.Withdraw: self._withdraw,
            m.Cascade: self._cascade,
            m.CascadeRefused: self.write_backlog.refused,
            m.StoresOffered: self.write_backlog.offered,
            m.TierBypassed: self._bypass,
            m.StoresLost: self.write_backlog.lost,
            wire.TouchKeys: self._used,
            wire.RequestEnded: self._request_ended,
            wire.Tick: self._tick,
            wire.ProbeAnswer: self._probes.answered,
            wire.JobEnded: self._job_ended,
            wire.PresenceChanged: self.contents.changed,
            wire.BlocksWanted: lambda x: self._relay.want(x, self.contents.since),
            wire.ConnectionChanged: self._connection_changed,
            wire.Counted: self.backend_counts.add,
            wire.PolicyBroke: self._new_policy,
            wire.PolicyReturned: self._new_policy,
            wire.TierOpened: lambda _: self._health.reconnected(),
            wire.TierBroke: self._tier_broke,
            wire.TierNotRun: lambda x: self.time.leave_out(x.seconds),
            wire.TierFenced: self._tier_fenced,
            wire.TierRestarted: self._tier_restarted,
        }

    def _hear(self, handle: Callable[[Any], None], message: Message) -> None:
        self._rests = False
        handle(message)

    def stop(self) -> None:
        """Ignore every message from now on, and wait for none: it broke, so its tier is lost."""
        super().stop()
        self._health.broke()
        self.counts.cascades_dropped += self._stores.blocks
        for work in (self._probes, self._loads, self._stores, self.write_backlog):
            work.stop()
        self.contents.cleared()
        self._rests, self.serves_others = True, False

    def set_traits(self, traits: BackendTraits) -> None:
        """Apply the traits of the tier's backend."""
        self.tells_uses = traits.capacity_blocks is not None
        self.contents.set_traits(traits)
        self._connection.set_connects(connects=traits.connects)
        self._probes.pacing.set_calls_max(traits.probe_batches_max or traits.load_batches_max)
        shared = self.contents.is_shared
        self._loads.set_calls(traits.load_batches_max, are_apart=not shared)
        self._stores.set_calls(traits.store_batches_max, are_apart=not shared)
        self.write_backlog.set_defers(defers=shared)
        self.serves_others = traits.serves_others
        if not shared:
            self.primary.post(m.TierIsRequestScoped(tier=self._number))
        if traits.capacity_blocks is not None:
            self.primary.post(m.TierIsBounded(self._number, traits.capacity_blocks))
        self._health.tell_usable()

    # --- messages of the primary tier ---

    def _generation_began(self, message: wire.GenerationBegan) -> None:
        self.contents.begin_generation(message.epoch)
        self._probes.begin_generation(message.mark)
        self._refuse(self._stores.waiting.pop_before(message.epoch))
        self._tell_generation()

    def _tell_generation(self) -> None:
        """Notify the tier, which makes room. Jobs and probes repeat it: its mailbox may be full."""
        self._is_told = self.tier.post(wire.GenerationBegan(self.contents.since, self._probes.mark))

    def _promote(self, message: m.Promote) -> None:
        # A hit is counted here and not with the probe: most are known without one.
        self.counts.queries += len(message.keys)
        self.counts.hits += len(message.keys)
        self._loads.add_load(message, self.time.now)
        self._send_waiting(self._loads)

    def _withdraw(self, message: m.Withdraw) -> None:
        """Release unsent loads. Loads at the tier are read to their end."""
        waiting, request = self._loads.waiting, message.request
        for job in waiting.pop_all() if request is None else waiting.pop_request(request):
            self.counts.loads_cancelled += len(job.keys)
            self.primary.post(m.PromotionWithdrawn(self._number, job.keys, job.slots, job.epoch))
        self._probes.withdraw(message)

    def _cascade(self, message: m.Cascade) -> None:
        if message.epoch < self.contents.since:  # Computed with earlier weights.
            self.write_backlog.drop(message)
            return
        self._uses.send(self.time.now)  # before the store, which may evict
        kept, rest = self.write_backlog.admit(message, self._stores.blocks)
        self._stores.waiting.add(kept, self.time.now)
        self._send_waiting(self._stores)
        self.write_backlog.defer(rest)

    def _request_ended(self, message: wire.RequestEnded) -> None:
        self._loads.waiting.forget(message.request)
        self._used(message)

    def _used(self, message: wire.TouchKeys | wire.RequestEnded) -> None:
        if self.tells_uses:
            self._uses.add(message)

    def _send_all(self) -> None:
        self._send_waiting(self._loads)
        self._send_waiting(self._stores)

    def _send_waiting(self, transfers: Transfers) -> None:
        """Send the jobs that the tier has room for. If it is failing, end all waiting ones."""
        if transfers.waiting and not self._takes(transfers.work):
            self._refuse(transfers.waiting.pop_all())
        while len(self._loads) + len(self._stores) < self._config.jobs_in_flight_max:
            is_trial = self._health.tries(transfers.work)  # jobs behind it are refused
            if (job := transfers.pop_next(whole=is_trial)) is None:
                return
            if not self._health.trusts(transfers.work, job.peer):
                self._refuse([job])
            elif not (self._health.try_acquire(transfers.work) and self._send(transfers, job)):
                self._refuse([job, *transfers.waiting.pop_all()])
                return

    def _ask_again(self) -> None:
        if self.write_backlog.has_deferred and self._takes(Work.STORE):
            self.write_backlog.ask_again(self.time.now, self._stores.blocks)

    def _takes(self, work: Work) -> bool:
        has_slots = self._loads.left_blocks <= self._config.abandoned_slots_max
        is_free = has_slots if work is Work.LOAD else not self.write_backlog.is_full(self.time.now)
        return is_free and self._health.takes(work)

    def _send(self, transfers: Transfers, job: Job) -> bool:
        """Send a job to the tier. False: its mailbox is full."""
        transfers.begin(job, self._numbers.next())
        if not self.tier.post(job.order(self._probes.mark, self.contents.since)):
            transfers.withdraw(job)
            self._health.failed(job.work, "has a full mailbox")
            return False
        self._health.on_sent(job.work, job.peer)
        self.counts.promotion_jobs += job.is_load
        self.counts.cascade_jobs += not job.is_load
        return True

    def _refuse(self, jobs: Sequence[Job]) -> None:
        """End jobs that are not sent to the tier."""
        for job in jobs:
            if job.is_load:
                self.counts.promotions_dropped += len(job.keys)
                self._end_promotion(job, (Outcome.FAILED,) * len(job.keys))
            else:
                self.write_backlog.not_sent(job, self.time.now)

    # --- answers of the tier ---

    def _job_ended(self, message: wire.JobEnded) -> None:
        job = self._loads.get(message.job) or self._stores.get(message.job)
        if job is None:
            self._numbers.count_stray(message.job)
            return
        transfers = self._loads if job.is_load else self._stores
        outcomes = message.outcomes
        if len(outcomes) != len(job.keys):
            outcomes = (Outcome.FAILED,) * len(job.keys)
        size = self._config.block_bytes
        complete = self.counts.count_job(outcomes, size, message.seconds, is_load=job.is_load)
        counts_for_its_tier = transfers.is_watched(job)
        transfers.end(job, is_whole=complete, at=message.at)
        done_bytes = outcomes.count(Outcome.DONE) * size
        seen_s, took_s = self.time.now - job.started, transfers.seconds(job, message.at)
        self.ended_jobs.add(JobObservation(job.is_load, complete, done_bytes, seen_s, took_s))
        if counts_for_its_tier and Outcome.FAILED in outcomes:
            self._health.failed(job.work, f"failed a {job.work.name.lower()}", job.peer)
        elif counts_for_its_tier:
            self._health.succeeded(job.work, job.peer)
        self.counts.late_completions += not job.is_awaited
        if not job.is_load:
            self._stored(job, outcomes)
        else:
            self._read_share.on_loaded(job.done(outcomes))
            if job.is_awaited:
                self._end_promotion(job, outcomes)
            else:
                self._arrived_late(job, outcomes)
        self._send_all()  # a place is free, for either kind
        self._ask_again()

    def _arrived_late(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        """Release the slots of an abandoned job; keep blocks that have arrived in them."""
        if self.contents.is_shared:
            self.primary.post(m.PromotionLate(job.keys, job.slots, outcomes, job.epoch))
        else:  # such blocks are of no use to others
            self.primary.post(m.SlotsReleased(slots=job.slots))

    def _stored(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        done = job.done(outcomes)
        self.contents.stored(done, job.epoch)
        self._read_share.on_stored(done)
        is_whole = self.write_backlog.stored(job, outcomes, self.time.now)
        if not is_whole or self.write_backlog.is_full(self.time.now):
            self._refuse(self._stores.waiting.pop_all())  # They may follow missing blocks.

    # --- time ---

    def _tick(self, message: wire.Tick) -> None:
        if not self._is_told:
            self._tell_generation()
        self.pass_time(message.now)
        is_idle = not (self._loads.has_work or self._stores.has_work)
        looks, self._was_idle = not (is_idle and self._was_idle), is_idle  # once more at the end
        if looks:
            self._look()
        self._uses.tick(self.time.now)
        self.contents.pass_time(self.time.now)
        self._relay.go_on()
        self._connection.pass_time(self.time.now)
        self._health.end_pauses()
        if looks:
            self._send_all()
            self._tell_cost()
        self._ask_again()

    @property
    def is_at_rest(self) -> bool:
        """Whether a Tick would do no more than ``pass_time``.

        Read in each step, and true in most: so it is computed once after each message.
        """
        self._rests = self._rests or not self._has_work()
        return self._rests

    def _has_work(self) -> bool:
        works = not self._was_idle or self._loads.has_work or self._stores.has_work
        works = works or self._probes.is_under_way or self.write_backlog.has_deferred
        works = works or self._relay.has_unsent or self.contents.untold > 0
        return works or self._connection.has_untold_loss or self._health.pauses or not self._is_told

    def pass_time(self, now: float) -> None:
        """Set the time, and post nothing: all that a Tick of an idle link does for a while."""
        self.time.pass_to(now)
        self._probes.pass_time()

    def _look(self) -> None:
        """Stop waiting for jobs that are late, and learn from jobs that have ended."""
        for transfers in (self._loads, self._stores):
            for peer, late, is_stalled in transfers.pop_late():
                self.counts.jobs_timed_out += len(late)
                self._abandon(transfers, [job for job in late if job.is_awaited])
                self._health.late(transfers.work, len(late), peer, is_stalled=is_stalled)
            expected_s, took_s = transfers.learn()
            if transfers.work is Work.LOAD:
                self.counts.load_expected_seconds += expected_s
                self.counts.load_taken_seconds += took_s
        self._cut_loads()

    def _cut_loads(self) -> None:
        """Let requests that have waited long enough compute. That is no failure of the tier."""
        for job in self._loads.waiting.pop_due(self.time.now):
            self.counts.loads_abandoned += len(job.keys)
            self._end_promotion(job, (Outcome.FAILED,) * len(job.keys))
        now = self.time.now
        cut = [job for job in self._loads if job.has_lost_patience(now)]
        for job in cut:
            self.counts.loads_abandoned += len(job.keys)
            self._loads.pacing.given_up(job.backlog, now - job.started, now)
        self._abandon(self._loads, cut)

    def _tell_cost(self) -> None:
        """Report the cost of a load now, behind all loads that are at the tier or wait for it."""
        cost = self._loads.cost(self._loads.waiting.blocks)
        if cost != self._told_cost:
            self._told_cost = cost
            self.primary.post(m.LoadCostLearned(self._number, cost))

    # --- the tier's life ---

    def _connection_changed(self, message: wire.ConnectionChanged) -> None:
        """Send the tier no work while its backend has no server, and end waits for it."""
        if not self._connection.change(message.state, self.time.now, self._health.lost_blocks()):
            return
        self.counts.connections_lost += message.state is Connection.GONE
        if self._connection.is_up:
            self._health.reconnected()
        else:
            self._probes.end_all()
            self.contents.on_server_lost()
            self._send_all()
            self._health.tell_usable()

    def _bypass(self, message: m.TierBypassed) -> None:
        """Send the tier no work of a kind and end waits for it, or send it again."""
        self._health.bypass(stores=message.stores, is_bypassed=message.is_bypassed)
        if message.is_bypassed and not message.stores:
            self._probes.end_all()
        self._send_all()
        self._health.tell_usable()

    def _new_policy(self, message: wire.PolicyBroke | wire.PolicyReturned) -> None:
        self.counts.policies_replaced += isinstance(message, wire.PolicyBroke)
        self.log.post(new_policy(self._config.tiers[self._number].name, message))

    def _tier_broke(self, _message: wire.TierBroke) -> None:
        """Disable the tier. Its threads may still be running, so slots stay as they are."""
        self.counts.crashes += not self._health.is_disabled
        self._health.broke()
        self._probes.end_all()
        for transfers in (self._loads, self._stores):
            lost = transfers.lose_all()
            self._abandon(transfers, [job for job in lost if job.is_awaited])
        self._send_all()
        self._health.tell_usable()

    def _tier_fenced(self, _message: wire.TierFenced) -> None:
        """Take back every slot: nothing of the tier is left that could touch one."""
        self._health.broke()
        self._connection.restart()
        self.contents.cleared()  # no block is found in it until a new cell has opened
        self._probes.end_all()
        for job in (*self._loads.pop_all(), *self._stores.pop_all()):
            if not job.is_load:
                self.write_backlog.not_sent(job, self.time.now)
            elif job.is_awaited:
                self._end_promotion(job, (Outcome.FAILED,) * len(job.keys))
            else:
                self.primary.post(m.SlotsReleased(slots=job.slots))
        self._send_all()
        self._health.tell_usable()

    def _tier_restarted(self, message: wire.TierRestarted) -> None:
        """Go on with a fresh cell. Only after TierFenced."""
        if message.traits is not None:
            self.set_traits(message.traits)
        self._health.on_restart()
        self.backend_counts.restart()
        self.write_backlog.restart()
        self._tell_generation()
        self.contents.forget()
        self._health.tell_usable()

    # --- helpers ---

    def _end_promotion(self, job: Job, outcomes: tuple[Outcome, ...]) -> None:
        self._health.on_loads_lost(outcomes.count(Outcome.FAILED))
        self.primary.post(m.PromotionEnded(self._number, job.keys, job.slots, outcomes, job.epoch))

    def _abandon(self, transfers: Transfers, jobs: Sequence[Job]) -> None:
        """Wait no longer for jobs that are at the tier."""
        for job in jobs:
            transfers.leave(job)
            if job.is_load:
                self._health.on_loads_lost(len(job.keys))
                told = m.PromotionAbandoned(self._number, job.keys, job.slots, job.epoch)
                self.primary.post(told)

    def in_flight(self) -> tuple[int, int, int]:
        """Return the probes, promotion jobs and cascade jobs in flight."""
        return len(self._probes), len(self._loads), len(self._stores)

    def awaited(self) -> int:
        """Return how many probes, jobs, waiting blocks and unreported changes may end in time."""
        others = len(self._probes) + self._probes.waiting + self.contents.untold
        jobs = (each.awaited + each.waiting.blocks for each in (self._loads, self._stores))
        return others + sum(jobs)

    def audit(self) -> LinkAudit:
        """Return the state in flight, frozen. For tests and diagnosis: it costs O(n)."""
        return LinkAudit(
            self._health.states,
            self._connection.state,
            self.contents.since,
            {
                job.number: job.audit(is_watched=jobs.is_watched(job))
                for jobs in (self._loads, self._stores)
                for job in jobs
            },
            self._probes.awaited,
            {
                Work.PROBE: self._probes.watched,
                Work.LOAD: self._loads.watched,
                Work.STORE: self._stores.watched,
            },
            self._loads.waiting.slots(),
            self._stores.waiting.slots(),
            self._stores.blocks,
            self._loads.left_blocks,
            self._loads.outstanding,
            self.contents.untold,
            self.time.now,
        )

    def stored_blocks_since(self, before: TierCounts) -> int:
        """Return how many blocks the tier has stored since a snapshot."""
        return (self.counts.write_bytes - before.write_bytes) // self._config.block_bytes

    def stored_blocks_of(self, message: wire.JobEnded) -> int:
        """Return how many blocks an unhandled message reports as stored: 0 for a load."""
        is_store = self._stores.get(message.job) is not None
        return message.outcomes.count(Outcome.DONE) if is_store else 0

    def statistics(self) -> TierStatistics:
        """Return a frozen snapshot."""
        probes, loads, stores = self.in_flight()
        return TierStatistics(
            name=self._config.tiers[self._number].name,
            breaker=worst(self._health.states.values()).name,
            breakers={NAMES[work]: state.name for work, state in self._health.states.items()},
            connection=self._connection.state.name,
            is_open=self._health.is_open,
            probes_in_flight=probes,
            promotion_jobs_in_flight=loads,
            cascade_jobs_in_flight=stores,
            promotion_slots=self._loads.blocks,
            cascade_slots=self._stores.blocks,
            counts=self.counts.snapshot(),
            speeds=self._speeds(),
            backend_counters=self.backend_counts.counters,
            backend_gauges=self.backend_counts.gauges,
        )

    def _speeds(self) -> dict[str, TierSpeed]:
        speeds = {Work.PROBE: self._probes.pacing.speed(None)}
        for transfers in (self._loads, self._stores):
            speeds[transfers.work] = transfers.pacing.speed(self._config.block_bytes)
        return {NAMES[work]: speed for work, speed in speeds.items() if speed is not None}
