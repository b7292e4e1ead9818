"""vLLM's ``OffloadingManager``, answered by kvtier's facade.

Every method of the interface in vLLM 0.32 and 0.33. All of them run on vLLM's
scheduler thread; tiers work on threads of their own and never enter here, so
the lock that 0.33 asks for is an empty one.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.core.block_state import BlockState
from kvtier.core.events import PRIMARY, Event, EventKind
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.settings.plugins import backend_class
from kvtier.vllm.groups import (
    Groups,
    Orders,
    Pass,
    in_token_order,
    positions_of,
    warn_without_positions,
)
from kvtier.vllm.metrics import MetricsExporter
from kvtier.vllm.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        LoadStoreSpec,
        OffloadingMetricMetadata,
        OffloadingSpec,
        ScheduleEndContext,
    )

    from kvtier.core.messages import RequestOrder, StoreGrant
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
    from kvtier.vllm.region import Region

_MEANING: Final = {
    BlockState.ABSENT: LookupResult.MISS,
    BlockState.PROBING: LookupResult.RETRY,
    BlockState.FILLING: LookupResult.HIT_PENDING,
    BlockState.READY: LookupResult.HIT,
}
# A tuple: hashing an enum's member for a dict costs more than the rest of a lookup.
_RESULTS: Final = tuple(_MEANING[state] for state in BlockState)

SPIN_S: Final = 0.001
"""Steps that follow one another this fast compute nothing."""

SPIN_YIELD_S: Final = 0.0005

_TELLS_WHEN_FLUSHED: Final = hasattr(OffloadingManager, "on_reset_flushed")
"""vLLM 0.33 says when workers have let go of what they had at a reset; 0.32 doesn't."""


class _Tier:
    """What vLLM wants to know of one secondary tier."""

    def __init__(self, config: TierConfig) -> None:
        self.name = config.name
        self.medium = Medium(backend_class(config.type).medium)
        self.locality = None if config.locality is None else Locality(config.locality)
        self.hit_source = CacheHitSource.HOST if self.medium is Medium.CPU else CacheHitSource.DISK


