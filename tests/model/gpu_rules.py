"""Rules: the GPU loads blocks, and stores blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes import GpuLoad, GpuStore
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from lookup_rules import LookupRules
from rules import PICKS, SCHEDULES, is_due, pick
from world import PATHS

from kvtier.core.block_state import BlockState
from kvtier.core.messages import RequestOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world import Request

    from kvtier.plugin_api.keys import Key, RequestId


class GpuRules(LookupRules):
    """What a scheduler has its GPU do."""

    # --- GPU loads ---

    @pytest.mark.promise(5)
    @precondition(lambda self: any(each.hits for each in self.world.requests.values()))
    @rule(which=PICKS, count=st.integers(1, 4), schedule=SCHEDULES)
    def a_hit_means_that_prepare_load_in_the_same_step_succeeds(
        self, which: int, count: int, schedule: bytes
    ) -> None:
        """Whatever was called between the lookup and this."""
        world = self.world
        request = pick([each for each in world.requests.values() if each.hits], which)
        keys = list(request.hits)[:count]
        world.in_order(schedule)
        slots = world.facade.prepare_load(keys, request.name, order=self._order(request))
        assert slots == [world.primary.slot_of(key) for key in keys]
        leases = world.primary.audit().promotions.leases.get(request.name, frozenset())
        assert leases.isdisjoint(keys), "what a request reads is not kept for it any more"
        expected = [world.bytes_of[key] for key in keys]
        world.gpu.loads.append(GpuLoad(request.name, keys, slots, expected, world.facade.epoch))
        world.end_leases(request.name, keys)

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_loads_the_prefix_that_is_here(
        self, which: int, count: int, schedule: bytes
    ) -> None:
        """What most steps do."""
        request = self._request(which)
        self.a_request_looks_up_its_prefix(which, count, schedule)
        if request.hits:
            hitting = [each for each in self.world.requests.values() if each.hits]
            self.a_hit_means_that_prepare_load_in_the_same_step_succeeds(
                hitting.index(request), 4, schedule
            )

    @precondition(lambda self: any(not each.is_stale for each in self.world.gpu.loads))
    @rule(which=PICKS, schedule=SCHEDULES)
    def a_load_completes(self, which: int, schedule: bytes) -> None:
        """The GPU has read all of it; its request may be over."""
        world = self.world
        load = pick([each for each in world.gpu.loads if not each.is_stale], which)
        world.gpu.loads.remove(load)
        world.in_order(schedule)
        world.facade.complete_load(load.keys, load.request, epoch=load.epoch)

    # --- GPU stores ---

    @pytest.mark.promise(12)
    @precondition(lambda self: self.world.requests)
    @rule(
        which=PICKS,
        start=st.integers(0, 4),
        count=st.integers(1, 6),
        schedule=SCHEDULES,
    )
    def a_request_prepares_a_store(
        self, which: int, start: int, count: int, schedule: bytes
    ) -> None:
        """Some keys are new, some are here, some are being filled."""
        world = self.world
        request = self._request(which)
        keys = request.path[start : start + count] or request.path[:1]
        before = dict(world.states)
        counts = world.primary.counts
        dropped = counts.stores_dropped
        world.in_order(schedule)
        grant = world.facade.prepare_store(keys, request.name, order=self._order(request))
        # What is here already is deferred before it is decided, and nothing changes afterwards.
        is_later_better = grant is None and self._would_cost_what_waits(request.name, keys)
        if counts.stores_dropped > dropped and not schedule and not is_later_better:
            self._assert_nothing_can_be_evicted(keys)
        if grant is None:
            assert counts.stores_dropped > dropped, "refused and not counted"
            return
        assert len(set(grant.slots)) == len(grant.slots) == len(grant.keys)
        assert [key for key in keys if key in set(grant.keys)] == list(grant.keys)
        for key in grant.evicted:
            assert before[key] is BlockState.READY
            assert world.states[key] is BlockState.ABSENT
            assert key not in keys or schedule, f"{key!r} went for a store that it was offered with"
        for key, slot in zip(grant.keys, grant.slots, strict=True):
            assert before[key] in {BlockState.ABSENT, BlockState.PROBING} or schedule
            data = world.new_bytes(key)
            world.gpu.stores.append(GpuStore(request.name, key, slot, data, grant.epoch))

    def _would_cost_what_waits(self, request: RequestId, keys: Sequence[Key]) -> bool:
        """Tell whether a store would evict what a tier has yet to get of the same request."""
        slots = self.world.slots
        ready = {key for key, slot in slots.slot_of.items() if slots.is_ready(slot)}
        loose = {key for key in ready if slots.slot_of[key] not in slots.pins}
        wanted = [key for key in keys if key not in slots.slot_of]
        of_tiers = self.world.primary.audit().deferred.values()
        waits = [sum(b.request == request for b in of_tier.values()) for of_tier in of_tiers]
        deferred = max(waits, default=0)
        return deferred > 0 and len(wanted) > slots.free_count() + max(0, len(loose) - deferred)

    @precondition(lambda self: self.world.gpu.stores)
    @rule(which=PICKS)
    def the_gpu_writes_a_piece(self, which: int) -> None:
        """At any moment between grant and completion; after a reset, until it is flushed."""
        self.world.gpu.write_piece(pick(self.world.gpu.stores, which))

    @precondition(lambda self: any(not each.is_stale for each in self.world.gpu.stores))
    @rule(which=PICKS, count=st.integers(1, 4), schedule=SCHEDULES)
    def stores_complete(self, which: int, count: int, schedule: bytes) -> None:
        """Their blocks are readable at once."""
        world = self.world
        stores = self._stores_of_one_request(which)[:count]
        for store in stores:
            world.gpu.write_rest(store)
            world.gpu.stores.remove(store)
            world.committed[world.name(store.key)].add(store.data)
        world.in_order(schedule)
        keys, epoch = [each.key for each in stores], stores[0].epoch
        world.facade.complete_store(keys, stores[0].request, epoch=epoch)
        for store in stores:
            assert world.states[store.key] is BlockState.READY
            assert world.bytes_of[store.key] == store.data

    @is_due("fail", 6, lambda self: any(not each.is_stale for each in self.world.gpu.stores))
    @rule(which=PICKS, count=st.integers(1, 4), schedule=SCHEDULES)
    def stores_fail(self, which: int, count: int, schedule: bytes) -> None:
        """Half written or not at all, the GPU has let go."""
        world = self.world
        stores = self._stores_of_one_request(which)[:count]
        for store in stores:
            world.gpu.stores.remove(store)
        world.in_order(schedule)
        keys = [each.key for each in stores]
        epoch = stores[0].epoch
        world.facade.complete_store(keys, stores[0].request, success=False, epoch=epoch)
        for key in keys:
            assert world.states[key] is BlockState.ABSENT

    @staticmethod
    def _order(request: Request) -> RequestOrder | None:
        """Tell the order of a request's keys, the first time, as vLLM's adapter does."""
        if request.is_told:
            return None
        request.is_told = True
        return RequestOrder(0, request.path)

    def _stores_of_one_request(self, which: int) -> list[GpuStore]:
        stores = [each for each in self.world.gpu.stores if not each.is_stale]
        first = pick(stores, which)
        rest = [each for each in stores if each is not first and each.request == first.request]
        return [first, *rest]

    @is_due("touch", 8, lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 6), schedule=SCHEDULES)
    def a_request_touches(self, which: int, count: int, schedule: bytes) -> None:
        """Blocks that are here, and others."""
        request = self._request(which)
        self.world.in_order(schedule)
        self.world.facade.touch(request.path[:count], request.name)

    @precondition(lambda self: len(self.world.requests) < 4)
    @rule(path=st.sampled_from(PATHS), schedule=SCHEDULES)
    def a_request_comes_and_stores_all(self, path: tuple[Key, ...], schedule: bytes) -> None:
        """What most requests do."""
        world = self.world
        self.a_request_starts(path, -1)
        held = len(world.gpu.stores)
        self.a_request_prepares_a_store(len(world.requests) - 1, 0, len(path), schedule)
        if len(world.gpu.stores) > held:
            first = world.gpu.stores[held]
            live = [each for each in world.gpu.stores if not each.is_stale]
            self.stores_complete(live.index(first), len(path), b"")

    @is_due("again", 6, lambda self: self._late())
    @rule(which=PICKS, succeeds=st.booleans())
    def a_request_does_again_what_a_reset_made_void(self, which: int, succeeds: bool) -> None:
        """And only then hears of the end of what it did before."""
        world = self.world
        work = pick(self._late(), which)
        number = list(world.requests).index(work.request)
        if isinstance(work, GpuStore):
            start = world.requests[work.request].path.index(work.key)
            self.a_request_prepares_a_store(number, start, 1, b"")
        else:
            self.a_request_prepares_a_store(number, 0, 6, b"")
            live = [each for each in world.gpu.stores if not each.is_stale]
            mine = [live.index(each) for each in live if each.request == work.request]
            if mine:
                self.stores_complete(mine[0], 6, b"")
            self.a_request_loads_the_prefix_that_is_here(number, 7, b"")
        late = world.gpu.late.index(work)
        self.a_completion_from_before_a_reset_is_ignored(late, succeeds, b"")

    def _late(self) -> list[GpuStore | GpuLoad]:
        """Return what was begun before a reset, by requests that go on."""
        return [each for each in self.world.gpu.late if each.request in self.world.requests]
