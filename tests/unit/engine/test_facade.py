"""The facade's promises, one story each, over real actors in the test cell."""

from __future__ import annotations

import pytest

from kvtier import Closed, ConfigError, Misuse, RuntimeConfig
from kvtier.core.block_state import BlockState
from kvtier.core.messages import GroupKeys
from kvtier.plugin_api.backend import Outcome
from tests.support import handled_once
from tests.unit.engine._story import Story, cascade, keys_of, promote, story_of_a_tier


def test_what_was_stored_is_found_and_pinned_until_it_was_read() -> None:
    story = Story(tiers=0, slots=4)
    keys = keys_of(4)
    story.store(keys)
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix([*keys, b"none" + bytes(4)], "r") == 4
    slots = story.facade.prepare_load(keys, "r")
    assert len(set(slots)) == 4
    assert story.facade.prepare_store(keys_of(1, b"n"), "w") is None, "all pinned: no room"
    story.facade.complete_load(keys[:1], "r")
    assert story.primary.pinned_slots == 3
    story.facade.complete_load(keys[1:], "r")
    story.facade.step_end()
    grant = story.grant(keys_of(1, b"n"))
    assert grant.evicted == [keys[3]], "the tail of the only run goes first"
    assert story.primary.counts.evictions == 1


def test_lookup_says_none_while_tiers_are_asked_and_read() -> None:
    """None-while-promoting is nothing but the states PROBING and FILLING."""
    story = Story()
    keys = keys_of(3)
    story.facade.on_request_started("r")
    assert [story.facade.lookup_state(key, "r") for key in keys] == [BlockState.PROBING] * 3
    story.facade.step_end()
    assert story.facade.get_finished() == 1, "the probe"
    assert len(story.answer_all()) == 1, "one probe for the whole step"
    assert [story.facade.lookup_state(key, "r") for key in keys] == [BlockState.FILLING] * 3
    story.facade.step_end()
    assert story.facade.get_finished() == 1, "the load"
    story.answer_all()
    assert story.facade.get_finished() == 0
    assert story.facade.lookup_prefix(keys, "r") == 3
    assert {story.facade.load_sources("r")[key] for key in keys} == {0}
    assert b"else" + bytes(4) not in story.facade.load_sources("r")
    assert story.facade.load_sources("never started") == {}


def test_none_ends_at_the_deadline_even_if_no_step_ends() -> None:
    """For a scheduler that only ever calls lookup()."""
    story = Story()
    key = keys_of(1)[0]
    story.facade.on_request_started("r")
    answers = []
    for _ in range(40):
        answers.append(story.facade.lookup(key, "r"))
        story.now += 0.1
    assert answers[0] is None
    assert answers[-1] is False
    assert story.facade.statistics().tiers[0].counts.probes_timed_out == 1


def test_the_next_tier_is_tried_when_one_fails_to_deliver() -> None:
    story, (key,) = story_of_a_tier(slots=2, tiers=2)
    story.facade.on_request_started("r")
    for outcome in (Outcome.DAMAGED, Outcome.DONE):
        assert story.facade.lookup(key, "r") is None, "then from the second tier"
        story.step(outcome)
    assert story.facade.lookup(key, "r") is True
    assert story.facade.load_sources("r")[key] == 1


def test_a_tier_that_wants_whole_requests_gets_what_is_here_already() -> None:
    story = Story(slots=4, whole=True)
    keys, new = keys_of(2), keys_of(1, b"n")
    story.store(keys)
    story.facade.on_request_started("r")
    assert story.grant([*keys, *new], "r").keys == new
    assert [batch.keys for batch in story.answer_all()] == [tuple(keys)]


def test_a_store_that_no_memory_of_this_size_has_room_for_is_granted_nothing() -> None:
    """It is no refusal, after which vLLM would offer the same again in each step."""
    story = Story(tiers=0, slots=1)
    story.facade.on_request_started("r")
    grant = story.grant(keys_of(2), "r", cuts=[2])
    assert grant.keys == grant.slots == grant.evicted == []
    assert story.primary.counts.stores_dropped == 2


def test_a_block_is_stored_once_it_was_offered_often_enough() -> None:
    story = Story(tiers=0, store_threshold=2)
    keys = keys_of(2)
    story.facade.on_request_started("r")
    assert [story.grant(keys, "r").keys for _ in range(2)] == [[], keys]
    assert story.primary.counts.stores_skipped == 2


