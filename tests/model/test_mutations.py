"""The model checker can fail: each seeded mistake in the real code is caught."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from crowded_machine import KVTierCrowdAfterResetSpec, KVTierCrowdedSpec
from disk_machine import KVTierOnDiskSpec, KVTierOnDyingDiskSpec
from disk_mutations import DISK_MUTATIONS
from eviction_mutations import MUTATIONS  # which has all of ``mutations`` too
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import KVTierSpec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

#: Most are caught within a hundred; for some, four things must come together in one example.
EXAMPLES_MAX = 6_000
EXAMPLES_THAT_PASS = 40
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
#: Where the first seed takes long. Any catches it, sooner or later; changed rules change when.
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
STEPS = 60


def _check(spec: type[KVTierSpec], examples: int, number: int = 1) -> None:
    """Check without shrinking: that it fails is all that is asked. ``number``: the seed."""
    seeded = type("Seeded", (spec,), {})
    run_state_machine_as_test(
        seed(number)(seeded),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def check_that_it_is_caught(
    spec: type[KVTierSpec], mutation: AbstractContextManager[None], name: str
) -> None:
    """Check that the model fails with a mistake, by itself. ``name``: of the mistake."""
    with mutation:
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - any failure
            _check(spec, EXAMPLES_MAX, SOONER.get(name, 1))
        is_the_models = not isinstance(caught.value, KeyboardInterrupt | pytest.fail.Exception)
        # A mutation of a method that has other parameters by now fails by itself.
        is_the_models &= "argument" not in str(caught.value)
        # Coroutines that never ended are closed here, and not in the midst of the next test.
        del caught
        gc.collect()
    assert is_the_models


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_model_checker_catches(name: str) -> None:
    spec = KVTierCrowdedSpec if name in SHOWN_BY_A_CROWD else KVTierSpec
    spec = KVTierCrowdAfterResetSpec if name in SHOWN_AFTER_A_RESET else spec
    check_that_it_is_caught(spec, MUTATIONS[name](), name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sorted(DISK_MUTATIONS))
def test_the_model_checker_catches_in_the_disk_tier(name: str) -> None:
    spec = KVTierOnDyingDiskSpec if name in SHOWN_BY_A_DEATH else KVTierOnDiskSpec
    check_that_it_is_caught(spec, DISK_MUTATIONS[name](), name)


@pytest.mark.parametrize(
    "spec",
    [
        KVTierSpec,
        KVTierCrowdedSpec,
        KVTierCrowdAfterResetSpec,
        KVTierOnDiskSpec,
        KVTierOnDyingDiskSpec,
    ],
)
def test_without_a_mutation_the_same_examples_pass(spec: type[KVTierSpec]) -> None:
    _check(spec, EXAMPLES_THAT_PASS if spec is KVTierSpec else EXAMPLES_THAT_PASS // 2)
