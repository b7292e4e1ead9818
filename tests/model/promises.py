"""The promises of design.md. Each is an invariant named by the sentence that it proves.

They are asserted after every rule, when the engine is quiet. What must hold
between two deliveries of one call is in ``world.World.observe``; what belongs
to one call (a HIT, the reserve, the contiguous prefix) stands at its rule.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis.stateful import invariant, precondition
from known_policies import held_by, known_to
from settled import knows_contents, knows_losses, there_or_taken
from world import KEYS

from kvtier.core.block_state import BlockState
from kvtier.core.events import PRIMARY
from kvtier.core.generations import mark_of, unmarked
from kvtier.engine.link.circuit_breaker import BreakerState, Work
from kvtier.engine.primary.slot_table import GPU, SlotState
from kvtier.tier.bounded_tier import BoundedTier

if TYPE_CHECKING:
    from world import World

    from kvtier.plugin_api.keys import Key
    from tests.support.cell import TestTier

IN_USE = (SlotState.READY, SlotState.QUARANTINED)


def is_running(machine: Promises) -> bool:
    """Tell whether the world is set up."""
    return hasattr(machine, "world")


class Promises:
    """A mixin for a state machine with a ``world``."""

    world: World

    @precondition(is_running)
    @invariant()
    def rules_are_counted(self) -> None:
        self.world.rules_run += 1

    # --- 1 ---

    @precondition(is_running)
    @invariant()
    def p1_a_slot_is_in_exactly_one_of_free_filling_ready_quarantined(self) -> None:
        slots = self.world.slots.audit()
        free = Counter(slots.free)
        keys_at = Counter(slots.slot_of.values())
        for slot, state in enumerate(slots.states):
            assert free[slot] == (state is SlotState.FREE), slot
            assert (slot in slots.quarantined) is (state is SlotState.QUARANTINED), slot
            assert keys_at[slot] == (state in {SlotState.FILLING, SlotState.READY}), slot
            assert (slot in slots.sources) is (state is SlotState.FILLING), slot

    @precondition(is_running)
    @invariant()
    def p1_a_filling_slot_is_filled_by_one_named_source(self) -> None:
        world = self.world
        seen = world.primary.audit()
        unsent = {(slot, tier) for slot, tier, _ in seen.promotions.unsent}
        for slot, source in seen.slots.sources.items():
            if source == GPU:
                named = sum(each.slot == slot and not each.is_stale for each in world.gpu.stores)
            else:
                named = world.promoting[source, world.epoch, slot] + ((slot, source) in unsent)
            assert named == 1, (slot, source, named)

    # --- 2 ---

    @precondition(is_running)
    @invariant()
    def p2_pins_are_gpu_loads_plus_cascades_that_read_now(self) -> None:
        world = self.world
        loads = Counter(
            slot for load in world.gpu.loads if not load.is_stale for slot in load.slots
        )
        cascades: Counter[int] = Counter()
        for (_, epoch, slot), count in world.cascading.items():
            if epoch == world.epoch:
                cascades[slot] += count
        for slot in range(world.slots.count):
            assert world.slots.pins.get(slot, 0) == loads[slot] + cascades[slot], slot

    @precondition(is_running)
    @invariant()
    def p2_a_pinned_slot_is_neither_evicted_nor_written(self) -> None:
        world = self.world
        for load in world.gpu.loads:
            for key, slot in zip(load.keys, load.slots, strict=True):
                if not load.is_stale:
                    assert world.primary.slot_of(key) == slot
                    assert world.slots.is_ready(slot)

    # --- 3 ---

    @precondition(is_running)
    @invariant()
    def p3_a_slot_that_is_written_has_one_writer_and_no_reader(self) -> None:
        world = self.world
        writers, readers = world.writers(), world.readers()
        slots = world.slots.audit()
        seen: set[int] = set()
        for (slot, source), count in writers.items():
            assert count == 1, f"slot {slot} is written {count} times by {source}"
            assert slot not in seen, f"slot {slot} has two writers"
            seen.add(slot)
            assert not readers[slot], f"slot {slot} is read and written"
            state = slots.states[slot]
            if state is SlotState.FILLING:
                assert slots.sources[slot] == source
            else:
                assert state is SlotState.QUARANTINED, f"{source} may write {state!r} slot {slot}"
        for slot in readers:
            state = slots.states[slot]
            assert state in IN_USE, f"slot {slot} is read and {state!r}"

    # --- 4 ---

    @precondition(is_running)
    @invariant()
    def p4_ready_bytes_are_the_bytes_last_committed_for_the_key(self) -> None:
        world = self.world
        assert set(world.bytes_of) == world.primary.resident()
        for key, expected in world.bytes_of.items():
            slot = world.primary.slot_of(key)
            assert slot is not None
            assert bytes(world.memory.view(slot)) == expected, key

    @precondition(is_running)
    @invariant()
    def p4_a_gpu_load_reads_the_committed_bytes_from_prepare_to_complete(self) -> None:
        world = self.world
        for load in world.gpu.loads:
            for slot, expected in zip(load.slots, load.expected, strict=True):
                assert bytes(world.memory.view(slot)) == expected, (load, slot)

    # --- 6 ---

    @precondition(is_running)
    @invariant()
    def p6_no_key_stays_probing_or_filling_from_a_tier_past_its_deadline(self) -> None:
        world = self.world
        now = world.primary.audit().promotions.now
        for key, since in world.pending_since.items():
            bound = world.config.wait_timeout_s
            assert now - since < bound, f"{key!r} is {world.states[key]!r} for {now - since} s"

    # --- 8 ---

    @precondition(is_running)
    @invariant()
    def p8_late_doubled_and_unknown_completions_are_counted_and_otherwise_ignored(self) -> None:
        world = self.world
        assert world.cell.faults == len(world.broken_links)
        for tier, link in enumerate(world.links):
            counted = link.counts.late_completions + link.counts.unknown_completions
            assert counted == world.strays[tier], world.links[tier].name

    # --- 9 ---

    @precondition(is_running)
    @invariant()
    def p9_the_event_stream_folds_to_the_resident_set(self) -> None:
        world = self.world
        world.in_order(b"")
        world.drain_events()
        assert world.folded[PRIMARY] == world.primary.resident()
        for number, tier in enumerate(world.runtime.tiers):
            if knows_contents(world, number):
                assert world.folded[number] == served_by(tier), tier.name
            elif knows_losses(world, number):
                assert world.folded[number] <= there_or_taken(world, number), tier.name

    # --- 11 ---

    @precondition(is_running)
    @invariant()
    def p11_promotions_leave_a_reserve_for_stores(self) -> None:
        world = self.world
        slots = world.slots
        held = len(slots.leased | slots.tier_fills.keys())
        assert held == world.primary.audit().promotions.held_slots
        assert held <= slots.count - world.config.store_reserve_slots

    @precondition(is_running)
    @invariant()
    def p11_who_waits_for_room_holds_none(self) -> None:
        audit = self.world.primary.audit()
        waiting = {name for name, each in audit.looked_up.items() if each.slots_wanted}
        assert waiting.isdisjoint(audit.promotions.leases)

    @precondition(is_running)
    @invariant()
    def p11_promoted_blocks_are_leased_until_their_request_has_read_them(self) -> None:
        world = self.world
        for key in world.leases:
            slot = world.primary.slot_of(key)
            assert slot is not None, f"{key!r} is leased and gone"
            assert slot in world.slots.leased, f"{key!r} is leased, and its slot is not"

    # --- counters ---

    @precondition(is_running)
    @invariant()
    def counters_only_grow(self) -> None:
        world = self.world
        now = world.facade.statistics().counters()
        assert now.keys() >= world.counters.keys()
        replaced = [n for name, n in now.items() if name.endswith("policies_replaced")]
        assert not any(replaced), "a policy of ours raised"
        fell = {name: n for name, n in world.counters.items() if now[name] < n}
        assert not fell, {name: (n, now[name]) for name, n in fell.items()}
        world.counters = now

    @precondition(is_running)
    @invariant()
    def a_key_counts_once_for_a_request_as_a_hit_or_as_a_miss(self) -> None:
        world = self.world
        now = world.primary.audit().looked_up
        for name, seen in now.items():
            assert seen.hits.isdisjoint(seen.misses), name
            before = world.looked_up.get(name)
            assert before is None or before.hits <= seen.hits, name
            assert before is None or before.misses <= seen.misses, name
        world.looked_up = now

    # --- 16 ---

    @precondition(is_running)
    @invariant()
    def p16_what_is_reserved_for_a_request_ends_with_the_decision(self) -> None:
        world = self.world
        seen = world.primary.audit()
        waiting = {request for _, _, request in seen.promotions.unsent}
        waiting |= frozenset().union(*seen.directory.waiters.values())
        for request in world.decided:
            assert request not in seen.promotions.leases, f"{request} was scheduled and has leases"
            assert request not in waiting, f"{request} was scheduled and is waited for"

    # --- 14 ---

    @precondition(is_running)
    @invariant()
    def p14_a_tier_serves_its_engine_nothing_of_another_generation(self) -> None:
        world = self.world
        for tier in bounded_tiers(world):
            seen = tier.bounded.audit()
            assert {mark_of(key) for key in seen.resident} <= {seen.mark}, tier.name

    # --- what no promise names, and all of them need ---

    @precondition(is_running)
    @invariant()
    def the_policy_knows_the_keys_that_have_slots_and_holds_those_in_use(self) -> None:
        world = self.world
        policy = world.policy
        known, held = known_to(policy), held_by(policy)
        assert known == set(world.slots.slot_of)
        for key, slot in world.slots.slot_of.items():
            assert (key in held) == world.slots.is_held(slot), key
        assert held <= known

    @precondition(is_running)
    @invariant()
    def statistics_agree_with_the_slots(self) -> None:
        slots = self.world.slots
        seen = self.world.facade.statistics().primary
        states = Counter(SlotState(each) for each in slots.state)
        assert seen.free_slots == states[SlotState.FREE]
        assert seen.ready_slots == states[SlotState.READY]
        assert seen.quarantined_slots == states[SlotState.QUARANTINED]
        filling = seen.filling_from_gpu_slots + seen.filling_from_tiers_slots
        assert filling == states[SlotState.FILLING]
        assert seen.filling_from_gpu_slots == len(slots.gpu_fills)
        assert seen.pinned_slots == len(slots.pins)
        assert seen.requests == len(self.world.requests)

    @precondition(is_running)
    @invariant()
    def a_tier_with_a_capacity_keeps_within_it(self) -> None:
        world = self.world
        for number, shape in enumerate(world.shape.tiers):
            if shape.capacity is not None:
                device = world.devices[number]
                most = shape.capacity
                if shape.disk is None:  # one that was larger before has more at first, ever less
                    device.blocks_max = min(device.blocks_max, len(device.blocks))
                    most = max(most, device.blocks_max)
                assert len(device.blocks) <= most
                # Of a backend that can't count nothing is known but what it answers next.
                if world.exact[number]:
                    assert len(device.tier.bounded.audit().resident) <= most

    @precondition(is_running)
    @invariant()
    def a_tier_counts_on_room_for_what_it_stores_and_does_not_have(self) -> None:
        for tier in bounded_tiers(self.world):
            seen = tier.bounded.audit()
            assert seen.coming == seen.storing.keys() - seen.resident

    @precondition(is_running)
    @invariant()
    def a_tiers_policy_knows_what_is_resident(self) -> None:
        for tier in bounded_tiers(self.world):
            is_quiet = tier.mailboxes and not any(each.waiting for each in tier.mailboxes)
            if is_quiet and tier.policy is not None:
                seen = tier.bounded.audit()
                known = known_to(tier.policy, self.world.committed)
                assert known == seen.resident, (known, seen.resident)
                assert held_by(tier.policy) >= seen.in_use.keys() & seen.resident

    @precondition(is_running)
    @invariant()
    def a_link_never_lets_more_be_under_way_than_its_bounds(self) -> None:
        config = self.world.config
        for link in self.world.links:
            seen = link.statistics()
            jobs = seen.promotion_jobs_in_flight + seen.cascade_jobs_in_flight
            assert jobs <= config.jobs_in_flight_max
            assert seen.probes_in_flight <= config.jobs_in_flight_max
            assert 0 <= seen.cascade_slots <= config.cascade_slots_max
            audit = link.audit()
            under_way = audit.jobs.values()
            lost = sum(len(job.slots) for job in under_way if job.abandoned and job.is_load)
            assert audit.abandoned_slots == lost
            stored = sum(len(job.slots) for job in under_way if not job.is_load)
            assert audit.cascade_slots == stored + len(audit.waiting_stores)

    @precondition(is_running)
    @invariant()
    def a_link_watches_what_it_waits_for(self) -> None:
        for link in self.world.links:
            seen = link.audit()
            assert seen.probes <= seen.watched[Work.PROBE]
            awaited = {n: job for n, job in seen.jobs.items() if job.counts_for_its_tier}
            assert seen.watched[Work.LOAD] == {n for n, job in awaited.items() if job.is_load}
            assert seen.watched[Work.STORE] == {n for n, job in awaited.items() if not job.is_load}

    @precondition(is_running)
    @invariant()
    def what_is_outstanding_is_in_flight(self) -> None:
        for link in self.world.links:
            seen = link.audit()
            in_flight = sum(len(job.slots) for job in seen.jobs.values() if job.is_load)
            assert seen.load_blocks == in_flight

    @precondition(is_running)
    @invariant()
    def p6_nobody_waits_for_a_load_beyond_its_patience(self) -> None:
        for link in self.world.links:
            seen = link.audit()
            for job in seen.jobs.values():
                assert job.abandoned or seen.now < job.waits_until


def bounded_tiers(world: World) -> list[TestTier]:
    """Return the tiers that have a capacity."""
    return [tier for tier in world.runtime.tiers if isinstance(tier.actor, BoundedTier)]


def served_by(tier: TestTier) -> set[Key]:
    """Return what a tier with a capacity has for its engine, by the engine's names."""
    seen = tier.bounded.audit()
    return set(unmarked(seen.resident, seen.mark))


