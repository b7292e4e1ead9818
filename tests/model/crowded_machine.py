"""The state machine of ``machine``: little but requests that take one another's room."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from machine import KVTierSpec
from world import Shape, TierShape


class KVTierCrowdedSpec(KVTierSpec):
    """Hardly anything but stores and evictions, so that whole prefixes meet in few slots."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = st.builds(
        Shape, slot_count=st.sampled_from([8, 7, 9, 10]), tiers=st.just((TierShape(),))
    )

    a_backend_copies_a_piece = None
    a_backend_loses_a_block = None
    a_backend_loses_a_block_that_it_has_not_told_of = None
    a_backend_tells_more_of_what_it_has_from_before = None
    a_completion_from_before_a_reset_is_ignored = None
    a_mailbox_is_full_or_has_room_again = None
    a_message_to_the_engine_is_garbled_or_doubled = None
    a_part_ends_with_the_wrong_number_of_answers = None
    a_prefix_of_all_groups_is_reserved = None
    a_request_comes_and_is_promoted_for = None
    a_request_does_again_what_a_reset_made_void = None
    a_request_looks_up_its_prefix_in_one_go = None
    a_request_looks_up_one_block = None
    a_reset_is_flushed_at_once = None
    a_tier_breaks = None
    a_tier_breaks_and_is_back_at_once = None
    a_tier_ends_what_nobody_asked_for = None
    a_tier_is_restarted = None
    all_comes_to_rest = None
    an_unknown_request_is_never_served_from_a_tier = None
    somebody_else_changes_a_shared_tier = None
    the_clock_jumps = None
    the_gpu_writes_a_piece = None


class KVTierCrowdAfterResetSpec(KVTierCrowdedSpec):
    """As that, and what ends after a reset comes back once its requests have begun again."""

    a_completion_from_before_a_reset_is_ignored = (
        KVTierSpec.a_completion_from_before_a_reset_is_ignored
    )
    a_request_does_again_what_a_reset_made_void = (
        KVTierSpec.a_request_does_again_what_a_reset_made_void
    )
