"""What promotions hold, for whom, and how it ends."""

from __future__ import annotations

import pytest

from kvtier.core.messages import GroupKeys
from tests.unit.engine._story import Story, keys_of, story_of_a_tier


def promote(story: Story, keys: list[bytes], request: str = "r") -> None:
    """Have blocks be promoted for a new request."""
    story.facade.on_request_started(request)
    story.facade.lookup_prefix(keys, request)
    story.step()


def test_a_load_ends_the_leases_on_all_that_it_reads_wherever_it_came_from() -> None:
    """Of what was here anyway there is no lease to end; those behind it have one."""
    story, (promoted,) = story_of_a_tier(slots=4, lease_timeout_s=1000.0)
    (here,) = keys_of(1, b"h")
    story.store([here], "brings")
    promote(story, [here, promoted])
    facade = story.facade
    assert story.primary.promotion_slots == 1
    assert facade.lookup_prefix([here, promoted], "r") == 2
    facade.prepare_load([here, promoted], "r")
    assert story.primary.promotion_slots == 0
    facade.complete_load([here, promoted], "r")
    facade.step_end()
    assert len(story.grant(keys_of(4, b"w")).keys) == 4, "the request goes on, its blocks may go"


def test_a_lease_runs_from_the_last_block_that_was_found_for_its_request() -> None:
    story, (first, second) = story_of_a_tier(2, slots=4, lease_timeout_s=5.0)
    promote(story, [first])
    story.now = 4.0
    story.facade.step_end()
    assert story.facade.lookup(second, "r") is None
    story.step()
    story.now = 8.9
    story.facade.step_end()
    assert story.primary.promotion_slots == 2
    story.now = 9.0
    story.facade.step_end()
    assert story.primary.promotion_slots == 0
    assert len(story.grant(keys_of(4, b"w")).keys) == 4, "both may go"


def test_after_a_reset_promotions_hold_nothing_whatever_they_had_come_to() -> None:
    """What was not sent is free again; what a tier writes to is quarantined until it lets go."""
    story, (unsent, sent, there) = story_of_a_tier(3, slots=8, store_reserve_fraction=0.25)
    facade = story.facade
    promote(story, [there])
    assert facade.lookup(sent, "r") is None
    facade.step_end()
    story.runtime.cell.settle()
    assert facade.lookup(unsent, "r") is None
    leases = story.runtime.primary.audit().promotions.leases
    assert leases == {"r": frozenset((unsent, sent, there))}
    facade.reset()
    assert (story.primary.promotion_slots, story.primary.quarantined_slots) == (0, 1)
    assert story.primary.free_slots == 7
    assert all(unsent not in batch.keys for batch in story.step())
    assert story.primary.free_slots == 8


@pytest.mark.parametrize("end", ["decided", "out of time", "reset"])
def test_a_request_may_reserve_a_prefix_again_once_its_reservation_has_ended(end: str) -> None:
    story, keys = story_of_a_tier(2, slots=4, lease_timeout_s=5.0)
    facade = story.facade
    group = [GroupKeys(tuple(keys), (1, 2))]
    facade.on_request_started("r")
    assert facade.reserve_prefix(group, "r") == 2
    assert facade.reserve_prefix(group, "r") == 0, "it has one"
    story.step()
    if end == "decided":
        facade.on_requests_scheduled(["r"])
    elif end == "out of time":
        story.now += 5.0
        facade.step_end()
    else:
        facade.reset()
        facade.on_reset_flushed()
        for key in keys:
            facade.survey(key, "r")
        story.step()
    assert facade.reserve_prefix(group, "r") == 2
