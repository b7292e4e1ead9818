"""The primary tier: the blocks in host memory, their readers and their writers.

The actor at the heart of the engine cell. It moves slots between their states
(``kvtier/engine/primary/slot_table.py``), from which replies to lookups follow.

Rules that are not rows of a table:

- A block that a lookup reported READY is not evicted before the step ends, so
  that ``prepare_load()`` in the same step succeeds.
- A block promoted for a request is leased to it: not evicted before the
  request reads it, is scheduled, finishes, or lets ``lease_timeout_s`` pass.
- Promotions leave a reserve of slots, so that stores go on.
- ``kvtier/engine/primary/tier_directory.py`` tracks which tiers have a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.events import PRIMARY, Event, EventKind, EventLog
from kvtier.core.metrics import PRIMARY_TIER
from kvtier.core.policy_actor import POLICY_TIME_S, new_policy
from kvtier.core.statistics import PrimaryCounts, PrimaryStatistics
from kvtier.engine.account.sources import Account
from kvtier.engine.primary.audit import PrimaryAudit
from kvtier.engine.primary.cascades import Cascades
from kvtier.engine.primary.eviction import Eviction, StoreAfterEviction
from kvtier.engine.primary.load_completions import LoadCompletions
from kvtier.engine.primary.load_decisions import LoadDecisions
from kvtier.engine.primary.lookups import Lookups, StepRequests
from kvtier.engine.primary.prefix_reservations import PrefixReservations, storable
from kvtier.engine.primary.promotions import Batch, Promotions
from kvtier.engine.primary.request_tiers import RequestTiers
from kvtier.engine.primary.requests import GpuLoads, Request
from kvtier.engine.primary.running_prefixes import RunningPrefixes
from kvtier.engine.primary.slot_table import SlotTable
from kvtier.engine.primary.store_filter import StoreFilter, wanted_of
from kvtier.engine.primary.tier_directory import TierDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.plugin_api.keys import Key, RequestId, TierSet
    from kvtier.settings.runtime_config import RuntimeConfig


class PrimaryTier(Actor):
    """Owns the slots. Requests victims from its policy, and blocks from its links."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        policy: Mailbox,
        links: Sequence[Mailbox],
        gates: Mapping[int, Mailbox],
        log: Mailbox,
        reply: Callable[[object], None],
        collect_events: bool,
    ) -> None:
        """``gates``: of tiers that don't take every block, by the tier's number."""
        self.policy = policy
        self.links = links
        self.log = log
        self.reply = reply
        self._policies = [policy, *gates.values()]  # of eviction and of admission
        self.counts = PrimaryCounts()
        self._events = EventLog(PRIMARY, collects=collect_events)
        self._filter = StoreFilter.if_wanted(config.store_threshold, config.max_tracker_size)
        self.slots = SlotTable(config.slot_count)
        self.account = Account(self.counts, config.slot_count, len(config.tiers))
        self.promotions = Promotions(
            self.slots, config.slot_count - config.store_reserve_slots, config.lease_timeout_s
        )
        self._slot_of: Mapping[Key, int] = self.slots.slot_of
        self._prefixes = RunningPrefixes()
        self._eviction = Eviction(self.slots, self._prefixes, policy)
        self._directory = TierDirectory(len(config.tiers), config.directory_keys_max)
        self.decisions = LoadDecisions(
            config, self.slots, self._directory, self.promotions, self.account, log
        )
        self._lookups = Lookups(
            self.slots,
            self._directory,
            self.promotions,
            self._eviction,
            self.decisions,
            room=config.evict_batch_slots,
            reply=reply,
        )
        self._requests = self._lookups.requests
        reservations = PrefixReservations(
            self._lookups, self.slots, self.promotions, self._eviction, self.decisions
        )
        self._step_requests = StepRequests(
            self._directory, self.promotions, self._requests, links, config.wait_timeout_s
        )
        self._gpu_loads = GpuLoads()
        takers = [gates.get(tier, link) for tier, link in enumerate(links)]
        self._cascades = Cascades(self.slots, config.tiers, takers, self._prefixes, self._directory)
        self.request_tiers = RequestTiers(self.slots, self._cascades, links, policy)
        books = (self.slots, self.promotions, self._lookups, self._eviction)
        self._load_completions = LoadCompletions(*books, self._became_ready, self._not_filled)
        self.epoch = 0  #: how many resets there were
        self._since = 0  # the epoch in which the generation of weights began
        self._policy_time = 0.0  # the last time sent to the policies
        # Python finds attributes faster while an object has fewer than 30.
        super().__init__("primary", {**reservations.handlers(), **self._all_handlers()})

    def _all_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            **self._directory.handlers(),
            **self._lookups.handlers(),
            **self._load_completions.handlers(),
            m.PrepareLoad: self._prepare_load,
            m.CompleteLoad: self._complete_load,
            m.PrepareStore: self._prepare_store,
            StoreAfterEviction: self._store_after_eviction,
            m.CompleteStore: self._complete_store,
            m.AskStored: self._ask_stored,
            m.Discard: self._discard,
            m.Touch: self._touch,
            m.RequestStarted: self._request_started,
            m.RequestFinished: self._request_finished,
            m.RequestsScheduled: self._requests_scheduled,
            m.StepEnd: self._step_end,
            wire.Tick: self._tick,
            m.Reset: self._reset,
            m.ResetFlushed: lambda _: self.slots.gpu_flushed(),
            m.Victims: self._victims,
            wire.PolicyBroke: self._new_policy,
            wire.PolicyReturned: self._new_policy,
            m.TierIsRequestScoped: self.request_tiers.mark_request_scoped,
            m.TierIsBounded: lambda x: self.account.follow_evictions(x.tier, x.capacity_blocks),
            m.CascadeWanted: self._cascade_wanted,
            m.NotAdmitted: self._not_admitted,
            m.CascadeEnded: self._cascade_ended,
            m.CascadeDeferred: self._cascade_deferred,
            m.StoresWanted: self._stores_wanted,
            wire.BlocksWanted: self.request_tiers.pin_wanted,
            m.PresenceLearned: self._presence_learned,
            m.LinkFailed: self._link_failed,
        }

    # --- lookups ---

    def slot_of(self, key: Key) -> int | None:
        """Return the slot that a FILLING or READY key has. For tests."""
        return self._slot_of.get(key)

    def resident(self) -> set[Key]:
        """Return all READY keys. For tests and error messages: it costs O(n)."""
        return {key for key, slot in self._slot_of.items() if self.slots.is_ready(slot)}

    def statistics(self) -> PrimaryStatistics:
        """Return a frozen snapshot."""
        held = self.promotions.held_slots
        return self.slots.statistics(held, len(self._requests), self.account)

    def deferred_blocks(self) -> dict[int, int]:
        """Return how many deferred blocks each tier has."""
        return self._cascades.deferred_blocks()

    def audit(self) -> PrimaryAudit:
        """Return the whole state, frozen. For tests and diagnosis: it costs O(n)."""
        return PrimaryAudit(
            self.slots.audit(),
            self.promotions.audit(),
            self._directory.audit(),
            self._lookups.audit(),
            parked=frozenset(self._cascades.parked),
            holes={tier: holes.audit() for tier, holes in self._cascades.holes.items()},
            deferred={tier: holes.waiting() for tier, holes in self._cascades.holes.items()},
            makes_room=self._eviction.is_under_way,
            excluded=self._eviction.excluded,
        )

    def drain_events(self) -> list[Event]:
        """Return the events since the last call; LAPSED keys only if they have no slot now."""
        events = self._events.drain()
        if not events:
            return events  # as in most steps
        for number, event in enumerate(events):
            if event.kind is EventKind.LAPSED:
                gone = tuple(key for key in event.keys if key not in self._slot_of)
                events[number] = event._replace(keys=gone)
        return events

    # --- room ---

    def _victims(self, message: m.Victims) -> None:
        then = self._eviction.evict(message.keys)
        if then is not None:
            self._evicted(self._eviction.evicted)
            self.receive(then)

    def _evicted(self, keys: Sequence[Key]) -> None:
        if keys:
            self.counts.evictions += len(keys)
            self.account.on_evicted(keys, self.promotions.now)
            for tier, lost in self._cascades.leave(keys).items():
                if lost:
                    self.links[tier].post(m.StoresLost(lost))
            self._events.add(EventKind.REMOVED, keys)

    def _discard(self, message: m.Discard) -> None:
        self._eviction.discard(message.keys)
        self._evicted(self._eviction.evicted)

    def _new_policy(self, message: wire.PolicyBroke | wire.PolicyReturned) -> None:
        self.counts.policies_replaced += isinstance(message, wire.PolicyBroke)
        self.log.post(new_policy(PRIMARY_TIER, message))
        self._eviction.tell_residents()

    # --- GPU loads ---

    def _prepare_load(self, message: m.PrepareLoad) -> None:
        keys = message.keys
        found = self._slots_of(keys)
        if not self.slots.are_ready(found):
            self.reply(None)
            return
        self._lookups.on_load(message)
        self._prefixes.use(message.request, keys, message.order)
        self.slots.pin(found)
        self._gpu_loads.begin(message.request, keys)
        touched = m.Touched(keys, message.request, held=True)
        for policy in self._policies:
            policy.post(touched)
        if self.slots.leased:
            self._end_leases(message.request, keys)
        self.reply(found)

    def _complete_load(self, message: m.CompleteLoad) -> None:
        ended: Sequence[Key] = ()
        if message.epoch == self.epoch:
            ended = self._gpu_loads.end(message.request, message.keys)
        self.counts.unknown_completions += len(message.keys) - len(ended)
        read = self._slots_of(ended)
        self.slots.unpin(read)
        self._unhold(ended, read)

    # --- GPU stores ---

    def _prepare_store(self, message: m.PrepareStore) -> None:
        self._prefixes.use(message.request, message.keys, message.order)
        wanted = self._wanted(message)
        if not wanted:
            self.reply(m.StoreGrant([], [], [], self.epoch))
            return
        self.account.on_computed(wanted)
        if message.cuts is not None:
            self._cascades.note_windows()
        self._lookups.count_of(message.request)
        most = storable(wanted, message.keys, message.cuts, self.slots.count)
        if not most:  # not even in all slots: waiting does not help
            self.counts.stores_dropped += len(wanted)
            self._cascades.lose(wanted)
            self.reply(m.StoreGrant([], [], [], self.epoch))
        elif most <= self.slots.free_count():
            self._grant(message.request, wanted, most, [])
        elif self._would_cost_deferred(message.request, most):
            self._grant(message.request, wanted, 0, [])  # later is better
        else:
            # Its own blocks stay: they are the heads of the blocks stored now.
            is_partly_here = len(wanted) < len(message.keys)
            excluded = frozenset(message.keys if is_partly_here else ())
            self._eviction.make_room(most, StoreAfterEviction(message, wanted), excluded)

    def _would_cost_deferred(self, request: RequestId, count: int) -> bool:
        """Return whether a store has to evict deferred blocks of the same request.

        The stored blocks would be of no use to the tier without those.
        """
        deferred = self._cascades.deferred_of(request)
        loose = self.slots.ready_count() - len(self.slots.pins) - deferred
        return deferred > 0 and count > self.slots.free_count() + max(0, loose)

    def _store_after_eviction(self, message: StoreAfterEviction) -> None:
        store, wanted = message.store, message.wanted
        assert self._slot_of.keys().isdisjoint(wanted), "a key got a slot while it waited for one"
        room = storable(wanted, store.keys, store.cuts, self.slots.free_count())
        self._grant(store.request, wanted, room, self._eviction.evicted)

    def _grant(self, request: RequestId, wanted: list[Key], room: int, evicted: list[Key]) -> None:
        """Give the first ``room`` of the wanted keys a slot each; the others are dropped."""
        if room < len(wanted):
            self.counts.stores_dropped += len(wanted) - room
            if not room:
                self.reply(None)
                return
            self._cascades.lose(wanted[room:])
            wanted = wanted[:room]
        granted = self.slots.allocate_for_gpu(wanted, request)
        self.request_tiers.store(request, len(granted))
        self._directory.stop_probing(wanted)
        self.policy.post(m.Admitted(tuple(wanted), request, held=True))
        self.reply(m.StoreGrant(wanted, granted, evicted, self.epoch))

    def _wanted(self, message: m.PrepareStore) -> list[Key]:
        wanted = wanted_of(message.keys, self._slot_of, self._filter, self.counts)
        if len(wanted) < len(message.keys):
            self._offered_again(message)
        if wanted:
            self.account.allocation_sizes.add(len(wanted))
        return wanted

    def _offered_again(self, message: m.PrepareStore) -> None:
        """Record the use of blocks that are here already; some tiers want them too."""
        here = tuple(key for key in message.keys if key in self._slot_of)
        self.policy.post(m.Touched(keys=here, request=message.request))
        whole = self._cascades.of_offered(here) | self.request_tiers.of_offered(
            here, message.request
        )
        self._hold_and_cascade(whole, message.request)

    def _complete_store(self, message: m.CompleteStore) -> None:
        keys, fills, request = message.keys, self.slots.gpu_fills, message.request
        if message.epoch != self.epoch:  # Its slots are in quarantine.
            self.counts.unknown_completions += len(keys)
            return
        slots = self._slots_of(keys)
        owners = list(map(fills.get, slots))
        if owners.count(request) < len(keys):  # Some were never begun.
            keys = tuple(key for key, owner in zip(keys, owners, strict=True) if owner == request)
            slots = self._slots_of(keys)
            self.counts.unknown_completions += len(message.keys) - len(keys)
        if message.success:
            self.slots.fill(slots, fills)
            self._cascades.keep(message.kept)
            self._became_ready(keys, slots, request, self.request_tiers.takers(request))
        else:
            self._fill_failed(keys, slots)
            self._cascades.lose(keys)
        self.request_tiers.stored(request, len(keys))

    def _touch(self, message: m.Touch) -> None:
        self._prefixes.use(message.request, message.keys)
        self.policy.post(m.Touched(keys=message.keys, request=message.request))
        for link in self.links:
            link.post(wire.TouchKeys(keys=message.keys, request=message.request))

    # --- cascades ---

    def _became_ready(
        self, keys: Sequence[Key], slots: Sequence[int], request: RequestId, cascade_to: TierSet
    ) -> None:
        """Announce new READY blocks, and cascade them to ``cascade_to``."""
        if not keys:
            return
        self._events.add(EventKind.STORED, keys)
        if self.links:
            batches = self._cascades.of_ready(keys, slots, cascade_to)
            self._cascades.send(batches, request, self.epoch)
            self.request_tiers.became_ready(keys, slots)
        self._unhold(keys, slots)

    def _hold_and_cascade(self, batches: Mapping[int, Batch], request: RequestId) -> None:
        """Cascade blocks that were READY before, the same ones for each tier."""
        for keys, _ in list(batches.values())[:1]:  # they are the same for all
            self.policy.post(m.Held(keys=tuple(keys)))
        self._cascades.send(batches, request, self.epoch)
        for keys, slots in list(batches.values())[:1]:
            self._unhold(keys, slots)  # those that were not pinned

    def _not_admitted(self, message: m.NotAdmitted) -> None:
        self.account.on_gone(message.keys, message.tier, "not_admitted", self.promotions.now)

    def _cascade_wanted(self, message: m.CascadeWanted) -> None:
        batches = self._cascades.of_wanted(message.tier, message.keys)
        self._hold_and_cascade(batches, message.request)

    def _cascade_deferred(self, message: m.CascadeDeferred) -> None:
        if message.epoch == self.epoch:
            self._cascades.defer(message)
        self._cascade_ended(message)

    def _stores_wanted(self, message: m.StoresWanted) -> None:
        keys, lost = self._cascades.send_deferred(message, self.epoch)
        if keys:
            self.policy.post(m.Held(keys=tuple(keys)))
        self.links[message.tier].post(m.StoresOffered(is_all=not keys, lost=lost))

    def _cascade_ended(self, message: m.CascadeEnded | m.CascadeDeferred) -> None:
        if message.epoch != self.epoch:
            self._load_completions.release(message.slots)
            return
        self.slots.unpin(message.slots)
        self._unhold(message.keys, message.slots)

    def _ask_stored(self, message: m.AskStored) -> None:
        tier, pins = message.tier, self.slots.pins
        is_cut_off = not self._cascades.takers >> tier & 1
        self.reply(
            {
                key: self._directory.knows(key, tier)
                or (False if is_cut_off or self._slot_of.get(key) not in pins else None)
                for key in message.keys
            }
        )

    # --- failed fills, and leases ---

    def _fill_failed(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Free slots that their writer released without filling them."""
        for slot in slots:
            self.slots.fail_fill(slot)
        self._not_filled(keys)

    def _not_filled(self, keys: Sequence[Key]) -> None:
        """Make keys ABSENT whose fill has failed."""
        for key in keys:
            self.slots.unbind(key)
            self._cascades.forget(key)
            self.request_tiers.forget(key)
        if keys:
            self._events.add(EventKind.LAPSED, keys)
            self.policy.post(m.Gone(keys=tuple(keys)))

    def _end_leases(self, request: RequestId, keys: Sequence[Key] | None = None) -> None:
        self._unhold(*self.promotions.end_leases(request, keys))

    def _unhold(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Notify the policy which of ``keys`` may be evicted now."""
        loose = keys
        if not self.slots.are_evictable(slots):
            both = zip(keys, slots, strict=True)
            loose = [key for key, slot in both if self.slots.are_evictable((slot,))]
        if loose:
            self.policy.post(m.Unheld(tuple(loose)))

    def _slots_of(self, keys: Sequence[Key]) -> list[int]:
        """Return each key's slot, in any state; None, which is never a slot, for no slot."""
        return cast("list[int]", list(map(self._slot_of.get, keys)))

    # --- requests ---

    def _request_started(self, message: m.RequestStarted) -> None:
        tiers = self.request_tiers.start(message) & self._cascades.all_tiers
        apart = tiers & self.request_tiers.tiers != 0
        search = self._directory.start(message.request, tiers, apart=apart)
        self._requests[message.request] = Request(search)
        self._prefixes.start(message.request)

    def _request_finished(self, message: m.RequestFinished) -> None:
        request = self._requests.pop(message.request, None)
        if request is not None:
            request.count(self.counts)
            self._end_reservations(message.request, request)
            self._directory.end(message.request)
            self._prefixes.end(message.request)
            ended = wire.RequestEnded(request=message.request, order=message.order)
            for listener in (*self._policies, *self.links):
                listener.post(ended)
            self.request_tiers.end(message.request)

    def _requests_scheduled(self, message: m.RequestsScheduled) -> None:
        for name in message.requests:
            if (request := self._requests.get(name)) is not None:
                self._end_reservations(name, request)

    def _end_reservations(self, name: RequestId, request: Request) -> None:
        """End all reservations for a request that no longer waits."""
        if self.promotions.has_unsent:
            self._fill_failed(*self.promotions.call_off(name))
        tiers = self.promotions.tiers_asked_for(name)
        unwanted = self._directory.stop_waiting(name)
        for tier in range(len(self.links)) if unwanted else tiers:
            self.links[tier].post(m.Withdraw(name, unwanted))
        if self.slots.leased:
            self._end_leases(name)
        self._lookups.end_wait(request)
        request.end_reservation()

    # --- steps, time, resets ---

    def _step_end(self, message: m.StepEnd) -> None:
        self.slots.forget_hits()
        if message.ticks:
            self._pass_time(message.now)
        self._step_requests.end_step(self.epoch)

    def _tick(self, message: wire.Tick) -> None:
        self._pass_time(message.now)
        self._step_requests.tick(self.epoch)

    def _pass_time(self, now: float) -> None:
        self.promotions.pass_time(now)
        if now - self._policy_time >= POLICY_TIME_S:
            self._policy_time = now
            for policy in self._policies:
                policy.post(wire.Tick(now=now))
        # Before any work: links count deadlines from the last Tick, which may be long ago.
        for link in self.links:
            link.post(wire.Tick(now=now))
        for request in self.promotions.expired():
            self._end_leases(request)
            self._requests[request].end_reservation()

    def _reset(self, message: m.Reset) -> None:
        for slot in self.promotions.reset():
            self.slots.fail_fill(slot)
        for request in self._requests.values():
            request.reset()
        self.slots.reset(self._gpu_loads.reset(self._slot_of))
        self._cascades.reset()
        self.account.reset()
        self._directory.reset()
        for link in self.links:
            link.post(m.Withdraw(None))
        self.epoch += 1
        self.request_tiers.reset(self.epoch)
        self._load_completions.begin_epoch(self.epoch)
        if message.mark is not None:
            self._since = self.epoch
            self._directory.forget_all()
            for link in self.links:
                link.post(wire.GenerationBegan(self.epoch, message.mark))
        self.policy.post(m.Cleared())
        self._events.add(EventKind.CLEARED)

    # --- reports of links ---

    def _presence_learned(self, message: m.PresenceLearned) -> None:
        if message.since == self._since:
            self._directory.learn(message.tier, message.added, message.removed)
            self.account.on_stored(message.added, message.tier)
            if message.removed:
                now = self.promotions.now
                if message.for_room:
                    self.account.on_tier_evicted(message.removed, message.tier, now)
                else:
                    self.account.on_gone(message.removed, message.tier, "gone", now)

    def _link_failed(self, message: m.LinkFailed) -> None:
        """Give up all fills from the tier; its release of the slots will never be reported."""
        self._cascades.cut_off(message.tier)
        self._directory.set_usable(message.tier, usable=False)
        self._directory.give_up(message.tier)
        self._fill_failed(*self.promotions.call_off_tier(message.tier))
        for key, slot in list(self._slot_of.items()):
            if self.slots.tier_fills.get(slot) == message.tier:
                self.promotions.on_lost(key, slot)
                self.slots.quarantine(slot, 1)
                self._not_filled((key,))