def test_loading_what_is_not_readable_is_the_callers_mistake() -> None:
    story = Story(tiers=0)
    with pytest.raises(Misuse, match=r"block 6b0000000000 is not readable\. Call it only for"):
        story.facade.prepare_load(keys_of(1), "r")


def test_a_closed_runtime_says_so() -> None:
    story = Story()
    assert story.facade.close() is True
    assert story.facade.close() is True
    with pytest.raises(Closed, match="Open a new one"):
        story.facade.step_end()


def test_a_primary_tier_that_breaks_turns_into_misses() -> None:
    """A handler that raises takes down its own actor's work, never the engine."""
    story = Story(tiers=0)
    story.store(keys_of(1))
    assert story.facade.take_events()
    story.runtime.cell.raises_faults = False
    story.runtime.cell.break_down(story.runtime.primary)
    for _ in range(2):  # the first lookup of a step is another one
        assert story.facade.survey(keys_of(1)[0], "r") is BlockState.ABSENT
    assert story.facade.lookup(keys_of(1)[0], "r") is False
    assert story.facade.prepare_store(keys_of(2), "r") is None
    story.facade.complete_store(keys_of(1), "r")
    story.facade.step_end()
    assert story.facade.take_events() == []
    assert story.facade.statistics().faults == 1


def test_a_link_that_breaks_cuts_off_its_own_tier_only() -> None:
    """What its tier writes to is lost, and what was not sent is not; nothing more is sent to it."""
    story, (sent, unsent, other) = story_of_a_tier(3, slots=12, tiers=2)
    facade, cell = story.facade, story.runtime.cell
    unknown = b"u" + bytes(5)
    for name, tiers in (("first", 0b01), ("both", 0b11)):
        facade.on_request_started(name, tiers=tiers)
        assert facade.lookup_state(unknown, name) is BlockState.PROBING
    promote(story, sent)
    for name, key, tiers in (("third", unsent, 0b01), ("fourth", other, 0b10)):
        facade.on_request_started(name, tiers=tiers)
        assert facade.lookup_state(key, name) is BlockState.FILLING
    cell.raises_faults = False
    cell.break_down(story.runtime.engine.links[0])
    assert facade.lookup_state(unsent, "third") is BlockState.ABSENT
    assert facade.lookup_state(unknown, "first") is BlockState.ABSENT, "nobody will answer"
    assert facade.lookup_state(unknown, "both") is BlockState.PROBING, "the other tier owes it"
    assert facade.lookup(sent, "r") is None, "the second tier has it"
    assert (story.primary.promotion_slots, story.primary.quarantined_slots) == (2, 1)
    story.step()
    assert facade.lookup(sent, "r") is True
    assert facade.lookup(other, "fourth") is True
    cascade(story, [b"w" + bytes(5)])
    cell.settle()
    assert [len(tier.batches) for tier in story.runtime.tiers] == [0, 1]
    assert story.primary.pinned_slots == 1
    story.answer_all()
    assert story.primary.pinned_slots == 0, "the broken link keeps none"


def test_two_tiers_on_one_place_are_refused(tmp_path: object) -> None:
    """See also tests/vllm for the same refusal at the start of an engine."""
    from kvtier import Namespace, SlotMemory, open_runtime

    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}] * 2},
        slot_count=1,
        block_bytes=4096,
    )
    with pytest.raises(ConfigError, match=r"1:fs and 2:fs both use .* a place of its own"):
        open_runtime(config, SlotMemory.anonymous(1, 4096), Namespace({"model": "m"}))


@pytest.mark.parametrize("call", ["lookup", "reserve", "store"])
def test_a_call_that_waits_for_victims_is_handled_once(call: str) -> None:
    """It was put aside and run again from its start; what it noted was noted twice."""
    story, keys = story_of_a_tier(4, slots=4)
    facade = story.facade
    handled = handled_once.watch(story.runtime.primary)
    facade.on_request_started("r")
    if call == "lookup":
        assert facade.lookup_state(keys[0], "r") is BlockState.FILLING
    elif call == "reserve":
        assert facade.reserve_prefix([GroupKeys(tuple(keys[:2]), (1, 2))], "r") == 2
    else:
        assert len(story.grant(keys, "r").evicted) == 4
    kinds = {type(each).__name__ for each in handled.values()}
    assert kinds >= {f"{call.title()}AfterEviction", "Victims"}
    assert facade.statistics().faults == 0
