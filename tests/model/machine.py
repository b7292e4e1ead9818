"""The state machine: what a scheduler, its GPU, and good and bad tiers may do, in any order.

Rules are the design's verbs. Their small integers pick one of what there is.
A ``schedule`` says in which order the mailboxes are delivered during a facade
call; the empty one is the engine cell's own order, towards which Hypothesis
shrinks.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fakes import GpuLoad, GpuStore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from promises import Promises, assert_p10_at_rest, is_running
from world import KEYS, PATHS, Request, Shape, TierShape, World, pattern

from kvtier import messages as m
from kvtier.backend import block_digest
from kvtier.policies.lru import LRUPolicy
from kvtier.slots import GPU
from kvtier.states import ANSWERS, BlockState, BreakerState
from kvtier.testing.cell import TestTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.messages import Key
    from kvtier.policies.base import EvictionPolicy

SCHEDULES = st.one_of(st.just(b""), st.binary(max_size=10))
PICKS = st.integers(0, 7)
TIERS = (TierShape(capacity=3), TierShape(), TierShape(request_level=True))
SHAPES = st.builds(
    Shape,
    slot_count=st.sampled_from([6, 4, 5, 7, 8, 12]),
    tiers=st.sampled_from(
        [
            TIERS,
            TIERS[:2],
            (TierShape(), TierShape(capacity=5, parts_max=1)),
            (TierShape(capacity=2, request_level=True), TierShape(parts_max=1)),
            (
                TierShape(admission="second_touch"),
                TierShape(capacity=4, admission="predicted_reuse"),
            ),
        ]
    ),
    job_blocks_max=st.integers(1, 4),
    store_threshold=st.sampled_from([0, 0, 0, 2]),
    cascade_slots_fraction_max=st.sampled_from([1.0, 0.5]),
    abandoned_slots_fraction_max=st.sampled_from([1.0, 0.3]),
    jobs_in_flight_max=st.sampled_from([32, 4]),
    breaker_failures_max=st.sampled_from([3, 1, 100]),
    store_reserve_fraction=st.sampled_from([1 / 16, 0.4]),
)
T = TypeVar("T")
WORK_MAX = 400  # what a tier that answers everything does before the model gives up on it


def is_due(
    name: str, pause: int, also: Callable[[KVTierSpec], object] = bool
) -> Callable[..., Any]:
    """Let a rule run only now and then, so that what lies between can become interesting.

    Its name is due ``pause`` rules after it last ran. ``also``: a precondition.
    """

    def is_due_now(self: KVTierSpec) -> bool:
        since = self.world.rules_run - self.world.last_run.get(name, 0)
        return since >= pause and bool(also(self))

    def decorate(method: Any) -> Any:
        @wraps(method)
        def run(self: KVTierSpec, *args: Any, **kwargs: Any) -> Any:
            self.world.last_run[name] = self.world.rules_run
            return method(self, *args, **kwargs)

        return precondition(is_due_now)(run)

    return decorate


def pick(among: Sequence[T], number: int) -> T:
    """Return one of several."""
    return among[number % len(among)]


class KVTierSpec(Promises, RuleBasedStateMachine):
    """The runtime, seen from a scheduler and from its tiers."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = SHAPES
    make_policy: ClassVar[type[EvictionPolicy]] = LRUPolicy

    @initialize(data=st.data(), warmth=st.integers(0, 3))
    def opens(self, data: st.DataObject, warmth: int) -> None:
        """A runtime of some shape is opened, empty or with blocks in its tiers."""
        self.world = World(data.draw(self.shapes, label="shape"), self.make_policy)
        for path in PATHS[:warmth]:
            self.a_request_comes_and_stores_all(path, b"")
            self.tiers_do_all_they_were_asked()
        if warmth:
            self._rest()
            self.a_reset_forgets_everything_and_waits_for_nobody(b"")

    # --- requests ---

    @precondition(lambda self: len(self.world.requests) < 4)
    @rule(path=st.sampled_from(PATHS), tiers=st.sampled_from([-1, -1, -1, 1, 2, 0]))
    def a_request_starts(self, path: tuple[Key, ...], tiers: int) -> None:
        """Requests share prefixes, and may be told which tiers to use."""
        world = self.world
        world.requests_started += 1
        request = Request(f"r{world.requests_started}", path, tiers)
        world.requests[request.name] = request
        world.in_order(b"")
        world.facade.on_request_started(request.name, tiers=tiers)

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

    @is_due("finish", 4, lambda self: self.world.requests)
    @rule(which=PICKS, knows_order=st.booleans(), schedule=SCHEDULES)
    def a_request_finishes(self, which: int, knows_order: bool, schedule: bytes) -> None:
        """Also with loads, stores, probes and promotions in flight."""
        world = self.world
        request = self._request(which)
        del world.requests[request.name]
        world.end_leases(request.name)
        world.in_order(schedule)
        order = request.path if knows_order else None
        world.facade.on_request_finished(request.name, order)

    # --- lookups ---

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_looks_up_its_prefix(self, which: int, count: int, schedule: bytes) -> None:
        """As lookup_prefix does: on, until a block is nowhere."""
        request = self._request(which)
        self.world.in_order(schedule)
        for key in request.path[:count]:
            if self._look_up(request, key, schedule) is BlockState.ABSENT:
                break

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_looks_up_its_prefix_in_one_go(
        self, which: int, count: int, schedule: bytes
    ) -> None:
        """As vLLM's adapter does: it ends at the first block that is nowhere, or earlier."""
        request = self._request(which)
        world = self.world
        world.in_order(schedule)
        before = dict(world.states)
        refused = world.primary.counts.promotions_refused
        keys = request.path[:count]
        states = world.facade.lookup_states(keys, request.name)
        assert BlockState.ABSENT not in states[:-1]
        for key, state in zip(keys, states, strict=False):
            self._note_answer(request, key, before[key], state)
        if world.primary.counts.promotions_refused > refused and not schedule:
            self._assert_full()

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, index=PICKS, schedule=SCHEDULES)
    def a_request_looks_up_one_block(self, which: int, index: int, schedule: bytes) -> None:
        """A sliding window asks for blocks in the middle."""
        request = self._request(which)
        self.world.in_order(schedule)
        self._look_up(request, pick(request.path, index), schedule)

    @rule(path=st.sampled_from(PATHS), count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_comes_and_is_promoted_for(
        self, path: tuple[Key, ...], count: int, schedule: bytes
    ) -> None:
        """Tiers say what they have, and begin to load it; when they end is another rule's."""
        world = self.world
        while len(world.requests) >= 4:
            self.a_request_finishes(0, True, b"")
        self.a_request_starts(path, -1)
        for _ in range(2):
            self.a_request_looks_up_its_prefix(len(world.requests) - 1, count, schedule)
            self.a_step_ends(0.01, schedule)
            for number in range(len(world.devices)):
                self._serve(number, only=m.ProbePart)

    @is_due("unknown", 10)
    @rule(key=st.sampled_from(KEYS), schedule=SCHEDULES)
    def an_unknown_request_is_never_served_from_a_tier(self, key: Key, schedule: bytes) -> None:
        """Nothing is asked or promoted for it."""
        world = self.world
        before = world.states[key]
        world.in_order(schedule)
        said = world.facade.lookup(key, "unknown")
        if before is BlockState.ABSENT:
            assert world.states[key] is not BlockState.FILLING
            assert said is False
        if before is BlockState.READY:
            assert said is True

    def _look_up(self, request: Request, key: Key, schedule: bytes = b"") -> BlockState:
        world = self.world
        before = world.states[key]
        refused = world.primary.counts.promotions_refused
        state = world.facade.lookup_state(key, request.name)
        self._note_answer(request, key, before, state)
        if world.primary.counts.promotions_refused > refused and not schedule:
            self._assert_full()
        return state

    def _note_answer(
        self, request: Request, key: Key, before: BlockState, state: BlockState
    ) -> None:
        if before is BlockState.READY:
            assert state is BlockState.READY
        if state is BlockState.READY:
            request.hits[key] = None
        elif state is BlockState.PROBING:
            request.behind.setdefault(key[-4:], key)
        elif state is BlockState.FILLING and before in {BlockState.ABSENT, BlockState.PROBING}:
            self._promotion_began(request, key)

    def _promotion_began(self, request: Request, key: Key) -> None:
        """Only a contiguous prefix is promoted, and the promoted block is leased."""
        world = self.world
        gap = request.behind.get(key[-4:])
        assert gap is None, f"{key!r} is promoted behind {gap!r}, which may be nowhere"
        slot = world.primary.slot_of(key)
        assert slot is not None
        source = world.slots.source_of(slot)
        assert source is not None
        assert source != GPU
        assert request.tiers >> source & 1, f"{request.name} may not be served from {source}"
        until = world.primary._promotions.now + world.config.lease_timeout_s
        world.leases[key] = (request.name, until)
        world.lease_until[request.name] = until

    def _assert_full(self, spare: Sequence[Key] = ()) -> None:
        """A promotion is refused only to keep the reserve, or where nothing can be evicted."""
        world = self.world
        most = world.slots.count - world.config.store_reserve_slots
        if world.primary._promotions.held_slots < most:
            self._assert_nothing_can_be_evicted(spare)

    def _assert_nothing_can_be_evicted(self, spare: Sequence[Key]) -> None:
        world = self.world
        slots = world.slots
        assert not slots.free_count(), "there are free slots"
        for key, slot in world.primary._slot_of.items():
            if slots.is_ready(slot):
                assert slots.is_held(slot) or slot in slots.hits or key in spare, (
                    f"slot {slot} could have been evicted"
                )

    # --- GPU loads ---

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
        slots = world.facade.prepare_load(keys, request.name)
        assert slots == [world.primary.slot_of(key) for key in keys]
        expected = [world.bytes_of[key] for key in keys]
        world.gpu.loads.append(GpuLoad(request.name, keys, slots, expected))
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
        world.facade.complete_load(load.keys, load.request)

    # --- GPU stores ---

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, start=st.integers(0, 4), count=st.integers(1, 6), schedule=SCHEDULES)
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
        grant = world.facade.prepare_store(keys, request.name)
        if counts.stores_dropped > dropped and not schedule:
            self._assert_nothing_can_be_evicted(keys)
        if grant is None:
            assert counts.stores_dropped > dropped, "refused and not counted"
            return
        assert len(set(grant.slots)) == len(grant.slots) == len(grant.keys)
        assert [key for key in keys if key in set(grant.keys)] == list(grant.keys)
        for key in grant.evicted:
            assert before[key] is BlockState.READY
            assert world.states[key] is BlockState.ABSENT
        for key, slot in zip(grant.keys, grant.slots, strict=True):
            assert before[key] in {BlockState.ABSENT, BlockState.PROBING} or schedule
            world.versions += 1
            data = pattern(key, world.versions)
            world.gpu.stores.append(GpuStore(request.name, key, slot, data))

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
            world.committed[store.key].add(store.data)
        world.in_order(schedule)
        world.facade.complete_store([each.key for each in stores], stores[0].request)
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
        world.facade.complete_store(keys, stores[0].request, success=False)
        for key in keys:
            assert world.states[key] is BlockState.ABSENT

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

    # --- steps, time, resets ---

    @is_due("jump", 8)
    @rule(seconds=st.sampled_from([0.4, 1.1, 2.5, 7.0, 100.0]), schedule=SCHEDULES)
    def the_clock_jumps(self, seconds: float, schedule: bytes) -> None:
        """Past some deadlines, or past all."""
        self.a_step_ends(seconds, schedule)

    @rule(seconds=st.just(0.01), schedule=SCHEDULES)
    def a_step_ends(self, seconds: float, schedule: bytes) -> None:
        """The clock may have jumped meanwhile."""
        world = self.world
        # What the scheduler has not ended a step for is not the tier's to answer yet.
        for key in {key for keys in world.primary._whereabouts._unsent.values() for key in keys}:
            world.pending_since.pop(key, None)
        world.now += seconds
        world.in_order(schedule)
        world.facade.step_end()
        for request in world.requests.values():
            request.behind.clear()
            request.hits.clear()
        for key, state in world.states.items():
            slot = world.primary.slot_of(key)
            from_tier = state is BlockState.FILLING and slot in world.slots.tier_fills
            if state is BlockState.PROBING or from_tier:
                world.pending_since.setdefault(key, world.now)

    @is_due("reset", 15)
    @rule(schedule=SCHEDULES)
    def a_reset_forgets_everything_and_waits_for_nobody(self, schedule: bytes) -> None:
        """Tiers may hang and the GPU may go on: it returns, and a new epoch begins."""
        world = self.world
        # What was a HIT, or stood behind a gap, belongs to the old epoch.
        for request in world.requests.values():
            request.hits.clear()
            request.behind.clear()
        world.gpu.reset()
        world.in_order(schedule)
        world.facade.reset()
        for key in KEYS:
            assert world.state_of(key) is BlockState.ABSENT

    @is_due("empty", 12, lambda self: self.world.slots.ready_count() > 2)
    @rule(schedule=SCHEDULES)
    def a_reset_is_flushed_at_once(self, schedule: bytes) -> None:
        """So that tiers are all that still has the blocks."""
        self.a_reset_forgets_everything_and_waits_for_nobody(schedule)
        self.the_gpu_is_flushed(schedule)

    @is_due("flush", 6, lambda self: self.world.slots.quarantined)
    @rule(schedule=SCHEDULES)
    def the_gpu_is_flushed(self, schedule: bytes) -> None:
        """It has let go of all that it was given before the last reset."""
        self.world.gpu.flush()
        self.world.in_order(schedule)
        self.world.facade.on_reset_flushed()

    @precondition(lambda self: self.world.gpu.late)
    @rule(which=PICKS, schedule=SCHEDULES)
    def a_completion_from_before_a_reset_is_ignored(self, which: int, schedule: bytes) -> None:
        """A scheduler should drop it, as vLLM does; one that doesn't does no harm."""
        world = self.world
        work = pick(world.gpu.late, which)
        world.gpu.late.remove(work)
        world.in_order(schedule)
        if isinstance(work, GpuStore):
            if not any(self._is_same(work, each) for each in world.gpu.stores):
                world.facade.complete_store([work.key], work.request)
        elif not any(
            load.request == work.request and set(load.keys) & set(work.keys)
            for load in world.gpu.loads
        ):
            world.facade.complete_load(work.keys, work.request)

    @staticmethod
    def _is_same(one: GpuStore, other: GpuStore) -> bool:
        """Tell whether a completion can't say which of two stores it is for."""
        return one.request == other.request and one.key == other.key

    # --- deliveries ---

    @precondition(lambda self: self.world.cell.waiting_elsewhere())
    @rule(which=st.integers(0, 30), count=st.integers(1, 4))
    def a_message_arrives(self, which: int, count: int) -> None:
        """One mailbox, of a tier or of the engine's inboxes, is delivered."""
        for _ in range(count):
            waiting = self.world.cell.waiting_elsewhere()
            if not waiting:
                break
            self.world.cell.deliver(pick(waiting, which))
        self._run_engine()

    @precondition(lambda self: self.world.cell.waiting_elsewhere())
    @rule()
    def everything_arrives(self) -> None:
        """All mailboxes are delivered; what is at the backends stays there."""
        self.world.cell.settle()

    # --- tiers, as they should be ---

    @precondition(lambda self: any(self.world.is_busy(e) for e in range(len(self.world.links))))
    @rule(which=PICKS)
    def a_tier_does_all_it_was_asked(self, which: int) -> None:
        """A healthy tier: everything is copied, answered and delivered."""
        world = self.world
        self._serve(pick([e for e in range(len(world.links)) if world.is_busy(e)], which))

    @precondition(lambda self: any(self.world.is_busy(e) for e in range(len(self.world.links))))
    @rule()
    def tiers_do_all_they_were_asked(self) -> None:
        """All of them, one after the other."""
        for number in range(len(self.world.devices)):
            self._serve(number)

    def _serve(self, number: int, only: type[object] = object) -> None:
        """Let a tier work until nothing is left, or nothing but other parts."""
        world = self.world
        tier = world.runtime.tiers[number]
        for _ in range(WORK_MAX):
            mailbox = next((each for each in tier.mailboxes if each.waiting), None)
            if mailbox is not None:
                world.cell.deliver(mailbox)
            elif part := next((each for each in tier.parts if isinstance(each, only)), None):
                tier.answer(part, world.devices[number].end(part, 0))
            else:
                break
        else:
            raise AssertionError(f"{tier.name} never comes to an end")
        while tier.inbox.waiting:
            world.cell.deliver(tier.inbox)
        self._run_engine()

    # --- tiers, as they may be ---

    @precondition(lambda self: any(self._parts(each) for each in range(len(self.world.devices))))
    @rule(tier=PICKS, part=PICKS)
    def a_backend_copies_a_piece(self, tier: int, part: int) -> None:
        """Also one whose job was given up long ago, and one whose tier broke."""
        number = pick([e for e in range(len(self.world.devices)) if self._parts(e)], tier)
        self.world.devices[number].copy(pick(self._parts(number), part))

    def _parts(self, number: int) -> list[m.ProbePart | m.LoadPart | m.StorePart]:
        return self.world.runtime.tiers[number].parts + self.world.devices[number].orphans

    @precondition(lambda self: any(each.parts for each in self.world.runtime.tiers))
    @rule(tier=PICKS, part=PICKS, failing=st.sampled_from([0, 0, 0, 0xFF, 1, 2, 5]))
    def a_part_ends(self, tier: int, part: int, failing: int) -> None:
        """It succeeds, fails, or fails in part; in any order, however late."""
        number, held = self._busy_tier(tier)
        chosen = pick(held.parts, part)
        held.answer(chosen, self.world.devices[number].end(chosen, failing))

    @is_due("wrong", 6, lambda self: any(each.parts for each in self.world.runtime.tiers))
    @rule(tier=PICKS, part=PICKS, count=st.integers(0, 3), twice=st.booleans())
    def a_part_ends_with_the_wrong_number_of_answers(
        self, tier: int, part: int, count: int, twice: bool
    ) -> None:
        """Or twice."""
        number, held = self._busy_tier(tier)
        chosen = pick(held.parts, part)
        outcomes = self.world.devices[number].end(chosen, 0)
        if not twice:
            self.world.exact[number] = False
            if isinstance(chosen, m.StorePart) and count != len(outcomes):
                # It has the blocks and can't say so; a known tier's contents are then unknown.
                for key in chosen.keys:
                    self.world.devices[number].blocks.pop(key, None)
            outcomes = (outcomes * 3)[:count]
        held.answer(chosen, outcomes)
        if twice:
            held.answer(chosen, outcomes)

    def _busy_tier(self, tier: int) -> tuple[int, TestTier]:
        tiers = self.world.runtime.tiers
        number = pick([each for each, held in enumerate(tiers) if held.parts], tier)
        return number, tiers[number]

    @is_due("garble", 6, lambda self: any(e.inbox.waiting for e in self.world.runtime.tiers))
    @rule(tier=PICKS, message=PICKS, doubles=st.booleans(), count=st.integers(0, 3))
    def a_message_to_the_engine_is_garbled_or_doubled(
        self, tier: int, message: int, doubles: bool, count: int
    ) -> None:
        """A tier in another process may send anything."""
        world = self.world
        tiers = world.runtime.tiers
        number = pick([each for each, held in enumerate(tiers) if held.inbox.waiting], tier)
        waiting = tiers[number].inbox.waiting
        index = message % len(waiting)
        chosen = waiting[index]
        if isinstance(chosen, m.TierRestarted | m.TierFenced):
            return
        world.honest[number] = False
        if doubles:
            tiers[number].inbox.post(chosen)
        elif isinstance(chosen, m.JobEnded):
            outcomes = (chosen.outcomes * 3)[:count]
            if len(outcomes) != len(chosen.outcomes):
                waiting[index] = m.JobEnded(job=chosen.job, outcomes=outcomes, seconds=0.0)
        elif isinstance(chosen, m.ProbeAnswer):
            present = (chosen.present * 3)[:count]
            waiting[index] = m.ProbeAnswer(probe=chosen.probe, present=present)

    @is_due("stray", 12)
    @rule(tier=PICKS, number=st.sampled_from([0, -1, 1_000_000]), is_probe=st.booleans())
    def a_tier_ends_what_nobody_asked_for(self, tier: int, number: int, is_probe: bool) -> None:
        """It is counted and ignored."""
        inbox = pick(self.world.runtime.tiers, tier).inbox
        if is_probe:
            inbox.post(m.ProbeAnswer(probe=number, present=(True,)))
        else:
            inbox.post(m.JobEnded(job=number, outcomes=(), seconds=1.0))

    @is_due("full", 10)
    @rule(tier=PICKS)
    def a_mailbox_is_full_or_has_room_again(self, tier: int) -> None:
        """The link is refused; nothing is lost but time."""
        number = tier % len(self.world.devices)
        if not (self.world.dead[number] or self.world.fenced[number]):
            held = self.world.runtime.tiers[number]
            held.is_full = not held.is_full

    @is_due("somebody", 4, lambda self: any(e.capacity is None for e in self.world.shape.tiers))
    @rule(tier=PICKS, key=st.sampled_from(KEYS), appears=st.booleans())
    def somebody_else_changes_a_shared_tier(self, tier: int, key: Key, appears: bool) -> None:
        """Another engine stores a block, or removes one."""
        world = self.world
        shared = [each for each, shape in enumerate(world.shape.tiers) if shape.capacity is None]
        blocks = world.devices[pick(shared, tier)].blocks
        if appears:
            world.versions += 1
            data = pattern(key, world.versions)
            world.committed[key].add(data)
            blocks[key] = (data, block_digest(key, memoryview(data)))
        else:
            blocks.pop(key, None)

    @is_due("rot", 8, lambda self: any(each.blocks for each in self.world.devices))
    @rule(tier=PICKS, which=PICKS)
    def a_copy_rots(self, tier: int, which: int) -> None:
        """A block that fails its check is a miss."""
        device = pick([each for each in self.world.devices if each.blocks], tier)
        device.damage(pick(list(device.blocks), which))

    # --- the life of a tier ---

    @is_due("break", 20)
    @rule(tier=PICKS)
    def a_tier_breaks(self, tier: int) -> None:
        """Its actor raised. Its threads may still copy."""
        world = self.world
        number = tier % len(world.devices)
        if world.dead[number] or world.fenced[number]:
            return
        held = world.runtime.tiers[number]
        world.dead[number] = True
        world.devices[number].orphans = list(held.parts)
        held.end()
        held.inbox.post(m.TierBroke(reason="the model wants it"))

    @precondition(lambda self: any(self.world.dead))
    @rule(tier=PICKS)
    def a_tier_is_fenced(self, tier: int) -> None:
        """Nothing of it is left that could touch a slot."""
        world = self.world
        number = pick([each for each, is_dead in enumerate(world.dead) if is_dead], tier)
        self._fence(number)

    def _fence(self, number: int) -> None:
        world = self.world
        world.dead[number] = False
        world.fenced[number] = True
        world.devices[number].orphans = []
        world.at_tier[number].clear()
        world.runtime.tiers[number].inbox.post(m.TierFenced())

    @precondition(lambda self: any(self.world.fenced))
    @rule(tier=PICKS, keeps=st.booleans())
    def a_tier_is_restarted(self, tier: int, keeps: bool) -> None:
        """A fresh cell serves it. Only after the link knows that the old one is fenced.

        A tier of its own may have kept its blocks; then its backend says so.
        """
        world = self.world
        number = pick([each for each, fenced in enumerate(world.fenced) if fenced], tier)
        link = world.links[number]
        inbox = world.runtime.tiers[number].inbox
        if inbox.waiting or link._breaker.state is not BreakerState.CUT_OFF:
            return
        shape = world.shape.tiers[number]
        policy = None if shape.capacity is None else self.make_policy(shape.capacity)
        held = TestTier(world.cell, link, world.traits(shape), policy)
        world.runtime.tiers[number] = held
        world.devices[number].restart(held, keeps=keeps or shape.capacity is None)
        world.fenced[number] = False
        world.honest[number] = True
        world.exact[number] = True
        inbox.post(m.TierRestarted())
        if shape.capacity is not None:
            for key in world.devices[number].blocks:
                held.mailbox.post(m.ContentsFound(keys=(key,)))

    @is_due("lose", 8, lambda self: any(e.capacity is not None for e in self.world.shape.tiers))
    @rule(tier=PICKS, key=st.sampled_from(KEYS))
    def a_backend_loses_a_block(self, tier: int, key: Key) -> None:
        """A region of it went bad, or the block is too old. It says so; or it had it never."""
        world = self.world
        own = [each for each, shape in enumerate(world.shape.tiers) if shape.capacity is not None]
        number = pick(own, tier)
        world.devices[number].blocks.pop(key, None)
        if not (world.dead[number] or world.fenced[number]):
            world.runtime.tiers[number].mailbox.post(m.ContentsLost(keys=(key,)))

    # --- rest ---

    @is_due("rest", 25)
    @rule()
    def all_comes_to_rest(self) -> None:
        """No requests, no jobs."""
        self._rest()

    def _rest(self) -> None:
        """Finish everything, let every tier answer or be fenced, and look what is left."""
        world = self.world
        world.in_order(b"")
        for store in [each for each in world.gpu.stores if not each.is_stale]:
            world.gpu.write_rest(store)
            world.gpu.stores.remove(store)
            world.committed[store.key].add(store.data)
            world.facade.complete_store([store.key], store.request)
        for load in [each for each in world.gpu.loads if not each.is_stale]:
            world.gpu.loads.remove(load)
            world.facade.complete_load(load.keys, load.request)
        for name in list(world.requests):
            del world.requests[name]
            world.end_leases(name)
            world.facade.on_request_finished(name)
        world.gpu.flush()
        world.facade.on_reset_flushed()
        self.a_step_ends(0.01, b"")
        for number, is_dead in enumerate(world.dead):
            if is_dead:
                self._fence(number)
        for _ in world.links:  # What one tier promotes may be cascaded to another.
            self.tiers_do_all_they_were_asked()
        world.cell.settle()
        assert world.facade.get_finished() == 0 or world.broken_links
        assert_p10_at_rest(world)
        self._assert_a_healthy_tier_serves_within_two_steps()

    def _assert_a_healthy_tier_serves_within_two_steps(self) -> None:
        """From the first lookup to a HIT: one step to ask, one to load."""
        world = self.world
        healthy = [
            number
            for number, link in enumerate(world.links)
            if link._breaker.state is BreakerState.CLOSED
            and not world.runtime.tiers[number].is_full
            and not world.fenced[number]
            and not link._jobs
        ]
        if len(healthy) < len(world.links):
            return
        # One that the first tier has, and that no other is wrongly thought to have instead.
        thought = world.primary._whereabouts._known
        first = world.devices[0]
        known = [
            key
            for key in KEYS
            if world.states[key] is BlockState.ABSENT
            and first.is_sound(key)
            and (key not in thought or thought[key] & 1)
            and (self.world.shape.tiers[0].capacity is None or key in first.tier.actor._resident)
        ]
        if not known:
            return
        self.a_request_starts((known[0],), -1)
        request = list(world.requests.values())[-1]
        for _ in range(2):
            self._look_up(request, known[0])
            self.a_step_ends(0.01, b"")
            self.tiers_do_all_they_were_asked()
        assert self._look_up(request, known[0]) is BlockState.READY
        self.a_step_ends(0.01, b"")
        self.a_request_finishes(len(world.requests) - 1, True, b"")

    def _none_ends(self) -> None:
        """If all tiers hang from now on, each lookup still ends with True or False."""
        world = self.world
        world.in_order(b"")
        while world.gpu.stores:
            self.stores_fail(0, 4, b"") if not world.gpu.stores[
                0
            ].is_stale else self.the_gpu_is_flushed(b"")
        bound = 3 * len(world.links) * (len(world.requests) + 1)
        for _ in range(bound):
            answers = [
                ANSWERS[self._look_up(request, key)]
                for request in world.requests.values()
                for key in request.path
            ]
            if None not in answers:
                return
            self.a_step_ends(2.5, b"")
        raise AssertionError(f"still None after {bound} steps")

    def teardown(self) -> None:
        """End each run with tiers that hang, then at rest."""
        if not is_running(self) or sys.exc_info()[0] is not None:
            return
        self._none_ends()
        self._rest()

    # --- helpers ---

    def _request(self, which: int) -> Request:
        return pick(list(self.world.requests.values()), which)

    def _run_engine(self) -> None:
        self.world.in_order(b"")
        self.world.facade.get_finished()
