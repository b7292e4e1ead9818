"""Implements vLLM's ``OffloadingManager`` with kvtier's facade.

It has all methods of the interface, of each supported release (``kvtier/vllm/releases.py``).
All of them run on vLLM's scheduler thread; tiers work on threads of their own and never enter here,
so the lock that vLLM may want is an empty one.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.core.block_state import BlockState
from kvtier.core.metrics import PRIMARY_TIER
from kvtier.vllm.hosted.request_params import packed_params, peer_of
from kvtier.vllm.identity.media import MEDIA
from kvtier.vllm.identity.weight_updates import EngineWeights
from kvtier.vllm.releases import (
    LOADS_WHEN_PREEMPTED,
    NOTIFIES_WHEN_FLUSHED,
    positions_of,
    warn_without_positions,
)
from kvtier.vllm.scheduler.grants import OpenGrants
from kvtier.vllm.scheduler.group_lookups import GroupLookups
from kvtier.vllm.scheduler.groups import (
    Groups,
    Parents,
    in_token_order,
)
from kvtier.vllm.scheduler.idle_work import IdleWork
from kvtier.vllm.scheduler.keys_behind import keys_behind
from kvtier.vllm.scheduler.kv_events import DESCRIBED_RESULTS, KVEvents, Place
from kvtier.vllm.scheduler.metrics import MetricsExporter
from kvtier.vllm.scheduler.prefill_steps import PrefillSteps
from kvtier.vllm.scheduler.request_report import RequestReports
from kvtier.vllm.scheduler.requests import EngineRequests
from kvtier.vllm.scheduler.tier_facts import TierFacts
from kvtier.vllm.workarounds.ending import ENDING
from kvtier.vllm.workarounds.guarded_observer import GuardedObserver
from kvtier.vllm.workarounds.resumed import ResumedRequests

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        LoadStoreSpec,
        OffloadingEvent,
        OffloadingMetricMetadata,
        OffloadingSpec,
        ScheduleEndContext,
    )

    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.vllm.hosted.backend import HostingEngine
    from kvtier.vllm.memory.region import Region
    from kvtier.vllm.scheduler.requests import RequestState

_MEANING: Final = {
    BlockState.ABSENT: LookupResult.MISS,
    BlockState.PROBING: LookupResult.RETRY,
    BlockState.FILLING: LookupResult.HIT_PENDING,
    BlockState.READY: LookupResult.HIT,
}
# A tuple: hashing an enum's member for a dict costs more than the rest of a lookup.
_RESULTS: Final = tuple(_MEANING[state] for state in BlockState)

_WHOLE: Final = RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

SPIN_S: Final = 0.001
"""Steps that follow each other this closely compute nothing."""

SPIN_YIELD_S: Final = 0.0005


class KVTierManager(OffloadingManager):  # type: ignore[misc]  # vllm has no stubs
    """One engine's manager. Scheduler thread only."""

    # Slots: among so many attributes in a dict, each would take longer to find.
    __slots__ = (
        "_ahead",
        "_ahead_of",
        "_begin_generation",
        "_chunk_tokens",
        "_close_timeout_s",
        "_context",
        "_describes",
        "_flush_steps",
        "_flush_steps_left",
        "_granted",
        "_group_lookups",
        "_groups",
        "_idle_work",
        "_info",
        "_is_idle",
        "_kv_events",
        "_last_step",
        "_loading",
        "_lookup_state",
        "_memory",
        "_metrics",
        "_must_not_be_offered_again",
        "_parents",
        "_region",
        "_reports",
        "_resumed",
        "_several_groups",
        "_sources",
        "_sources_of",
        "_steps",
        "_tiers",
        "_unlinked",
        "_watch",
        "_weights",
        "facade",
        "requests",
    )

    _ahead_of: ReqContext | None  # whose keys were looked up ahead in this step
    _sources_of: ReqContext | None  # whose load sources were looked up in this step

    def __init__(
        self,
        facade: SchedulerFacade,
        config: RuntimeConfig,
        spec: OffloadingSpec,
        definitions: Mapping[str, OffloadingMetricMetadata],
        memory: SlotMemory,
        region: Region,
        hosting: HostingEngine | None = None,
    ) -> None:
        warn_without_positions()
        self.facade = facade
        self._weights: EngineWeights = getattr(spec, "weights", None) or EngineWeights(None, {})
        self._begin_generation = self._weights.add(self.reset_cache, facade.reset, config)
        self._lookup_state = facade.lookup_state  # called for each key
        self._memory, self._region, self._unlinked = memory, region, False
        self._info = getattr(spec, "cpu_info", None)
        self._close_timeout_s = config.close_timeout_s
        self._tiers = [TierFacts(tier) for tier in config.tiers]
        self._several_groups = len(spec.config.groups) > 1
        self._groups = Groups.of(spec)
        chunk_tokens = spec.config.groups[0].tokens_per_block * int(spec.blocks_per_chunk)
        self._chunk_tokens = max(1, chunk_tokens)
        self._must_not_be_offered_again = self._groups.lose_blocks
        wants_requests = any(tier.request_level for tier in config.tiers)
        self._context = RequestOffloadingContext(
            policy=OffloadPolicy.REQUEST_LEVEL if wants_requests else OffloadPolicy.CHUNK_LEVEL
        )
        self._watch, self._idle_work = GuardedObserver(), IdleWork(facade)
        self._metrics = MetricsExporter(facade, config, definitions, self._watch, hosting)
        self._reports = RequestReports(facade, config)
        events = spec.kv_events_config
        self._describes = events.enable_kv_cache_events and events.self_describing_kv_events
        self._kv_events = KVEvents(
            [
                Place(tier.medium, tier.locality, tier.name, partial(facade.evicts, number))
                for number, tier in enumerate(self._tiers)
            ],
            self_describing=self._describes,
            hashes_a_block=int(spec.blocks_per_chunk) if self._describes else 1,
        )
        if self._describes:  # one more call for each key, which no other engine pays
            self.lookup = self._lookup_described  # type: ignore[method-assign]
        self._is_idle = True  # no step has ended
        # A scheduled step has been executed once as many more have been scheduled
        # as the engine keeps in flight: two with async scheduling, one a pipeline
        # stage. Twice that, and one more, is on the safe side.
        self._flush_steps = 2 * max(2, int(spec.config.parallel.pp_size)) + 1
        self._flush_steps_left, self._last_step = 0, 0.0
        # Found in this step: one request's lookup results, and the sources of one's blocks.
        self._ahead: dict[bytes, LookupResult] = {}
        self._sources: Mapping[bytes, int] = {}
        self._loading: list[str] = []  # requests that began a load in this step
        self._reset_step()
        self._steps = PrefillSteps.of(facade, self._chunk_tokens)
        self._granted, self._parents = OpenGrants(), Parents(self._groups)
        self._resumed = ResumedRequests(are_held_back=not LOADS_WHEN_PREEMPTED)
        self._group_lookups = GroupLookups(facade, self._groups, self._steps)
        tokens = None if self._several_groups else self._chunk_tokens
        self.requests = EngineRequests(self._weights, tokens)

    # --- requests ---

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        tiers = 0
        for number, tier in enumerate(self._tiers):
            if req_context.load_tier_filter.allows(tier.medium, tier.locality):
                tiers |= 1 << number
        self.requests.begin(req_context.req_id)
        params = req_context.kv_transfer_params
        if params and self.facade.has_request_scoped_tiers:
            name, packed, peer = req_context.req_id, packed_params(params), peer_of(params)
            self.facade.on_request_started(name, tiers=tiers, params=packed, peer=peer)
            return _WHOLE  # a tier may want all of it, and reports that only after this call
        self.facade.on_request_started(req_context.req_id, tiers=tiers)
        return self._context

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._ahead_of = self._sources_of = None
        state = self.requests.end(req_context.req_id)
        if state is not None:
            self._steps.on_loaded(state.prompt)
        self._steps.on_idle(time.monotonic(), self.requests.running)
        self.facade.on_request_finished(req_context.req_id, self._order(req_context))

    def _order(self, req_context: ReqContext) -> Collection[bytes]:
        """Return all keys of a request from head to tail."""
        positions = positions_of(req_context)
        if self._several_groups:  # they come one after the other
            return in_token_order(positions, positions)
        return positions

    # --- lookups and loads ---

    @override
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if self._several_groups:
            return self._lookup_in_groups(key, req_context)
        if req_context is not self._ahead_of:
            self._look_ahead(key, req_context)
        result = self._ahead.get(key)
        if result is None:
            return _RESULTS[self._lookup_state(key, req_context.req_id)]
        return result

    def _lookup_described(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Replace ``lookup`` if vLLM describes the blocks that it finds."""
        result = KVTierManager.lookup(self, key, req_context)
        if result in DESCRIBED_RESULTS:
            state = self.requests.of(req_context.req_id)
            parents = self._parents.of(state.chains, positions_of(req_context))
            self._kv_events.describe((key,), parents)
        return result

    def _look_ahead(self, key: bytes, req_context: ReqContext) -> None:
        """Look up all keys that vLLM will look up next, at once.

        Within a step a HIT stays one; a block in flight is looked up again in
        the next step. vLLM looks up from head to tail up to the first MISS, one
        request after the other.
        """
        request, state = req_context.req_id, self.requests.of(req_context.req_id)
        self._ahead_of = req_context
        refusal = self._refusal(state)
        if refusal is not None:
            self._ahead = dict.fromkeys([key, *positions_of(req_context)], refusal)
            return
        self.requests.wait(state)
        place = self._steps.looks_up(state.prompt, key, positions_of(req_context))
        if place is not None and self.facade.decides_loads:
            keys = [key, *keys_behind(key, req_context, self._chunk_tokens)]
            states = self.facade.lookup_states(keys, request, place)
            self._ahead = _results(keys, states)
            if states:
                return
        # The first one by itself: usually it is a MISS, and there is nothing ahead.
        first = self._lookup_state(key, request)
        self._ahead = {key: _RESULTS[first]}
        if first is BlockState.ABSENT:
            return
        rest = keys_behind(key, req_context, self._chunk_tokens)
        if rest:
            states = self.facade.lookup_states(rest, request)
            self._ahead.update(_results(rest, states))

    def _refusal(self, state: RequestState) -> LookupResult | None:
        """Return the result of a request's lookups if it may not load in this step, else None."""
        if not self.requests.may_load(state):
            return LookupResult.MISS
        return None if self._resumed.may_load(state.runs) else LookupResult.RETRY

    def on_request_waits(self, request: str) -> None:
        """Note that vLLM's connector has left a request waiting (``workarounds/resumed.py``)."""
        self._resumed.on_wait(self.requests.of(request).runs)

    def on_request_ends(self, request: Any) -> dict[str, Any] | None:  # noqa: ANN401 - vLLM's
        """Note that vLLM returns a request's last token; return a report for its response."""
        if self.requests.complete(request.request_id):  # no other step need follow
            self._watch.safely("metrics", self._metrics.report_at_once)
        return self._watch.safely("reports", self._reports.at_end, request)

    def _lookup_in_groups(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Look up one key. Promotions are decided when vLLM has looked up all of a request's."""
        state, end_of = self.requests.of(req_context.req_id), positions_of(req_context)
        if state not in self._group_lookups:
            refusal = self._refusal(state)
            if refusal is not None:
                return refusal
            self.requests.wait(state)
            self._group_lookups.begin(state, end_of)
        return _RESULTS[self._group_lookups.look_up(key, state, end_of)]

    @override
    def get_load_source(self, key: bytes, req_context: ReqContext) -> CacheHitSource:
        if req_context is not self._sources_of:
            self._sources = self.facade.load_sources(req_context.req_id)
            self._sources_of = req_context
        tier = self._sources.get(key)
        return CacheHitSource.HOST if tier is None else self._tiers[tier].hit_source

    @override
    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        request, end_of = req_context.req_id, positions_of(req_context)
        state = self.requests.of(request)
        self._loading.append(request)
        self._group_lookups.mark_decided(state)
        tokens = self._steps.on_load(state.prompt, keys, end_of)
        order = state.order.untold(end_of)
        if not self._several_groups:
            slots = self.facade.prepare_load(keys, request, order=order, tokens=tokens)
            return CPULoadStoreSpec(slots)
        ordered = in_token_order(keys, end_of)
        loaded = self.facade.prepare_load(ordered, request, order=order, tokens=tokens)
        slot_of = dict(zip(ordered, loaded, strict=True))
        return CPULoadStoreSpec([slot_of[key] for key in keys])

    @override
    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        state = self.requests.get(req_context.req_id)
        if state is not None:
            self._steps.on_loaded(state.prompt)
        # vLLM's connector drops completions of loads begun before a reset.
        self.facade.complete_load(keys, req_context.req_id, epoch=self.facade.epoch)

    @override
    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        if self._several_groups:
            keys = in_token_order(keys, positions_of(req_context))
        self.facade.touch(keys, req_context.req_id)

    # --- stores ---

    @override
    def prepare_store(
        self, keys: Collection[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._ahead_of = None
        request, end_of = req_context.req_id, positions_of(req_context)
        state = self.requests.of(request)
        if not self.requests.may_store(state):
            return _stores_nothing()
        if self.requests.is_undecided(request):  # resumed: no ``ScheduleEndContext`` names it
            self._note_decided((request,))
        cuts: Sequence[int] | None = None
        offered = keys
        if self._several_groups:
            offered = ordered = in_token_order(keys, end_of)
            cuts = self._groups.cuts(ordered, end_of)
        elif self._groups.have_windows:
            cuts = range(1, len(keys) + 1)
        self._group_lookups.mark_decided(state)
        self._steps.on_offer(state.prompt, offered, end_of)
        order = state.order.untold(end_of)
        grant = self.facade.prepare_store(offered, request, cuts=cuts, order=order)
        if grant is None:
            return _stores_nothing() if self._must_not_be_offered_again else None
        granted, slots = grant.keys, grant.slots
        if granted:
            self._granted.add(request, grant, MEDIA.owned(granted, request, end_of))
            if self._describes:
                self._kv_events.describe(granted, self._parents.of(state.chains, end_of))
        if self._several_groups:  # vLLM takes slots in the order of its offer
            slot_of = dict(zip(granted, slots, strict=True))
            granted = [key for key in keys if key in slot_of]
            slots = [slot_of[key] for key in granted]
        return PrepareStoreOutput(
            keys_to_store=granted,
            store_spec=CPULoadStoreSpec(slots),
            evicted_keys=grant.evicted,
        )

    @override
    def complete_store(
        self, keys: Collection[bytes], req_context: ReqContext, success: bool = True
    ) -> None:
        self._ahead_of = None
        # As for loads: vLLM's connector drops completions of stores begun before a reset.
        request, epoch = req_context.req_id, self.facade.epoch
        grant = self._granted.pop(keys, request)
        if grant is not None:
            # From head to tail: vLLM reports them as a set.
            keys = grant.keys if len(grant.keys) == len(keys) else keys
            epoch = grant.epoch
        kept = self._granted.pop_kept(keys)
        self.facade.complete_store(keys, request, success=success, epoch=epoch, kept=kept)

    # --- steps ---

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._is_idle = False
        self._weights.on_step()
        scheduled = [*context.new_req_ids, *self._loading]
        if scheduled or context.preempted_req_ids:  # most steps only decode
            self._note_decided([*scheduled, *(context.preempted_req_ids or ())])
            self._steps.on_scheduled()
        if self._several_groups:
            self._group_lookups.reserve(self.requests.is_undecided)
        self._resumed.end_step(self.requests.runs_of(scheduled) if scheduled else ())
        self._reset_step()
        self.facade.step_end()
        if self._tiers or self._steps.is_awake:
            self._end_step()
        if not self._unlinked:
            self._unlinked = self._region.try_unlink()
        if self._flush_steps_left:
            self._flush_steps_left -= 1
            if not self._flush_steps_left:
                self.facade.on_reset_flushed()

    def _note_decided(self, requests: Iterable[str]) -> None:
        """End the reservations of requests that run now. Waiting requests keep theirs.

        Blocks not loaded by now were loaded by another connector, or are computed.
        """
        decided = self.requests.pop_decided(requests)
        if decided and (self._tiers or self._several_groups):  # else nothing is ever reserved
            self.facade.on_requests_scheduled(decided)

    def _reset_step(self) -> None:
        """Forget lookup results, load sources and begun loads of this step."""
        self._ahead_of = self._sources_of = None
        self._loading.clear()

    def _end_step(self) -> None:
        """Let tiers' threads run while the engine steps without any work of its own.

        An in-process engine spins while requests wait for a promotion, and
        holds the GIL for Python's switch interval (5 ms) each time a tier's
        thread needs it. A step that computes usually takes longer than ``SPIN_S``.
        """
        now, running = time.monotonic(), self.requests.running
        if self._steps.is_awake:
            self._steps.on_step_end(now, running)
        if not self._tiers:
            return
        spins = not running and now - self._last_step < SPIN_S
        if spins and self.facade.has_pending_work():
            time.sleep(SPIN_YIELD_S)
            now = time.monotonic()
        self._last_step = now

    @override
    def has_pending_work(self) -> bool:
        self._steps.on_idle(time.monotonic(), 0)  # vLLM calls this when it has no request left
        if ENDING.has_lasted(0.0):
            self.facade.begin_to_end()
        return not ENDING.has_lasted(self._close_timeout_s) and (
            self._is_idle  # a first step reports all counters, at 0, before any event
            or self._flush_steps_left > 0
            or self._kv_events.is_behind()
            or self.facade.has_pending_work()
            or self._idle_work.is_there(time.monotonic())
        )

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._watch.safely("events", self._all_events) or []

    def _all_events(self) -> list[OffloadingEvent]:
        return self._kv_events.drain(self._idle_work.take_events())

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._watch.safely(
            "metrics", lambda: self._metrics.collect(is_busy=bool(self.requests))
        )

    # --- resets and the end ---

    @override
    def reset_cache(self) -> None:
        """Empty the primary tier and begin a new generation.

        Running requests store nothing until they are preempted: older weights computed their
        blocks, and vLLM offers blocks again that left a window and now belong to another request.
        """
        self._reset_step()
        self.requests.reset()
        self._begin_generation()
        self._watch.safely("events", lambda: self._kv_events.reset(self._idle_work.take_events()))
        self._resumed.emptied()
        self._group_lookups.clear()
        self._granted.clear()
        if not NOTIFIES_WHEN_FLUSHED:
            self._flush_steps_left = self._flush_steps

    def on_reset_flushed(self) -> None:
        """Release the blocks that workers used at the last reset (``NOTIFIES_WHEN_FLUSHED``)."""
        self.facade.on_reset_flushed()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return an empty lock: only the scheduler's thread ever enters."""
        return nullcontext()

    def config_info(self) -> list[dict[str, Any]]:
        """Return the labels of vLLM's info metric, one mapping per tier."""
        return self._watch.safely("config_info", self._labels) or [{}]

    def _labels(self) -> list[dict[str, Any]]:
        primary = {} if self._info is None else dict(self._info.as_config_info())
        tiers = ({**self._metrics.labels(tier.name), "tier": tier.name} for tier in self._tiers)
        return [{**primary, "tier": PRIMARY_TIER}, *tiers]

    @override
    def shutdown(self) -> None:
        if self.facade.close():
            self._memory.release()
            self._region.close()
        else:
            # A hung tier may still touch the slots. Without a name, the memory
            # is freed when the process ends.
            self._region.try_unlink()


def _results(keys: Sequence[bytes], states: Sequence[BlockState]) -> dict[bytes, LookupResult]:
    """Return the results for the first of the keys, whose states are known."""
    if states and states.count(states[0]) == len(keys):  # usually; in a third of the time
        return dict.fromkeys(keys, _RESULTS[states[0]])
    return dict(zip(keys, map(_RESULTS.__getitem__, states), strict=False))


def _stores_nothing() -> PrepareStoreOutput:
    """Return a result that makes vLLM skip these blocks. After None it offers them again."""
    return PrepareStoreOutput([], CPULoadStoreSpec([]), evicted_keys=[])
