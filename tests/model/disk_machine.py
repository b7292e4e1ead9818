"""The state machine of ``machine``, with a tier on a real disk log."""

from __future__ import annotations

from typing import ClassVar

from disk_promises import DiskPromises, assert_disks_at_rest
from disk_rules import DiskRules
from hypothesis import strategies as st
from machine import KVTierSpec
from world import DiskShape, Shape, TierShape, disk_tier

SHAPES = st.builds(
    Shape,
    slot_count=st.sampled_from([6, 4, 8, 12]),
    tiers=st.sampled_from(
        [
            (disk_tier(DiskShape(regions=4, slots=2)),),
            (disk_tier(DiskShape(regions=4, slots=3, own_page_slots=4, ttl_s=60), batches_max=1),),
            (disk_tier(DiskShape(regions=4, slots=4, own_page_slots=3)), TierShape()),
            (TierShape(capacity=4), disk_tier(DiskShape(regions=6, slots=2, ttl_s=60))),
            (disk_tier(DiskShape(regions=9, slots=1)),),  # two regions are opened ahead
        ]
    ),
    job_blocks_max=st.integers(1, 4),
    jobs_in_flight_max=st.sampled_from([32, 4]),
    breaker_failures_max=st.sampled_from([100, 3]),
    on_reset=st.sampled_from(["keep", "keep", "new_generation"]),
)


class KVTierOnDiskSpec(DiskPromises, DiskRules, KVTierSpec):
    """The runtime with a disk, seen from a scheduler, from its tiers and from the disk."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = SHAPES

    # Rules that have nothing to do with what is behind a tier: KVTierSpec has them.
    a_message_to_the_engine_is_garbled_or_doubled = None
    a_mailbox_is_full_or_has_room_again = None
    a_request_touches = None
    a_tier_ends_what_nobody_asked_for = None
    an_unknown_request_is_never_served_from_a_tier = None

    def _rest(self) -> None:
        super()._rest()
        assert_disks_at_rest(self.world)


class KVTierOnDyingDiskSpec(KVTierOnDiskSpec):
    """Hardly anything but stores and deaths, so that deaths come in every moment of a store."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = st.builds(
        Shape,
        slot_count=st.just(8),
        tiers=st.sampled_from([2, 5]).map(
            lambda own: (disk_tier(DiskShape(regions=4, slots=4, own_page_slots=own)),)
        ),
        job_blocks_max=st.integers(1, 4),
        breaker_failures_max=st.just(100),
    )

    a_copy_rots = None
    a_disk_has_no_room_or_has_it_again = None
    a_request_loads_the_prefix_that_is_here = None
    a_request_does_again_what_a_reset_made_void = None
    a_load_completes = None
    a_region_turns_sick = None
    a_request_looks_up_its_prefix_in_one_go = None
    a_request_looks_up_one_block = None
    a_tier_breaks = None
    all_comes_to_rest = None
    the_clock_jumps = None
    the_gpu_writes_a_piece = None
