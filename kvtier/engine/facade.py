"""The scheduler's interface to kvtier: synchronous calls that never wait for a tier.

Each call turns into a message to the primary tier, and the engine cell is run
to quiescence on the calling thread. All methods belong to one thread at a
time (vLLM's scheduler thread); none may be called from a tier.

A scheduler's step looks like this::

    facade.on_request_started("r1")
    if facade.lookup_prefix(keys, "r1") is None:   # a tier lookup or load is running
        ...                                        # look up again in the next step
    slots, epoch = facade.prepare_load(keys[:hits], "r1"), facade.epoch
    ...                                            # the worker copies slots → GPU
    facade.complete_load(keys[:hits], "r1", epoch=epoch)
    grant = facade.prepare_store(new_keys, "r1")
    ...                                            # the worker copies GPU → grant.slots
    facade.complete_store(grant.keys, "r1", epoch=grant.epoch)
    facade.on_requests_scheduled(["r1"])           # all that were scheduled in this step
    facade.step_end()
    ...
    facade.on_request_finished("r1")
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, cast

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.block_state import ANSWERS, BlockState
from kvtier.core.messages import Lookup, ReservePrefix, Survey
from kvtier.core.statistics import (
    Observations,
    Observed,
    RequestReport,
    Statistics,
    TierObservations,
)
from kvtier.core.tier_host import close_tiers
from kvtier.engine.cell import NO_REPLY, ClosedCell, EngineCell
from kvtier.engine.closing import Closing
from kvtier.engine.primary.lookups import ABSENT, READY
from kvtier.errors import Misuse
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from kvtier.core.events import Event
    from kvtier.core.generations import Generations
    from kvtier.core.messages import GroupKeys, TokenPlace
    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message
    from kvtier.engine.link.tier_health import TierRecord
    from kvtier.engine.link.tier_link import TierLink
    from kvtier.engine.primary.primary_tier import PrimaryTier
    from kvtier.plugin_api.keys import Key, RequestId, TierSet

ALL_TIERS: Final = -1
"""A request's ``tiers`` if every tier may serve it."""

TICK_S: Final = 0.1
"""How often idle tiers get a Tick, and all tiers while lookups return None and no step ends.

Rarely, since a Tick also sends the step's probes, which are better sent together.
"""


# A tuple: hashing an enum's member for a dict costs more than the rest of a lookup.
_ANSWER_OF: Final = tuple(ANSWERS[state] for state in BlockState)


