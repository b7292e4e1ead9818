"""What promotions hold, for whom, and how it ends."""

from __future__ import annotations

import pytest

from kvtier.core.events import PRIMARY, EventKind
from kvtier.core.messages import GroupKeys
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import Story, keys_of


def story_of_a_tier(keys: list[bytes], **settings: object) -> Story:
    """Return a runtime whose tier alone has some blocks."""
    story = Story(**settings)  # type: ignore[arg-type]
    story.store(keys)
    story.store(keys_of(story.runtime.primary.slots.count, b"n"), "other")
    return story


def promote(story: Story, keys: list[bytes], request: str = "r") -> None:
    """Have blocks be promoted for a new request."""
    story.facade.on_request_started(request)
    story.facade.lookup_prefix(keys, request)
    story.facade.step_end()
    story.answer_all()


def test_a_load_ends_the_leases_on_all_that_it_reads_wherever_it_came_from() -> None:
    """Of what was here anyway there is no lease to end; those behind it have one."""
    (promoted,) = keys_of(1)
    story = story_of_a_tier([promoted], slots=4)
    (here,) = keys_of(1, b"h")
    story.store([here], "brings")
    promote(story, [here, promoted])
    facade = story.facade
    assert facade.statistics().primary.promotion_slots == 1
    assert facade.lookup_prefix([here, promoted], "r") == 2
    facade.prepare_load([here, promoted], "r")
    assert facade.statistics().primary.promotion_slots == 0


def test_events_tell_of_promoted_blocks_too() -> None:
    """Promise 9: the stream folds to what is resident, whoever brought it."""
    keys = keys_of(2)
    story = story_of_a_tier(keys, slots=4)
    promote(story, keys)
    resident: set[bytes] = set()
    for event in story.facade.take_events():
        if event.tier != PRIMARY:
            continue
        if event.kind is EventKind.STORED:
            resident.update(event.keys)
        else:
            resident.difference_update(event.keys)
    assert resident == story.runtime.primary.resident()
    assert resident >= set(keys)


def test_a_request_that_ends_while_a_tier_reads_for_it_holds_nothing_once_that_has_ended() -> None:
    """The block that arrives is like any other: whoever wants it may have it, or its room."""
    (key,) = keys_of(1)
    story = story_of_a_tier([key], slots=2)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    facade.step_end()
    facade.on_request_finished("r")
    assert facade.statistics().primary.promotion_slots == 1, "the tier writes there yet"
    story.answer_all()
    primary = facade.statistics().primary
    assert (primary.promotion_slots, primary.filling_from_tiers_slots) == (0, 0)
    facade.on_request_started("w")
    facade.step_end()
    grant = facade.prepare_store(keys_of(2, b"w"), "w")
    assert grant is not None
    assert key in grant.evicted


def test_a_lease_runs_from_the_last_block_that_was_found_for_its_request() -> None:
    first, second = keys_of(2)
    story = story_of_a_tier([first, second], slots=4, lease_timeout_s=5.0)
    facade = story.facade
    promote(story, [first])
    story.now = 4.0
    facade.step_end()
    assert facade.lookup(second, "r") is None
    facade.step_end()
    story.answer_all()
    story.now = 8.9
    facade.step_end()
    assert facade.statistics().primary.promotion_slots == 2
    story.now = 9.0
    facade.step_end()
    assert facade.statistics().primary.promotion_slots == 0
    facade.on_request_started("w")
    grant = facade.prepare_store(keys_of(4, b"w"), "w")
    assert grant is not None
    assert len(grant.keys) == 4, "both may go"


def test_after_a_reset_promotions_hold_nothing_whatever_they_had_come_to() -> None:
    """What was not sent is free again; what a tier writes to is quarantined until it lets go."""
    unsent, sent, there = keys_of(3)
    story = story_of_a_tier([unsent, sent, there], slots=8, store_reserve_fraction=0.25)
    facade = story.facade
    promote(story, [there])
    assert facade.lookup(sent, "r") is None
    facade.step_end()
    story.runtime.cell.settle()
    assert facade.lookup(unsent, "r") is None
    assert facade.statistics().primary.promotion_slots == 3
    facade.reset()
    primary = facade.statistics().primary
    assert (primary.promotion_slots, primary.quarantined_slots) == (0, 1)
    assert primary.free_slots == 7
    facade.step_end()
    loads = [batch for batch in story.answer_all() if unsent in batch.keys]
    assert loads == []
    assert facade.statistics().primary.free_slots == 8
    facade.on_request_started("again")
    for _ in ("asks", "promotes"):
        assert facade.lookup_prefix([unsent, sent, there], "again") is None
        facade.step_end()
        story.answer_all()
    assert facade.lookup_prefix([unsent, sent, there], "again") == 3, "into the slots of before"
    story.now += 1000.0
    facade.step_end()
    assert facade.statistics().faults == 0


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.ABSENT])
def test_a_slot_whose_promotion_failed_is_anybodys(outcome: Outcome) -> None:
    """Its lease has ended with it, while the request that it was for goes on."""
    (key,) = keys_of(1)
    story = story_of_a_tier([key], slots=2)
    facade = story.facade
    facade.on_request_started("r")
    assert facade.lookup(key, "r") is None
    facade.step_end()
    story.answer_all(outcome)
    assert story.runtime.primary.audit().promotions.leases == {}
    for prefix in (b"v", b"w"):
        story.store(keys_of(2, prefix), prefix.decode())
        assert story.runtime.primary.resident() == set(keys_of(2, prefix))


def test_as_much_may_be_promoted_after_a_reset_as_before() -> None:
    """The reserve for stores is counted from nothing again."""
    keys = keys_of(8)
    story = Story(slots=8, store_reserve_fraction=0.25)
    story.store(keys)
    story.store(keys_of(8, b"n"), "other")
    facade = story.facade
    for _ in range(2):
        facade.on_request_started("r")
        for _ in range(3):
            facade.lookup_prefix(keys, "r")
            facade.step_end()
            story.answer_all()
        assert facade.statistics().primary.promotion_slots == 6
        facade.reset()
        facade.on_request_finished("r")


def test_a_reservation_takes_what_the_reserve_and_others_leave() -> None:
    """Promise 11: two of four slots are for promotions, whoever promotes."""
    keys = keys_of(4)
    story = story_of_a_tier(keys, slots=4, store_reserve_fraction=0.5)
    facade = story.facade
    facade.on_request_started("first")
    assert facade.lookup_prefix(keys[:1], "first") is None
    for name, wanted, granted in (("second", keys[1:3], 1), ("third", keys[3:], 0)):
        facade.on_request_started(name)
        ends = tuple(range(1, len(wanted) + 1))
        assert facade.reserve_prefix([GroupKeys(tuple(wanted), ends)], name) == granted
    assert facade.statistics().primary.promotion_slots == 2