class KVTierManager(OffloadingManager):  # type: ignore[misc]  # vllm has no stubs
    """One engine's manager. Scheduler thread only."""

    def __init__(
        self,
        facade: SchedulerFacade,
        config: RuntimeConfig,
        spec: OffloadingSpec,
        definitions: Mapping[str, OffloadingMetricMetadata],
        memory: SlotMemory,
        region: Region,
    ) -> None:
        warn_without_positions()
        self.facade = facade
        self._lookup_state = facade.lookup_state  # called for each key
        self._memory = memory
        self._region = region
        self._unlinked = False
        self._info = getattr(spec, "cpu_info", None)  # vLLM 0.33
        self._tiers = [_Tier(tier) for tier in config.tiers]
        self._several_groups = len(spec.config.groups) > 1
        chunk_blocks = int(spec.blocks_per_chunk)
        self._groups = Groups(
            {
                group.group_id.to_bytes(GROUP_BYTES, "big"): group.tokens_per_block * chunk_blocks
                for group in spec.config.groups
            }
        )
        self._chunk_tokens = max(1, spec.config.groups[0].tokens_per_block * chunk_blocks)
        wants_requests = any(tier.request_level for tier in config.tiers)
        self._context = RequestOffloadingContext(
            policy=OffloadPolicy.REQUEST_LEVEL if wants_requests else OffloadPolicy.CHUNK_LEVEL
        )
        self._watch = Watch()
        self._metrics = MetricsExporter(facade, config, definitions, self._watch)
        self._is_idle = True  # no step has ended
        # A step that is scheduled has been executed when as many more have been
        # scheduled as the engine keeps in flight: two with async scheduling, one
        # a pipeline stage. Twice that, and one more, is on the safe side.
        self._flush_steps = 2 * max(2, int(spec.config.parallel.pp_size)) + 1
        self._flush_steps_left = 0
        self._last_step = 0.0
        # What this step has found out: answers to one request's lookups, sources of blocks.
        self._ahead: dict[bytes, LookupResult] = {}
        self._ahead_of: ReqContext | None = None
        self._sources: dict[str, Mapping[bytes, int]] = {}
        self._orders = Orders(None if self._several_groups else self._chunk_tokens)
        self._granted: dict[str, list[StoreGrant]] = {}  # stores under way, by request
        self._undecided: set[str] = set()  # requests that have looked up, and may wait
        self._loading: list[str] = []  # requests that began a load in this step
        self._passes: dict[str, Pass] = {}  # of this step, where there are several groups
        self._refused: set[str] = set()  # requests that a prefix had no room for in the last step

    # --- requests ---

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        allows = req_context.load_tier_filter.allows
        tiers = sum(
            1 << number
            for number, tier in enumerate(self._tiers)
            if allows(tier.medium, tier.locality)
        )
        self.facade.on_request_started(req_context.req_id, tiers=tiers)
        return self._context

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._ahead_of = None
        self._sources.pop(req_context.req_id, None)
        self._undecided.discard(req_context.req_id)
        self._refused.discard(req_context.req_id)
        self._orders.end(req_context.req_id)
        self.facade.on_request_finished(req_context.req_id, self._order(req_context))

    def _order(self, req_context: ReqContext) -> Collection[bytes]:
        """Return all keys of a request from head to tail."""
        positions = positions_of(req_context)
        if self._several_groups:  # they come one after the other
            return in_token_order(positions, positions)
        return positions

    def _untold(self, req_context: ReqContext) -> RequestOrder | None:
        """Return what is new in the order of a request's keys since this was last asked."""
        return self._orders.untold(req_context.req_id, positions_of(req_context))

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

    def _look_ahead(self, key: bytes, req_context: ReqContext) -> None:
        """Look up all that vLLM will ask for next, in one go.

        Within a step a HIT stays one; what was under way is asked for again in
        the next step. vLLM asks from head to tail up to the first MISS, one
        request after the other.
        """
        self._undecided.add(req_context.req_id)
        # The first one by itself: most often it is a MISS, and there is nothing ahead.
        first = self._lookup_state(key, req_context.req_id)
        self._ahead = {key: _RESULTS[first]}
        self._ahead_of = req_context
        if first is BlockState.ABSENT:
            return
        rest = self._keys_behind(key, req_context)
        if rest:
            states = self.facade.lookup_states(rest, req_context.req_id)
            self._ahead.update(zip(rest, map(_RESULTS.__getitem__, states), strict=False))

    def _lookup_in_groups(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Tell where the block is. What is promoted is decided when vLLM has asked for all."""
        request, end_of = req_context.req_id, positions_of(req_context)
        asked = self._passes.get(request)
        if asked is None:
            self._undecided.add(request)
            asked = self._passes[request] = Pass(self._groups, end_of)
        if end_of.get(key, 1) % self._groups.chunk_tokens.get(key[-GROUP_BYTES:], 1):
            return _RESULTS[self._lookup_state(key, request)]  # a partial tail: one block a group
        state = self.facade.survey(key, request)
        asked.note(key, state)
        return _RESULTS[state]

    def _reserve_prefixes(self) -> None:
        """Promote what requests wait for that are waiting still, in vLLM's order."""
        passes, self._passes = self._passes, {}
        for request, asked in passes.items():
            was_refused = request in self._refused
            self._refused.discard(request)
            if request not in self._undecided or not (was_refused or asked.waits_for_blocks()):
                continue
            if not self.facade.reserve_prefix(asked.wanted(), request) and not was_refused:
                self._refused.add(request)

    def _keys_behind(self, key: bytes, req_context: ReqContext) -> list[bytes]:
        """Return the request's keys behind ``key``, in order; none if it is not one of them.

        Those that its ``max_load_tokens`` allows: vLLM asks for no others.
        """
        keys = list(positions_of(req_context))
        try:
            first = keys.index(key)
        except ValueError:
            return []
        end = None
        params = req_context.kv_transfer_params
        if params:
            tokens = params.get("max_load_tokens")
            if type(tokens) is int and tokens >= 0:  # vLLM takes nothing else for a cap
                end = first + max(1, tokens // self._chunk_tokens)
        return keys[first + 1 : end]

    @override
    def get_load_source(self, key: bytes, req_context: ReqContext) -> CacheHitSource:
        sources = self._sources.get(req_context.req_id)
        if sources is None:
            sources = self.facade.load_sources(req_context.req_id)
            self._sources[req_context.req_id] = sources
        tier = sources.get(key)
        return CacheHitSource.HOST if tier is None else self._tiers[tier].hit_source

    @override
    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        request = req_context.req_id
        self._loading.append(request)
        if not self._several_groups:
            loaded = self.facade.prepare_load(keys, request, order=self._untold(req_context))
            return CPULoadStoreSpec(loaded)
        ordered = in_token_order(keys, positions_of(req_context))
        loaded = self.facade.prepare_load(ordered, request, order=self._untold(req_context))
        slots = dict(zip(ordered, loaded, strict=True))
        return CPULoadStoreSpec([slots[key] for key in keys])

    @override
    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        # vLLM's connector drops the completions of what was begun before a reset.
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
        if req_context.req_id in self._undecided:  # resumed: no ``ScheduleEndContext`` names it
            self._note_decided((req_context.req_id,))
        cuts = None
        offered = keys
        if self._several_groups:
            end_of = positions_of(req_context)
            offered = ordered = in_token_order(keys, end_of)
            cuts = self._groups.cuts(ordered, end_of)
        order = self._untold(req_context)
        grant = self.facade.prepare_store(offered, req_context.req_id, cuts=cuts, order=order)
        if grant is None:
            return None
        granted, slots = grant.keys, grant.slots
        if granted:
            self._granted.setdefault(req_context.req_id, []).append(grant)
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
        # As for loads: vLLM's connector drops what was begun before a reset.
        request, epoch = req_context.req_id, self.facade.epoch
        grant = self._grant_of(keys, request)
        if grant is not None:
            # From head to tail: vLLM reports them as a set.
            keys = grant.keys if len(grant.keys) == len(keys) else keys
            epoch = grant.epoch
        self.facade.complete_store(keys, request, success=success, epoch=epoch)

    def _grant_of(self, keys: Collection[bytes], request: str) -> StoreGrant | None:
        """Return the grant that a store ends with, which is under way no longer."""
        grants = self._granted.get(request, [])
        for index, grant in enumerate(grants):
            if grant.keys[0] in keys:
                del grants[index]
                if not grants:
                    del self._granted[request]
                return grant
        return None

    # --- steps ---

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._is_idle = False
        self._ahead_of = None
        self._sources.clear()
        self._note_decided(
            [*context.new_req_ids, *self._loading, *(context.preempted_req_ids or ())]
        )
        self._loading.clear()
        if self._passes:
            self._reserve_prefixes()
        self.facade.step_end()
        self._yield_if_spinning()
        if not self._unlinked:
            self._unlinked = self._region.try_unlink()
        if self._flush_steps_left:
            self._flush_steps_left -= 1
            if not self._flush_steps_left:
                self.facade.on_reset_flushed()

    def _note_decided(self, requests: Iterable[str]) -> None:
        """End what was reserved for requests that run now. Those that wait keep theirs.

        What they did not load by now another connector brought, or they compute it.
        """
        decided = self._undecided.intersection(requests)
        if decided:
            self._undecided -= decided
            self.facade.on_requests_scheduled(decided)

    def _yield_if_spinning(self) -> None:
        """Let tiers' threads run while the engine steps without any work of its own.

        An in-process engine spins while requests wait for a promotion, and
        holds the GIL for Python's switch interval (5 ms) each time a tier's
        thread needs it. A step that computes takes longer than ``SPIN_S``.
        """
        now = time.monotonic()
        if now - self._last_step < SPIN_S and self.facade.has_pending_work():
            time.sleep(SPIN_YIELD_S)
            now = time.monotonic()
        self._last_step = now

    @override
    def has_pending_work(self) -> bool:
        # An engine that nobody asks anything steps once for this, and so reports its first
        # statistics: all counters are there, at 0, before any of them counts anything.
        return self._is_idle or self._flush_steps_left > 0 or self.facade.has_pending_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._watch.safely("events", self._all_events) or []

    def _all_events(self) -> list[OffloadingEvent]:
        return list(self._translated(self.facade.take_events()))

    def _translated(self, events: Sequence[Event]) -> Iterator[OffloadingEvent]:
        for event in events:
            if event.kind is EventKind.CLEARED:
                continue  # vLLM announces a reset itself
            removed = event.kind is EventKind.REMOVED
            if event.tier == PRIMARY:
                yield OffloadingEvent(keys=list(event.keys), medium=Medium.CPU, removed=removed)
            else:
                tier = self._tiers[event.tier]
                yield OffloadingEvent(
                    keys=list(event.keys),
                    medium=tier.medium,
                    removed=removed,
                    locality=tier.locality,
                    ownership=tier.name,
                )

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._watch.safely("metrics", self._metrics.take)

    # --- resets and the end ---

    @override
    def reset_cache(self) -> None:
        self._ahead_of = None
        self._sources.clear()
        self.facade.reset()
        self._undecided.clear()
        self._passes.clear()
        self._refused.clear()
        self._granted.clear()  # their completions will not come any more
        if not _TELLS_WHEN_FLUSHED:
            self._flush_steps_left = self._flush_steps

    def on_reset_flushed(self) -> None:
        """Release what workers had in use at the last reset (called by vLLM 0.33)."""
        self.facade.on_reset_flushed()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guard nothing: no thread but the scheduler's ever enters (asked for by vLLM 0.33)."""
        return nullcontext()

    def config_info(self) -> list[dict[str, Any]]:
        """Return the labels of vLLM 0.33's info metric, one mapping a tier."""
        return self._watch.safely("config_info", self._labels) or [{}]

    def _labels(self) -> list[dict[str, Any]]:
        primary = {} if self._info is None else dict(self._info.as_config_info())
        return [{**primary, "tier": "0:primary"}, *({"tier": tier.name} for tier in self._tiers)]

    @override
    def shutdown(self) -> None:
        if self.facade.close():
            self._memory.release()
            self._region.close()
        else:
            # A hung tier may still touch the slots. Without a name, the memory
            # goes with the process.
            self._region.try_unlink()