class SchedulerFacade:
    """The synchronous face of one runtime. Build it with ``kvtier.open_runtime``."""

    def __init__(
        self,
        cell: EngineCell,
        primary: PrimaryTier,
        links: Sequence[TierLink],
        tiers: Sequence[TierHost],
        *,
        close_timeout_s: float,
        generations: Generations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cell: EngineCell = cell
        cell.tell_time(clock, [link.time for link in links])
        self._primary = primary
        self._links = links
        self._tiers = tiers
        self._close_timeout_s = close_timeout_s
        self._generations = generations
        self._clock = clock
        self._closed = False
        self._closing: Closing | None = None
        self._is_quiet = False
        self._is_first_lookup = True
        self._lookup_seconds: Observed[float] = Observed()
        self._last_tick = clock()
        self._ended_with = -1  # the cell's activity when a step last ended
        self._rests = False  # whether nothing was left to do then
        self._idle_ticks = 0  # step ends that the cell counts as activity, but changed nothing
        self._ask(wire.Tick(now=self._last_tick))
        self._wake_tiers()  # they receive the generation of weights that they serve

    # --- requests ---

    def on_request_started(
        self, request: RequestId, *, tiers: TierSet = ALL_TIERS, params: bytes = b"", peer: str = ""
    ) -> None:
        """Begin a request. ``tiers``: one bit for each tier that may serve it.

        ``params``: MessagePack of a mapping, for request-scoped tiers; requests without it are not
        sent to them. ``peer``: the address that it loads from; failures count against that address.
        """
        self._cell.ask(self._primary, m.RequestStarted(request, tiers, params, peer))

    @property
    def has_request_scoped_tiers(self) -> bool:
        """Whether there is a tier that serves only requests with parameters for it."""
        return self._primary.request_tiers.tiers != 0

    def on_request_finished(self, request: RequestId, order: Iterable[Key] | None = None) -> None:
        """End a request: it looks up, loads and stores nothing more.

        Completions of its loads and stores may still follow. Its promoted blocks may
        be evicted now. ``order``: all its keys from head to tail, including those
        that were found in the GPU and so not read from here. Eviction policies
        count it as a use of them all.
        """
        keys = None if order is None else tuple(order)
        self._ask(m.RequestFinished(request=request, order=keys))

    def on_requests_scheduled(self, requests: Iterable[RequestId]) -> None:
        """Note that these running requests' loads, if any, are decided.

        Their reservations end: leases of promoted blocks that they did not
        load, promotions and probes that were not sent yet. Call it before ``step_end``;
        not for waiting requests: their lookups returned None, or they were not scheduled.
        A preempted request may look up again.
        """
        self._ask(m.RequestsScheduled(requests=tuple(requests)))

    # --- lookups ---

    def lookup_state(self, key: Key, request: RequestId) -> BlockState:
        """Return the block's state; may start lookups and loads at tiers.

        READY holds until the step ends: ``prepare_load`` in this step succeeds.
        PROBING and FILLING end by the tiers' deadlines, whatever tiers do.
        An unknown request is never served from a tier.
        """
        if self._is_first_lookup:
            state = self._timed_lookup(Lookup(key, request))
        else:
            state = self._cell.ask(self._primary, Lookup(key, request))
        if state is READY:
            return READY
        if state is ABSENT or state is NO_REPLY:
            return ABSENT
        self._let_time_pass()
        return cast("BlockState", state)

    def lookup(self, key: Key, request: RequestId) -> bool | None:
        """Return True (readable), False (nowhere), or None (look up again in the next step)."""
        return _ANSWER_OF[self.lookup_state(key, request)]

    @property
    def decides_loads(self) -> bool:
        """Whether kvtier can decide now that a request computes blocks that tiers have.

        If so, the first lookup of a request should cover all its keys, with their ``place``.
        """
        return self._primary.decisions.wants_places

    @property
    def decides_by_speed(self) -> bool:
        """Whether the engine's speed, once it is known, decides what requests load."""
        return self._primary.decisions.decides

    def on_step_computed(self, tokens: int, attention: int, seconds: float | None) -> None:
        """Report the prompt tokens that a step computed, so that the engine's speed is learnt.

        ``seconds``: since the step before; None if the engine was idle for some of it.
        ``attention``: the sum over requests of ``n² + 2 n c``, for ``n`` tokens computed behind
        ``c``. Steps that compute no prompt may be left out after the first of them.
        """
        self._ask(m.StepComputed(tokens, attention, seconds))

    def lookup_states(
        self, keys: Collection[Key], request: RequestId, place: TokenPlace | None = None
    ) -> list[BlockState]:
        """Do ``lookup_state`` for ``keys``, from head to tail, in one go: several times cheaper.

        Returns their states from the first on, perhaps of fewer: no key behind
        the first ABSENT is looked up, nor one that ``lookup_state`` must make room for.

        Given ``place``, it decides, once for each wait of a request, how many of the tiers'
        blocks are worth loading: blocks that are computed sooner are ABSENT.
        """
        if self._is_first_lookup:
            self._begin_lookups()
        started = time.perf_counter()
        now = 0.0 if place is None else self._clock()
        states = self._ask(m.LookupPrefix(tuple(keys), request, place, now))
        if states is NO_REPLY:
            return []
        found = cast("list[BlockState]", states)
        if found:
            self._lookup_seconds.add((time.perf_counter() - started) / len(found))
            if BlockState.PROBING in found or BlockState.FILLING in found:
                self._let_time_pass()
        return found

    def lookup_prefix(self, keys: Sequence[Key], request: RequestId) -> int | None:
        """Return how many of ``keys``, from the first on, are readable now.

        None: not known yet, look up again in the next step. Keys behind the
        first that is nowhere are not looked up.
        """
        states = self.lookup_states(keys, request)
        while ABSENT not in states[-1:] and len(states) < len(keys):
            states.append(self.lookup_state(keys[len(states)], request))
        hits = states[:-1] if ABSENT in states[-1:] else states
        return len(hits) if all(state is READY for state in hits) else None

    def survey(self, key: Key, request: RequestId) -> BlockState:
        """Return a block's state, for a request whose keys belong to several KV-cache groups.

        Like ``lookup_state``, but nothing is promoted: FILLING also means that a tier has
        the block. At the step's end ``reserve_prefix`` promotes the blocks that the request
        needs; from then on FILLING has its usual meaning.
        """
        if self._is_first_lookup:
            state = self._timed_lookup(Survey(key, request))
        else:
            state = self._cell.ask(self._primary, Survey(key, request))
        return ABSENT if state is NO_REPLY else cast("BlockState", state)

    def reserve_prefix(
        self,
        groups: Sequence[GroupKeys],
        request: RequestId,
        first_token: int | None = None,
    ) -> int:
        """Promote and lease the blocks of the longest prefix, across groups, that has room.

        Returns its tokens: all blocks that it needs are READY or will be, and stay
        until the request's decision ends. 0: there is no room for any, no block is
        found, tier lookups are still running, or a prefix was reserved before. Given
        ``first_token``, before which the GPU has all, also: computing it is faster.
        """
        now = 0.0 if first_token is None else self._clock()
        tokens = self._ask(ReservePrefix(tuple(groups), request, first_token, now))
        return 0 if tokens is NO_REPLY else cast("int", tokens)

    def load_sources(self, request: RequestId) -> Mapping[Key, int]:
        """Return the request's blocks that tiers delivered to it: key → the tier's number.

        All other READY blocks were in the primary tier anyway.
        """
        sources = self._ask(m.LoadSources(request=request))
        return {} if sources is NO_REPLY else cast("dict[Key, int]", sources)

    def report(self, request: RequestId) -> RequestReport | None:
        """Return a running request's loads, waits and latest miss; None for an unknown one."""
        report = self._ask(m.AskReport(request))
        return None if report is NO_REPLY else cast("RequestReport | None", report)

    # --- GPU loads ---

    def prepare_load(
        self,
        keys: Collection[Key],
        request: RequestId,
        *,
        order: m.RequestOrder | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> list[int]:
        """Pin blocks and return their slots, in order. They stay until ``complete_load``.

        ``order``: as for ``prepare_store``. ``tokens``: the prompt tokens that are not computed, as
        they are loaded: from the first, to before the second.
        Raises ``Misuse`` unless ``lookup`` returned True for each key in this step.
        """
        slots = self._ask(m.PrepareLoad(tuple(keys), request, order, tokens))
        if slots is None or slots is NO_REPLY:
            ready = self._primary.resident()
            missing = next((key for key in keys if key not in ready), b"")
            raise Misuse(
                f"prepare_load for request {request!r}: block {missing.hex()} is not readable. "
                "Call it only for keys for which lookup() returned True in the same step."
            )
        return cast("list[int]", slots)

    def complete_load(
        self, keys: Collection[Key], request: RequestId, *, epoch: int | None = None
    ) -> None:
        """Unpin blocks that the GPU has read. Blocks that aren't pinned are counted and ignored.

        ``epoch``: its value at ``prepare_load``; the completion of a load from before a reset is
        then ignored. None: the current one, for callers that drop such completions themselves.
        """
        began = self.epoch if epoch is None else epoch
        self._ask(m.CompleteLoad(tuple(keys), request, began))

    # --- GPU stores ---

    def prepare_store(
        self,
        keys: Collection[Key],
        request: RequestId,
        *,
        cuts: Sequence[int] | None = None,
        order: m.RequestOrder | None = None,
    ) -> m.StoreGrant | None:
        """Allocate slots to the new ones of ``keys``, evicting as needed.

        ``keys``: from head to tail. The grant names the keys to store, which
        may be fewer: resident keys, keys below ``store_threshold`` and the
        tail that has no room are left out. None: no room for even one; try
        again in a later step. ``cuts``, growing: how many of ``keys`` are useful
        without those behind them, if keys of several KV-cache groups belong
        together; None: any number, and each needs all before it. Keys that fit no memory of this
        size get an empty grant.
        ``order``: the keys of the request by token position, including those that the GPU has,
        from a number on; while it runs, a block of it is evicted after those behind it.
        A request that passes it once passes it always; else it is taken from the calls' ``keys``.
        """
        some = None if cuts is None else tuple(cuts)
        grant = self._ask(m.PrepareStore(tuple(keys), request, some, order))
        return None if grant is NO_REPLY else cast("m.StoreGrant | None", grant)

    def complete_store(
        self,
        keys: Collection[Key],
        request: RequestId,
        *,
        success: bool = True,
        epoch: int | None = None,
        kept: Collection[Key] = (),
    ) -> None:
        """Make stored blocks readable and cascade them; or, without success, drop them.

        ``epoch``: that of the grant; the completion of a store from before a reset is ignored.
        None: the current one, for callers that drop such completions themselves.
        ``kept``: those of ``keys`` that stay in host memory: they are never sent to a tier.
        """
        granted = self.epoch if epoch is None else epoch
        self._ask(m.CompleteStore(tuple(keys), request, success, granted, tuple(kept)))

    def touch(self, keys: Collection[Key], request: RequestId) -> None:
        """Note that blocks were used, from head to tail, though perhaps not read from here."""
        self._ask(m.Touch(keys=tuple(keys), request=request))

    # --- host memory that is only passed through (``kvtier/engine/staged/staged_facade.py``) ---

    def promote(self, keys: Collection[Key], request: RequestId) -> list[BlockState | None] | None:
        """Have ``keys`` loaded, independently of one another; return their states.

        READY: ``prepare_load`` may follow at once. None for a block: there is no room for it now.
        None: the primary tier broke.
        """
        states = self._ask(m.PromoteKeys(tuple(keys), request))
        return None if states is NO_REPLY else cast("list[BlockState | None]", states)

    def are_stored(self, keys: Collection[Key], tier: int) -> dict[Key, bool | None] | None:
        """Return whether the tier has the blocks. None for a block: it may be storing it.

        None: the primary tier broke.
        """
        stored = self._ask(m.AskStored(tuple(keys), tier))
        return None if stored is NO_REPLY else cast("dict[Key, bool | None]", stored)

    def discard(self, keys: Collection[Key]) -> None:
        """Evict these blocks now, but not those that are held, or were READY in this step."""
        self._ask(m.Discard(tuple(keys)))

    # --- steps ---

    def step_end(self) -> None:
        """End a step: send the step's probes and promotions, and let deadlines pass."""
        self._is_first_lookup = True
        self._poll_tiers()
        now, cell = self._clock(), self._cell
        has_news = cell.activity != self._ended_with or cell.has_arrivals
        if has_news or not self._rests:
            self._rests = not cell.has_arrivals and self._is_at_rest()
        rests, ticks = self._rests, not self._rests or now - self._last_tick >= TICK_S
        if ticks:
            self._last_tick = now
        else:
            self._primary.promotions.pass_time(now)
            for link in self._links:
                link.pass_time(now)
            if not has_news:  # the usual case: nothing at all has happened in this step
                return
        self._ask(m.StepEnd(now, ticks))
        self._wake_tiers()
        self._rests = rests and not has_news and self._is_at_rest()
        self._idle_ticks += self._rests
        self._ended_with = cell.activity

    def get_finished(self) -> int:
        """Process the tiers' reports; return how many jobs and probes are in flight.

        Every other call processes them as well.
        """
        self._poll_tiers()
        self._cell.run()
        self._wake_tiers()
        return sum(sum(link.in_flight()) for link in self._links)

    def has_pending_work(self) -> bool:
        """Return whether to keep stepping: a job or probe may still end in time."""
        self.get_finished()
        return any(link.serves_others or link.awaited() for link in self._links)

    def has_deferred_stores(self) -> bool:
        """Return whether a tier has deferred stores: steps offer them again when it has room."""
        return any(link.write_backlog.has_deferred for link in self._links)

    def tier_record(self, tier: int, *, stores: bool) -> TierRecord:
        """Return how often a secondary tier's loads, or stores, succeeded and failed."""
        return self._links[tier].record(stores=stores)

    def bypass(self, tier: int, *, stores: bool, is_bypassed: bool) -> None:
        """Stop sending a secondary tier loads, or stores, or resume, as in a replay."""
        self._cell.ask(self._links[tier], m.TierBypassed(stores, is_bypassed))
        self._wake_tiers()

    def evicts(self, tier: int) -> bool:
        """Return whether a secondary tier is bounded, and so reports its evictions."""
        return self._links[tier].tells_uses

    def take_events(self) -> list[Event]:
        """Return the blocks that came or went since the last call, in order for each tier."""
        self._cell.run()
        events = self._primary.drain_events()
        for link in self._links:
            events += link.contents.drain_events()
        return events

    # --- the runtime ---

    @property
    def epoch(self) -> int:
        """The number of resets. Loads and stores begun in an earlier epoch are void."""
        return self._primary.epoch

    def reset(self, *, weights_version: str | None = None, weights_changed: bool = False) -> None:
        """Forget every block of the primary tier, and begin a new generation. Never waits.

        Blocks that were stored before are not served again, from any tier: the
        model's weights may have changed. Blocks that are stored from now on are found by
        this engine only, or, given ``weights_version``, by all that name the same
        weights. With ``on_reset: "keep"`` a reset without a name begins no new generation, and
        tiers serve their blocks, unless ``weights_changed`` is set.

        Slots that the GPU or a tier still uses are quarantined until released: tiers report it,
        ``on_reset_flushed`` does for the GPU. Completions of older loads and stores are
        ignored from now on. Raises ``Misuse`` for an empty name.
        """
        mark = self._generations.begin(weights_version, has_changed=weights_changed)
        self._ask(m.Reset(mark=mark))
        self._wake_tiers()

    def on_reset_flushed(self) -> None:
        """Note that the GPU has released every slot that it was given before the last reset."""
        self._ask(m.ResetFlushed())

    @property
    def activity(self) -> int:
        """Grows whenever anything that can be queried may have changed.

        Only a change that an eviction policy makes by its clock counts with the next one: to export
        all metrics ten times a second costs an engine that only decodes more than its steps do.
        """
        return self._cell.activity - self._idle_ticks

    def statistics(self) -> Statistics:
        """Return a frozen snapshot. Counters grow from the start of the runtime.

        Cheap enough for each step. Backends' counters may be a second old.
        """
        return Statistics(
            primary=self._primary.statistics(),
            tiers=tuple(link.statistics() for link in self._links),
            faults=self._cell.faults,
        )

    def drain_observations(self) -> Observations:
        """Return the individual measurements since the last call, for histograms."""
        tiers = tuple(
            TierObservations(
                probe_seconds=link.probe_seconds.drain(),
                jobs=link.ended_jobs.drain(),
            )
            for link in self._links
        )
        return Observations(
            allocation_sizes=self._primary.account.allocation_sizes.drain(),
            lookup_seconds=self._lookup_seconds.drain(),
            wait_seconds=self._primary.account.wait_seconds.drain(),
            absent_seconds=self._primary.account.absent_seconds.drain(),
            tiers=tiers,
        )

    def begin_to_end(self) -> None:
        """Count what tiers store from now on, for the line that ``close`` logs."""
        if self._closing is None:
            self._closing = Closing(self._primary, self._links, self._clock)

    def close(self) -> bool:
        """End all tiers, waiting at most ``close_timeout_s`` in all. Safe to call twice.

        Returns True if nothing can access the slots any more. False: a tier
        hangs; leave the memory mapped until the process ends.
        """
        if self._closed:
            return self._is_quiet
        self._closed = True
        self.begin_to_end()
        assert self._closing is not None, "begun"
        cell, self._cell = self._cell, ClosedCell()
        quiet = close_tiers(self._tiers, self._close_timeout_s)
        for tier, is_quiet in zip(self._tiers, quiet, strict=True):
            if not is_quiet:
                log.warning(
                    "tier did not stop within close_timeout_s; its slots stay mapped",
                    tier=tier.name,
                )
        self._closing.log_end(cell.take_arrivals())
        self._is_quiet = all(quiet)
        return self._is_quiet

    # --- helpers ---

    def _is_at_rest(self) -> bool:
        """Return whether time may pass without any message: no tier would do anything."""
        promotions = self._primary.promotions
        return not promotions.held_slots and all(link.is_at_rest for link in self._links)

    def _let_time_pass(self) -> None:
        """Bound how long lookups return None, even if ``step_end`` is never called."""
        now = self._clock()
        if now - self._last_tick >= TICK_S:
            self._last_tick = now
            self._poll_tiers()
            self._ask(wire.Tick(now=now))
            self._wake_tiers()

    def _timed_lookup(self, message: Lookup) -> object:
        """Do a lookup and time it: the first one of each step."""
        self._begin_lookups()
        started = time.perf_counter()
        state = self._cell.ask(self._primary, message)
        self._lookup_seconds.add(time.perf_counter() - started)
        return state

    def _begin_lookups(self) -> None:
        """Receive the tiers' messages before a step's first lookup, so that it sees what ended."""
        self._is_first_lookup = False
        self._primary.promotions.begin_lookups(self._clock())
        self._poll_tiers()

    def _wake_tiers(self) -> None:
        """Wake tiers to take the messages sent to them since the last time."""
        for tier in self._tiers:
            tier.wake()

    def _poll_tiers(self) -> None:
        """Receive the tiers' messages. Hosts in threads post theirs by themselves."""
        for tier in self._tiers:
            tier.poll()

    def _ask(self, message: Message) -> object:
        return self._cell.ask(self._primary, message)
