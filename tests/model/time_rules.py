"""Rules: steps end, time passes, and everything is forgotten at once."""

from __future__ import annotations

import pytest
from fakes import GpuStore
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from rules import PICKS, SCHEDULES, Rules, is_due, pick
from world import KEYS

from kvtier.core import wire
from kvtier.core.block_state import BlockState

BUSY_S = 2.5


class TimeRules(Rules):
    """Steps, the clock, resets."""

    @is_due("jump", 8)
    @rule(seconds=st.sampled_from([0.4, 1.1, BUSY_S, 7.0, 100.0]), schedule=SCHEDULES)
    def the_clock_jumps(self, seconds: float, schedule: bytes) -> None:
        """Past some deadlines, or past all. One jump is of a machine that runs nothing of tiers."""
        if seconds == BUSY_S:
            for tier, held in enumerate(self.world.runtime.tiers):
                if not (self.world.dead[tier] or held.inbox.waiting):
                    held.inbox.post(wire.TierNotRun(seconds))
                    self.world.cell.deliver(held.inbox)
        self.a_step_ends(seconds, schedule)

    @rule(seconds=st.just(0.01), schedule=SCHEDULES)
    def a_step_ends(self, seconds: float, schedule: bytes) -> None:
        """The clock may have jumped meanwhile."""
        world = self.world
        # What the scheduler has not ended a step for is not the tier's to answer yet.
        for key in world.primary.audit().directory.unsent:
            world.pending_since.pop(key, None)
        world.pass_time(seconds)
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

    @pytest.mark.promise(7)
    @is_due("reset", 15)
    @rule(schedule=SCHEDULES, weights=st.sampled_from([None, None, "a", "b"]))
    def a_reset_forgets_everything_and_waits_for_nobody(
        self, schedule: bytes, weights: str | None = None
    ) -> None:
        """Tiers may hang and the GPU may go on: it returns, and a new epoch begins.

        The weights may be others, or those of some time before: ``World.name`` knows.
        """
        world = self.world
        # What was a HIT, or stood behind a gap, belongs to the old epoch.
        for request in world.requests.values():
            request.hits.clear()
            request.behind.clear()
        world.gpu.reset()
        world.in_order(schedule)
        world.facade.reset(weights_version=weights)
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
        """It has released all that it was given before the last reset."""
        self.world.gpu.flush()
        self.world.in_order(schedule)
        self.world.facade.on_reset_flushed()

    @precondition(lambda self: self.world.gpu.late)
    @rule(which=PICKS, succeeds=st.booleans(), schedule=SCHEDULES)
    def a_completion_from_before_a_reset_is_ignored(
        self, which: int, succeeds: bool, schedule: bytes
    ) -> None:
        """A scheduler may drop it, as vLLM does; one that doesn't does no harm.

        Its request may be storing or loading the same key again: the epoch tells them apart.
        """
        world = self.world
        work = pick(world.gpu.late, which)
        world.gpu.late.remove(work)
        before = dict(world.states)
        world.in_order(schedule)
        if isinstance(work, GpuStore):
            world.facade.complete_store(
                [work.key], work.request, success=succeeds, epoch=work.epoch
            )
        else:
            world.facade.complete_load(work.keys, work.request, epoch=work.epoch)
        if not schedule:
            assert world.states == before
