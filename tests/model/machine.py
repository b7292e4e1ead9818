"""The state machine: what a scheduler, its GPU, and good and bad tiers may do, in any order.

It is put together from the rules of ``gpu_rules``, ``lookup_rules``,
``tier_rules`` and ``time_rules``, and the invariants of ``promises``. Here
stands how a run begins, and what must hold when all has come to rest.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from gpu_rules import GpuRules
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from promises import (
    Promises,
    assert_tiers_count_what_their_backends_have,
    is_running,
    p10_at_rest_nothing_is_pinned_or_quarantined,
)
from rules import is_due
from world import KEYS, PATHS, Shape, TierShape, World

from kvtier.core.block_state import ANSWERS, BlockState
from kvtier.engine.link.circuit_breaker import BreakerState, Work

TIERS = (TierShape(capacity=3), TierShape(), TierShape(request_level=True))
SHAPES = st.builds(
    Shape,
    slot_count=st.sampled_from([6, 4, 5, 7, 8, 12]),
    tiers=st.sampled_from(
        [
            TIERS,
            TIERS[:2],
            (TierShape(), TierShape(capacity=5, batches_max=1)),
            (TierShape(capacity=2, request_level=True), TierShape(batches_max=1)),
            (TierShape(admission="second_touch"), TierShape(capacity=4)),
        ]
    ),
    job_blocks_max=st.integers(1, 4),
    store_threshold=st.sampled_from([0, 0, 0, 2]),
    cascade_slots_fraction_max=st.sampled_from([1.0, 0.5]),
    abandoned_slots_fraction_max=st.sampled_from([1.0, 0.3]),
    jobs_in_flight_max=st.sampled_from([32, 4]),
    breaker_failures_max=st.sampled_from([3, 1, 100]),
    store_reserve_fraction=st.sampled_from([1 / 16, 0.4]),
    on_reset=st.sampled_from(["keep", "keep", "new_generation"]),
    weights_version=st.sampled_from(["", "", "a"]),
)


class KVTierSpec(Promises, GpuRules, RuleBasedStateMachine):
    """The runtime, seen from a scheduler and from its tiers."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = SHAPES

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
            world.committed[world.name(store.key)].add(store.data)
            world.facade.complete_store([store.key], store.request, epoch=store.epoch)
        for load in [each for each in world.gpu.loads if not each.is_stale]:
            world.gpu.loads.remove(load)
            world.facade.complete_load(load.keys, load.request, epoch=load.epoch)
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
        p10_at_rest_nothing_is_pinned_or_quarantined(world)
        assert_tiers_count_what_their_backends_have(world)
        self.p12_a_healthy_tier_gets_what_was_deferred()
        self._assert_a_healthy_tier_serves_within_two_steps()

    def p12_a_healthy_tier_gets_what_was_deferred(self) -> None:
        """What is still in host memory; or it is known to be lost."""
        world = self.world
        refused = [link.counts.stores_rejected + link.counts.failed for link in world.links]
        for _ in range(len(KEYS)):
            waits = {
                tier
                for tier, keys in world.primary.audit().deferred.items()
                if keys and self._takes_stores(tier, refused[tier])
            }
            if not waits:
                return
            self.a_step_ends(1.0, b"")
            self.tiers_do_all_they_were_asked()
            world.cell.settle()
        raise AssertionError(f"tiers {waits} never get what was deferred")

    def _takes_stores(self, tier: int, refused: int) -> bool:
        """Tell whether a tier is in use, and has refused no more than that."""
        link, held = self.world.links[tier], self.world.runtime.tiers[tier]
        is_closed = link.audit().breakers[Work.STORE] is BreakerState.CLOSED
        is_healthy = is_closed and link.counts.stores_rejected + link.counts.failed == refused
        return is_healthy and not held.is_full and not self.world.fenced[tier]

    def _assert_a_healthy_tier_serves_within_two_steps(self) -> None:
        """From the first lookup to a HIT: one step to ask, one to load."""
        world = self.world
        healthy = [
            number
            for number, link in enumerate(world.links)
            if link.audit().breaker is BreakerState.CLOSED
            and not world.runtime.tiers[number].is_full
            and not world.fenced[number]
            and not link.audit().jobs
        ]
        if len(healthy) < len(world.links):
            return
        # One that the first tier has, and that no other is wrongly thought to have instead.
        thought = world.primary.audit().directory.known
        first = world.devices[0]
        known = [
            key
            for key in KEYS
            if world.states[key] is BlockState.ABSENT
            and first.is_sound(world.name(key))
            and (key not in thought or thought[key] & 1)
            and (
                self.world.shape.tiers[0].capacity is None
                or world.name(key) in first.tier.bounded.audit().resident
            )
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

    def p6_each_lookup_ends_though_all_tiers_hang(self) -> None:
        """If all tiers hang from now on, each lookup still ends with True or False."""
        world = self.world
        world.in_order(b"")
        while world.gpu.stores:
            self.stores_fail(0, 4, b"") if not world.gpu.stores[
                0
            ].is_stale else self.the_gpu_is_flushed(b"")
        # Every key is asked for in each step, where vLLM's scheduler ends with the first that is
        # not there: so what was refused for want of room is loaded later, a key after the other.
        asked = {key for request in world.requests.values() for key in request.path}
        bound = 3 * len(world.links) * (len(world.requests) + len(asked) + 1)
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
        self.p6_each_lookup_ends_though_all_tiers_hang()
        self._rest()
