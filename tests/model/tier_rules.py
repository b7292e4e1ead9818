"""Rules: what arrives from tiers, what good and bad ones do, and how they break and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disk_tier import DiskTier
from fakes import FakeDevice
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from rules import PICKS, is_due, pick
from time_rules import TimeRules
from world import KEYS

from kvtier.core import wire
from kvtier.core.generations import ORIGINAL, mark_of, mark_of_name, marked, unmarked
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import block_digest
from kvtier.tier import driver_messages as d

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key
    from tests.support.cell import Batch, TestTier

WORK_MAX = 400  # what a tier that answers everything does before the model gives up on it


class TierRules(TimeRules):
    """The runtime, seen from its tiers."""

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
        """Let a tier work until nothing is left, or nothing but other batches."""
        world = self.world
        tier = world.runtime.tiers[number]
        for _ in range(WORK_MAX):
            mailbox = next((each for each in tier.mailboxes if each.waiting), None)
            if mailbox is not None:
                world.cell.deliver(mailbox)
            elif not world.devices[number].work(only):
                if not tier.inbox.waiting:
                    break
                world.cell.deliver(tier.inbox)  # the link may give it more now
                self._run_engine()
            tier = world.runtime.tiers[number]  # another, once a disk is open again
        else:
            raise AssertionError(f"{tier.name} never comes to an end")

    # --- tiers, as they may be ---

    @precondition(lambda self: any(self._batches(each) for each in range(len(self.world.devices))))
    @rule(tier=PICKS, batch=PICKS)
    def a_backend_copies_a_piece(self, tier: int, batch: int) -> None:
        """Also one whose job was given up long ago, and one whose tier broke."""
        number = pick([e for e in range(len(self.world.devices)) if self._batches(e)], tier)
        self.world.devices[number].copy(pick(self._batches(number), batch))

    def _batches(self, number: int) -> list[Batch]:
        device = self.world.devices[number]
        return device.tier.batches + device.orphans if isinstance(device, FakeDevice) else []

    def _fakes_at_work(self) -> list[int]:
        """Return the tiers that have batches, and whose backend the test plays."""
        return [
            number
            for number, device in enumerate(self.world.devices)
            if isinstance(device, FakeDevice) and device.tier.batches
        ]

    @precondition(lambda self: self._fakes_at_work())
    @rule(tier=PICKS, batch=PICKS, failing=st.sampled_from([0, 0, 0, 0xFF, 1, 2, 5]))
    def a_part_ends(self, tier: int, batch: int, failing: int) -> None:
        """It succeeds, fails, or fails in part; in any order, however late."""
        number, held = self._busy_tier(tier)
        chosen = pick(held.batches, batch)
        held.answer(chosen, self.world.devices[number].end(chosen, failing))

    @is_due("wrong", 6, lambda self: self._fakes_at_work())
    @rule(tier=PICKS, batch=PICKS, count=st.integers(0, 3), twice=st.booleans())
    def a_part_ends_with_the_wrong_number_of_answers(
        self, tier: int, batch: int, count: int, twice: bool
    ) -> None:
        """Or twice."""
        number, held = self._busy_tier(tier)
        chosen = pick(held.batches, batch)
        outcomes = self.world.devices[number].end(chosen, 0)
        if not twice:
            # A store may have kept its blocks, which count as failed: they are removed again.
            # What a load found damaged is gone, and the tier can't know.
            self.world.exact[number] &= not isinstance(chosen, d.LoadBatch)
            outcomes = (outcomes * 3)[:count]
        held.answer(chosen, outcomes)
        if twice:
            held.answer(chosen, outcomes)

    def _busy_tier(self, tier: int) -> tuple[int, TestTier]:
        number = pick(self._fakes_at_work(), tier)
        return number, self.world.runtime.tiers[number]

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
        if isinstance(chosen, wire.TierRestarted | wire.TierFenced):
            return
        world.honest[number] = False
        if doubles:
            tiers[number].inbox.post(chosen)
        elif isinstance(chosen, wire.JobEnded):
            outcomes = (chosen.outcomes * 3)[:count]
            if len(outcomes) != len(chosen.outcomes):
                waiting[index] = wire.JobEnded(job=chosen.job, outcomes=outcomes, seconds=0.0)
        elif isinstance(chosen, wire.ProbeAnswer):
            present = (chosen.present * 3)[:count]
            waiting[index] = wire.ProbeAnswer(probe=chosen.probe, present=present)

    @is_due("stray", 12)
    @rule(
        tier=PICKS,
        number=st.sampled_from([0, -1, 1_000_000]),
        is_probe=st.booleans(),
    )
    def a_tier_ends_what_nobody_asked_for(self, tier: int, number: int, is_probe: bool) -> None:
        """It is counted and ignored."""
        inbox = pick(self.world.runtime.tiers, tier).inbox
        if is_probe:
            inbox.post(wire.ProbeAnswer(probe=number, present=(True,)))
        else:
            inbox.post(wire.JobEnded(job=number, outcomes=(), seconds=1.0))

    @is_due("full", 10)
    @rule(tier=PICKS)
    def a_mailbox_is_full_or_has_room_again(self, tier: int) -> None:
        """The link is refused; nothing is lost but time."""
        number = tier % len(self.world.devices)
        if not (self.world.dead[number] or self.world.fenced[number]):
            held = self.world.runtime.tiers[number]
            held.is_full = not held.is_full

    @is_due("somebody", 4, lambda self: any(e.capacity is None for e in self.world.shape.tiers))
    @rule(tier=PICKS, key=st.sampled_from(KEYS), weights=PICKS, appears=st.booleans())
    def somebody_else_changes_a_shared_tier(
        self, tier: int, key: Key, weights: int, appears: bool
    ) -> None:
        """Another engine stores a block, or removes one; perhaps one with other weights."""
        world = self.world
        marks = [world.mark, ORIGINAL, mark_of_name("a"), mark_of_name("b")]
        (name,) = marked((key,), pick(marks, weights))
        shared = [each for each, shape in enumerate(world.shape.tiers) if shape.capacity is None]
        device = world.devices[pick(shared, tier)]
        if appears:
            data = world.new_bytes(key)
            world.committed[name].add(data)
            device.blocks[name] = (data, block_digest(name, memoryview(data)))
        elif device.blocks.pop(name, None):
            device.taken.add(name)

    @is_due("rot", 8, lambda self: any(each.blocks for each in self.world.devices))
    @rule(tier=PICKS, which=PICKS)
    def a_copy_rots(self, tier: int, which: int) -> None:
        """A block that fails its check is a miss. Its first removal may fail."""
        device = pick([each for each in self.world.devices if each.blocks], tier)
        name = pick(list(device.blocks), which)
        device.damage(name)
        if which % 2 and isinstance(device, FakeDevice):
            device.stuck.add(name)

    # --- the life of a tier ---

    @is_due("break", 20)
    @rule(tier=PICKS)
    def a_tier_breaks(self, tier: int) -> None:
        """Its actor raised. Its threads may still copy."""
        number = tier % len(self.world.devices)
        if not (self.world.dead[number] or self.world.fenced[number]):
            self._break(number)

    def _break(self, number: int) -> None:
        world = self.world
        held = world.runtime.tiers[number]
        world.dead[number] = True
        world.devices[number].break_down()
        held.end()
        held.inbox.post(wire.TierBroke(reason="the model wants it"))

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
        world.devices[number].fence()
        world.at_tier[number].clear()
        world.runtime.tiers[number].inbox.post(wire.TierFenced())

    @precondition(lambda self: any(self.world.fenced))
    @rule(tier=PICKS, keeps=st.booleans(), more=st.integers(0, 2))
    def a_tier_is_restarted(self, tier: int, keeps: bool, more: int) -> None:
        """A fresh cell serves it. Only after the link knows that the old one is fenced.

        A tier of its own may have kept its blocks; then its backend says so. It may have ``more``:
        the run before had a larger capacity.
        """
        fenced = [each for each, is_fenced in enumerate(self.world.fenced) if is_fenced]
        self._restart(pick(fenced, tier), keeps=keeps, more=more)

    @is_due("new life", 10, lambda self: self._with_blocks_of_their_own())
    @rule(tier=PICKS, more=st.integers(0, 2))
    def a_tier_breaks_and_is_back_at_once(self, tier: int, more: int) -> None:
        """It has what it had, and begins to tell of it."""
        number = pick(self._with_blocks_of_their_own(), tier)
        self._break(number)
        self._fence(number)
        self._deliver(number)
        self._restart(number, keeps=True, more=more)
        self._deliver(number)

    def _deliver(self, number: int) -> None:
        """Deliver all between a tier and the engine; what is at the backend stays there."""
        tier = self.world.runtime.tiers[number]
        while waiting := [each for each in (tier.inbox, *tier.mailboxes) if each.waiting]:
            self.world.cell.deliver(waiting[0])
            self._run_engine()

    def _with_blocks_of_their_own(self) -> list[int]:
        world = self.world
        return [
            number
            for number in self._own_fakes()
            if world.devices[number].blocks and not (world.dead[number] or world.fenced[number])
        ]

    def _restart(self, number: int, *, keeps: bool, more: int) -> None:
        world = self.world
        link = world.links[number]
        inbox = world.runtime.tiers[number].inbox
        if inbox.waiting or link.audit().breaker is not BreakerState.DISABLED:
            return
        device = world.devices[number]
        if isinstance(device, DiskTier):
            if device.life is None:
                device.begin()  # it serves once its disk is open
            return
        is_shared = world.shape.tiers[number].capacity is None
        world.serve_anew(number)
        device.restart(keeps=keeps or is_shared, more=0 if is_shared or not keeps else more)

    @precondition(lambda self: self._with_untold())
    @rule(tier=PICKS, count=st.integers(1, 3))
    def a_backend_tells_more_of_what_it_has_from_before(self, tier: int, count: int) -> None:
        """Stores and removals go on meanwhile."""
        self.world.devices[pick(self._with_untold(), tier)].tell(count)

    @is_due("lose", 8, lambda self: self._own_fakes())
    @rule(tier=PICKS, key=st.sampled_from(KEYS))
    def a_backend_loses_a_block(self, tier: int, key: Key) -> None:
        """A region of it went bad, or the block is too old. It says so; or it had it never."""
        world = self.world
        number = pick(self._own_fakes(), tier)
        there = world.devices[number].blocks
        name = next((each for each in there if key in unmarked([each], mark_of(each))), key)
        self._lose(number, name)

    @precondition(lambda self: self._with_untold())
    @rule(tier=PICKS, which=PICKS)
    def a_backend_loses_a_block_that_it_has_not_told_of(self, tier: int, which: int) -> None:
        """It was there when the list was taken down that is still being told."""
        number = pick(self._with_untold(), tier)
        self._lose(number, pick(self.world.devices[number].untold, which))

    def _lose(self, number: int, name: Key) -> None:
        world = self.world
        world.devices[number].lose(name)
        if not (world.dead[number] or world.fenced[number]):
            world.runtime.tiers[number].mailbox.post(d.ContentsLost(keys=(name,)))

    def _with_untold(self) -> list[int]:
        return [each for each in self._own_fakes() if self.world.devices[each].untold]

    def _own_fakes(self) -> list[int]:
        """Return the tiers with a capacity whose backend the test plays."""
        shapes = enumerate(self.world.shape.tiers)
        return [number for number, shape in shapes if shape.capacity and not shape.disk]