def counted_by(tier: TestTier) -> set[Key]:
    """Return what a tier with a capacity knows to be in its backend."""
    seen = tier.bounded.audit()
    return {*seen.resident, *seen.old}


def assert_tiers_count_what_their_backends_have(world: World) -> None:
    """Else a backend is full of what nobody counts, and so nobody ever evicts."""
    for number, tier in enumerate(world.runtime.tiers):
        if world.shape.tiers[number].capacity is None or world.fenced[number]:
            continue
        seen = tier.bounded.audit()
        if not seen.knows_generation:  # which generation it serves: it has asked for nothing yet
            continue
        there, counted = set(world.devices[number].blocks), counted_by(tier)
        assert seen.leftovers_are_deferred or not seen.leftovers, "these could be removed now"
        assert there <= counted | seen.leftovers, f"{tier.name} doesn't count {there - counted}"
        if world.exact[number]:
            assert counted <= there, f"{tier.name} has lost {counted - there}"


def p10_at_rest_nothing_is_pinned_or_quarantined(world: World) -> None:
    """At rest every pin is 0, nothing is quarantined, and free + ready = capacity."""
    slots = world.slots
    # A link that broke is our own fault, not a tier's: what it knew is lost, with its slots.
    lost = {slot for (tier, _, slot) in world.promoting if tier in world.broken_links}
    lost |= {slot for (tier, _, slot) in world.cascading if tier in world.broken_links}
    lost |= set(world.abandoned)
    assert not world.promoting or world.broken_links, world.promoting
    assert not world.cascading or world.broken_links, world.cascading
    assert not world.abandoned or world.broken_links, world.abandoned
    for slot, state in enumerate(slots.state):
        if slot not in lost:
            assert state in {SlotState.FREE, SlotState.READY}, (slot, SlotState(state))
            assert slot not in slots.pins
            assert slot not in slots.leased
    if not lost:
        assert not slots.pins
        assert not slots.quarantined
        assert slots.free_count() + slots.ready_count() == slots.count
        assert not held_by(world.policy)
    seen = world.primary.audit()
    assert seen.promotions.held_slots == 0
    assert not seen.promotions.filling_for
    assert not seen.promotions.leases
    assert not seen.directory.requests
    assert not seen.parked
    for key in KEYS:
        assert world.state_of(key) in {BlockState.ABSENT, BlockState.READY}, key
    for number, tier in enumerate(world.runtime.tiers):
        is_cut_off = world.links[number].audit().breaker is BreakerState.DISABLED
        assert is_cut_off == world.fenced[number] or number in world.broken_links
        if not world.fenced[number]:
            assert tier.actor.is_idle()
    for tier in bounded_tiers(world):
        if not world.fenced[world.runtime.tiers.index(tier)]:
            held = tier.bounded.audit()
            assert not held.in_use
            assert not held.storing
            assert not held.removing
