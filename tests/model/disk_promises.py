"""What must hold of a tier on a disk. Each is an invariant named by what it proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis.stateful import invariant, precondition
from promises import counted_by, is_running, served_by
from settled import knows_contents

from kvtier_backends.disk.backend import SWEEPS_PER_TTL, TICK_S
from kvtier_backends.disk.log.regions import WRITE_AMPLIFICATION_MAX, RegionState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from disk_tier import DiskTier
    from world import World


def open_disks(world: World) -> Iterator[DiskTier]:
    """Yield those that serve."""
    return (each for each in world.disks if each.life is not None and each.life.is_open)


class DiskPromises:
    """A mixin for a state machine with a ``world`` that has disks."""

    world: World

    @precondition(is_running)
    @invariant()
    def no_wrong_block_leaves_the_log_and_no_byte_is_written_while_it_is_read(self) -> None:
        """What the driver's own check of digests would turn into a miss shows here."""
        for disk in self.world.disks:
            assert not disk.wrong, disk.wrong
            assert disk.life is None or not disk.life.device.wrong, disk.life.device.wrong

    @precondition(is_running)
    @invariant()
    def what_the_index_names_is_whole_on_the_disk_unless_the_disk_lost_it(self) -> None:
        for disk in open_disks(self.world):
            for key, location in disk.blocks.items():
                is_excused = (key, disk.digest_at(location)) in disk.excused
                assert is_excused or disk.is_whole(key, location), key

    @precondition(is_running)
    @invariant()
    def the_index_names_no_copy_that_was_removed_or_that_nobody_stored(self) -> None:
        for disk in open_disks(self.world):
            for key, location in disk.blocks.items():
                digest = disk.digest_at(location)
                assert digest in disk.copies.given.get(key, ()), key
                assert digest not in disk.copies.gone.get(key, ()), key

    @precondition(is_running)
    @invariant()
    def a_disk_keeps_within_its_capacity(self) -> None:
        for disk in open_disks(self.world):
            assert disk.life is not None
            log = disk.life.log
            assert len(disk.blocks) == len(log.index)
            assert len(log.index) + log.appending <= disk.plan.capacity_blocks

    @precondition(is_running)
    @invariant()
    def the_index_and_the_regions_hold_their_own_invariants(self) -> None:
        for disk in open_disks(self.world):
            assert disk.life is not None
            disk.life.log.index.assert_invariants()
            disk.life.log.regions.assert_invariants()

    @precondition(is_running)
    @invariant()
    def what_is_too_old_is_swept_away(self) -> None:
        for disk in open_disks(self.world):
            ttl_s = 0 if disk.life.is_ending else disk.shape.ttl_s
            round_s = ttl_s / SWEEPS_PER_TTL + 3 * TICK_S
            since = disk.see_blocks()
            for key, location in disk.blocks.items() if ttl_s else ():
                stored_s = disk.life.log.index.record(location).stored_s
                is_too_old = stored_s < disk.now - ttl_s - round_s
                assert not is_too_old or disk.now - since[key] < round_s, key

    @precondition(is_running)
    @invariant()
    def no_region_is_free_while_it_is_read(self) -> None:
        for disk in open_disks(self.world):
            assert disk.life is not None
            for call in disk.calls:
                for transfer in call.transfers if call.kind == "read" else ():
                    state = disk.life.log.regions.state(transfer.region)
                    assert state is not RegionState.FREE, (transfer.region, state)

    @precondition(is_running)
    @invariant()
    def blocks_are_reinserted_only_as_far_as_the_budget_goes(self) -> None:
        for disk in open_disks(self.world):
            assert disk.life is not None
            counts = disk.life.backend.counters()
            earned = (WRITE_AMPLIFICATION_MAX - 1) * counts.get("bytes_stored", 0)
            assert counts.get("bytes_reinserted", 0) <= earned + disk.credit_bytes + 1

    @precondition(is_running)
    @invariant()
    def a_link_knows_what_the_index_has_once_all_is_said(self) -> None:
        world = self.world
        for disk in open_disks(world):
            number = world.devices.index(disk)
            if not knows_contents(world, number) or disk.is_at_work() or disk.tier.batches:
                continue
            here = set(disk.blocks)
            counted = counted_by(disk.tier)
            assert counted == here, f"the tier knows {counted}, the index {here}"
            here = served_by(disk.tier)
            thought = world.primary.audit().directory.known
            known = {key for key, tiers in thought.items() if tiers >> number & 1}
            # It forgets what it could not be given, and asks again. It never knows too much.
            assert known <= here, f"the engine knows {known}, the index {here}"
            world.in_order(b"")
            world.drain_events()
            told = world.folded[number]
            assert told == here, f"the link was told of {told}, the index has {here}"


def assert_disks_at_rest(world: World) -> None:
    """At rest no call runs, and nothing is pinned or held for one."""
    for disk in open_disks(world):
        assert disk.life is not None
        log = disk.life.log
        assert disk.life.is_quiet()
        assert log.appending == 0
        assert not any(log.regions._readers)
        assert not any(log.regions._writers)
        assert sum(map(log.index.live, range(disk.shape.regions))) == len(log.index)
