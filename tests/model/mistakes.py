"""All mistakes that the model must catch, each with the machine that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import deciding_mutations
import server_mutations
from crowded_machine import KVTierCrowdAfterResetSpec, KVTierCrowdedSpec
from deciding_machine import KVTierDecidingSpec
from disk_machine import KVTierOnDiskSpec, KVTierOnDyingDiskSpec
from disk_mutations import DISK_MUTATIONS
from eviction_mutations import MUTATIONS  # which has all of ``mutations`` too
from machine import KVTierSpec
from server_machine import KVTierOnServersSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SHOWN_BY_A_CROWD = {
    "forget_to_tell_the_policy_what_went_instead",
    "forget_who_else_shares_a_prefix",
    "take_the_policys_word_for_what_goes_first",
}
SHOWN_AFTER_A_RESET = {"ignore_the_epoch_of_a_gpu_store"}
SHOWN_BY_A_DEATH = {
    "bring_a_removed_block_back",
    "overwrite_the_only_version_of_a_table",
    "skip_the_checksum_of_a_table",
    "write_pages_of_their_own_before_the_blocks",
}
#: The seed to begin a search with, where those before it take long.
SOONER = {
    "believe_in_what_ends_without_a_server": 4,
    "bring_a_removed_block_back": 4,
    "count_on_no_room_for_a_lost_block_that_is_stored_anew": 6,
    "count_what_was_removed_before_it_was_told": 2,
    "drop_the_pin_of_a_region_that_is_read": 5,
    "forget_who_else_shares_a_prefix": 12,
    "free_a_slot_whose_fill_is_abandoned": 2,
    "ignore_the_epoch_of_a_gpu_load": 4,
    "ignore_the_epoch_of_a_promotion": 7,
    "keep_what_is_too_old": 3,
    "leave_what_a_failed_call_left": 3,
    "overwrite_the_only_version_of_a_table": 5,
    "recover_the_older_copy": 5,
    "reinsert_without_a_budget": 39,
    "skip_the_checksum_of_a_table": 11,
    "take_damaged_blocks_for_removed": 6,
    "take_the_next_cell_for_unconnected": 6,
    "tell_nobody_what_is_lost": 3,
    "write_pages_of_their_own_before_the_blocks": 2,
}


@dataclass(frozen=True)
class Mistake:
    """One change of the real code, for as long as the context of ``made()`` lasts."""

    made: Callable[[], AbstractContextManager[None]]
    spec: type[KVTierSpec]
    first_seed: int


def _spec_of(name: str) -> type[KVTierSpec]:
    if name in deciding_mutations.MUTATIONS:
        return KVTierDecidingSpec
    if name in server_mutations.MUTATIONS:
        return KVTierOnServersSpec
    if name in DISK_MUTATIONS:
        return KVTierOnDyingDiskSpec if name in SHOWN_BY_A_DEATH else KVTierOnDiskSpec
    if name in SHOWN_AFTER_A_RESET:
        return KVTierCrowdAfterResetSpec
    return KVTierCrowdedSpec if name in SHOWN_BY_A_CROWD else KVTierSpec


FAMILIES = (MUTATIONS, DISK_MUTATIONS, deciding_mutations.MUTATIONS, server_mutations.MUTATIONS)
MISTAKES = {
    name: Mistake(family[name], _spec_of(name), SOONER.get(name, 1))
    for family in FAMILIES
    for name in sorted(family)
}
assert len(MISTAKES) == sum(map(len, FAMILIES)), "two mistakes have one name"
