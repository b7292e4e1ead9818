"""Rules: what a disk may do to the tier that lives on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_rules import GpuRules
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from rules import PICKS, is_due, pick
from stepped_device import WRITES
from world import PATHS

from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.core.generations import mark_of, unmarked
from kvtier.engine.link.circuit_breaker import BreakerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disk_tier import DiskTier
    from stepped_device import Call

    from kvtier.plugin_api.keys import Key

CALLS_MAX = 40


class DiskRules(GpuRules):
    """Every call of every disk moves its bytes, and ends, in any order; or never does."""

    @precondition(lambda self: self._disks_at_work())
    @rule(disk=PICKS, call=PICKS, piece=st.integers(0, 2))
    def a_disk_moves_a_piece(self, disk: int, call: int, piece: int) -> None:
        """In any order: also so that what is written last arrives first."""
        pick(self._disks_at_work(), disk).move(call, piece)

    @precondition(lambda self: self._disks_at_work())
    @rule(disk=PICKS, calls=st.lists(PICKS, min_size=1, max_size=4))
    def calls_of_a_disk_end(self, disk: int, calls: list[int]) -> None:
        """Reads, writes and allocations, one after the other."""
        chosen = pick(self._disks_at_work(), disk)
        for call in calls:
            if chosen.calls:
                chosen.end(call)

    @is_due("sick", 15)
    @rule(disk=PICKS, region=PICKS)
    def a_region_turns_sick(self, disk: int, region: int) -> None:
        """It gives EIO from now on."""
        chosen = pick(self.world.disks, disk)
        chosen.sick.add(region % chosen.shape.regions)

    @is_due("well", 10, lambda self: any(each.sick for each in self.world.disks))
    @rule(disk=PICKS)
    def regions_are_well_again(self, disk: int) -> None:
        """What was written to them before is there again."""
        pick([each for each in self.world.disks if each.sick], disk).sick.clear()

    @is_due("room", 12)
    @rule(disk=PICKS)
    def a_disk_has_no_room_or_has_it_again(self, disk: int) -> None:
        """No region can be allocated that was not yet."""
        chosen = pick(self.world.disks, disk)
        chosen.set_room(has_room=not chosen.has_room)

    @is_due("kill", 10)
    @rule(
        disk=PICKS,
        path=st.sampled_from(PATHS),
        calls=st.integers(0, 12),
        until=st.sampled_from(["table", "blocks", "another table", ""]),
        torn=st.tuples(PICKS, st.lists(st.integers(0, 2), min_size=1, max_size=4)),
        seed=st.one_of(st.none(), st.integers(0, 1 << 16)),
        comes_back=st.booleans(),
    )
    def a_tier_is_killed(
        self,
        disk: int,
        path: tuple[Key, ...],
        calls: int,
        until: str,
        torn: tuple[int, list[int]],
        seed: int | None,
        comes_back: bool,
    ) -> None:
        """Its process is gone in the midst of writes; with a seed, its disk lost power too."""
        self.a_disk_is_given_blocks(disk, [path], 0, False)
        world = self.world
        chosen = pick(world.disks, disk)
        self._work(chosen, CALLS_MAX if until else calls, [], until)
        number = world.devices.index(chosen)
        if world.dead[number]:
            self._fence(number)
        writes = [at for at, call in enumerate(chosen.calls) if call.kind in WRITES]
        write, pieces = torn
        for piece in pieces if writes else ():
            chosen.move(pick(writes, write), piece)
        chosen.kill(seed)
        if not world.fenced[number]:
            world.fenced[number] = True
            world.at_tier[number].clear()
            held = world.runtime.tiers[number]
            held.end()
            held.inbox.post(wire.TierBroke(reason="killed"))
            held.inbox.post(wire.TierFenced())
        if comes_back:
            self.a_disk_is_opened_again(0, True)

    @precondition(lambda self: any(self._is_shut(each) for each in self.world.disks))
    @rule(disk=PICKS, in_one_go=st.booleans())
    def a_disk_is_opened_again(self, disk: int, in_one_go: bool) -> None:
        """What it holds is recovered, in one go or call by call."""
        world = self.world
        chosen = pick([each for each in world.disks if self._is_shut(each)], disk)
        number = world.devices.index(chosen)
        if world.dead[number]:
            self._fence(number)
        inbox = world.runtime.tiers[number].inbox
        while inbox.waiting:
            world.cell.deliver(inbox)
        self._run_engine()
        if world.links[number].audit().breaker is BreakerState.DISABLED:
            chosen.begin()
            while in_one_go and not chosen.is_open:
                chosen.work(object)

    @rule(
        disk=PICKS,
        paths=st.lists(st.sampled_from(PATHS), min_size=1, max_size=4),
        calls=st.integers(0, CALLS_MAX),
        reads_hang=st.booleans(),
    )
    def a_disk_is_given_blocks(
        self, disk: int, paths: list[tuple[Key, ...]], calls: int, reads_hang: bool
    ) -> None:
        """Prefixes are stored anew, as far as some calls go. Reads from before may hang."""
        world = self.world
        chosen = pick(world.disks, disk)
        if reads_hang and chosen.blocks:
            self.a_disk_is_asked_for_what_it_has(disk, calls, 1)
        hanging = list(chosen.calls) if reads_hang else []
        for path in paths:
            if any(world.states[key] is BlockState.READY for key in path):
                self.a_reset_is_flushed_at_once(b"")
            while len(world.requests) >= 4:
                self.a_request_finishes(0, True, b"")
            self.a_request_comes_and_stores_all(path, b"")
            self._work(chosen, calls, hanging)

    def _work(self, chosen: DiskTier, calls: int, hanging: Sequence[Call], until: str = "") -> None:
        """End so many of a disk's calls, or fewer if one of a kind is under way before.

        "another table": one of a region that holds blocks already.
        """
        for _ in range(calls):
            while waiting := [each for each in chosen.tier.mailboxes if each.waiting]:
                self.world.cell.deliver(waiting[0])
            running = [at for at, call in enumerate(chosen.calls) if call not in hanging]
            if not running or any(self._is(call, until, chosen) for call in chosen.calls):
                break
            chosen.end(running[0])

    def _is(self, call: Call, kind: str, disk: DiskTier) -> bool:
        if kind == "another table":
            return call.kind == "table" and disk.holds_blocks_in(call.region)
        return call.kind == kind

    @precondition(lambda self: any(each.blocks for each in self.world.disks))
    @rule(disk=PICKS, which=PICKS, count=st.integers(1, 4))
    def a_disk_is_asked_for_what_it_has(self, disk: int, which: int, count: int) -> None:
        """Its reads begin; when they end is another rule's."""
        world = self.world
        chosen = pick([each for each in world.disks if each.blocks], disk)
        keys = sorted(unmarked((e for e in chosen.blocks if mark_of(e) == world.mark), world.mark))
        if not keys:
            return
        path = tuple(pick(keys, which + step) for step in range(min(count, len(keys))))
        if any(world.states[key] is BlockState.READY for key in path):
            self.a_reset_is_flushed_at_once(b"")
        self.a_request_comes_and_is_promoted_for(path, len(path), b"")

    def _is_shut(self, disk: DiskTier) -> bool:
        number = self.world.devices.index(disk)
        return self.world.dead[number] or (self.world.fenced[number] and disk.life is None)

    def _disks_at_work(self) -> list[DiskTier]:
        return [each for each in self.world.disks if each.calls]
