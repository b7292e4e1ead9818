"""The facade's promises, one story each, over real actors in the test cell."""

from __future__ import annotations

import pytest

from kvtier import Closed, ConfigError, Misuse, RuntimeConfig
from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.core.messages import GroupKeys
from kvtier.plugin_api.backend import Outcome
from tests.support import handled_once
from tests.unit.engine._story import Story, keys_of


def test_what_was_stored_is_found_and_pinned_until_it_was_read() -> None:
    story = Story(tiers=0, slots=4)
    keys = keys_of(4)
    story.store(keys)
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix([*keys, b"none" + bytes(4)], "r") == 4
    slots = story.facade.prepare_load(keys, "r")
    assert len(set(slots)) == 4
    story.facade.on_request_started("w")
    assert story.facade.prepare_store(keys_of(1, b"n"), "w") is None, "all pinned: no room"
    story.facade.complete_load(keys, "r")
    story.facade.step_end()
    grant = story.facade.prepare_store(keys_of(1, b"n"), "w")
    assert grant is not None
    assert grant.evicted == [keys[3]], "the tail of the only run goes first"


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


def test_a_block_known_to_be_in_a_tier_is_read_without_asking() -> None:
    """Steps from the first lookup to HIT: two."""
    story = Story(slots=2)
    keys = keys_of(2)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix(keys, "r") is None
    story.facade.step_end()
    story.answer_all()
    assert story.facade.lookup(keys[0], "r") is True


def test_a_hit_holds_until_the_step_ends() -> None:
    """Promise 5: a store of the same step must not evict what a lookup called a hit."""
    story = Story(tiers=0, slots=2)
    keys = keys_of(2)
    story.store(keys)
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix(keys, "r") == 2
    assert story.facade.prepare_store(keys_of(1, b"n"), "r") is None
    assert len(story.facade.prepare_load(keys, "r")) == 2


def test_none_ends_at_the_deadline_even_if_no_step_ends() -> None:
    """Promise 6, for a scheduler that only ever calls lookup()."""
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


def test_a_hung_load_is_given_up_and_its_slot_is_used_again_only_when_the_tier_released_it() -> (
    None
):
    story = Story(slots=2)
    keys = keys_of(2)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.facade.on_request_started("r")
    assert story.facade.lookup(keys[0], "r") is None
    story.facade.step_end()
    story.runtime.cell.settle()
    (batch,) = story.runtime.tiers[0].batches
    story.now += 1000
    story.facade.step_end()
    assert story.facade.lookup(keys[0], "r") is False
    assert story.facade.statistics().primary.quarantined_slots == 1
    assert story.facade.get_finished() == 1, "given up, and not ended"
    assert not story.facade.has_pending_work(), "nothing to step on for: it may never end"
    story.runtime.tiers[0].answer(batch, [Outcome.DONE])
    story.runtime.cell.settle()
    assert story.facade.get_finished() == 0
    primary = story.facade.statistics().primary
    assert (primary.quarantined_slots, primary.free_slots + primary.ready_slots) == (0, 2)
    assert story.facade.statistics().tiers[0].counts.late_completions == 1


def test_a_prefix_larger_than_the_primary_tier_is_served_partly() -> None:
    """Promise 11: a partial hit, and a reserve stays for stores."""
    story = Story(slots=8, store_reserve_fraction=0.25)
    keys = keys_of(12)
    for start in range(0, 12, 4):
        story.store(keys[start : start + 4], f"writer {start}")
    story.facade.on_request_started("r")
    for _ in range(4):
        hits = story.facade.lookup_prefix(keys, "r")
        if hits is not None:
            break
        story.facade.step_end()
        story.answer_all()
    assert hits == 6, "all slots but the reserve of two"
    assert story.facade.prepare_load(keys[:6], "r")
    grant = story.facade.prepare_store(keys_of(2, b"n"), "r")
    assert grant is not None
    assert len(grant.keys) == 2


def test_promoted_blocks_wait_for_their_request_until_it_reads_or_gives_up() -> None:
    story = Story(slots=4, store_reserve_fraction=0.25)
    keys = keys_of(3)
    story.store(keys)
    story.store(keys_of(4, b"n"), "other")
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys, "r")
    story.facade.step_end()
    story.answer_all()
    story.facade.step_end()
    story.facade.on_request_started("w")
    grant = story.facade.prepare_store(keys_of(4, b"m"), "w")
    assert grant is not None
    assert len(grant.keys) == 1, "three of four slots are leased"
    assert story.facade.lookup_prefix(keys, "r") == 3
    story.facade.on_request_finished("r")
    story.facade.step_end()
    grant = story.facade.prepare_store(keys_of(4, b"p"), "w")
    assert grant is not None
    assert len(grant.keys) == 3, "given up: they may go"


def test_a_lease_ends_when_its_request_begins_to_read() -> None:
    """Promise 16: from then on the pin keeps the block, and once it is read nothing does."""
    story = Story(slots=2, lease_timeout_s=1000.0)
    keys = keys_of(1)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys, "r")
    story.facade.step_end()
    story.answer_all()
    assert story.facade.lookup(keys[0], "r") is True
    assert story.facade.statistics().primary.promotion_slots == 1
    story.facade.prepare_load(keys, "r")
    assert story.facade.statistics().primary.promotion_slots == 0
    story.facade.complete_load(keys, "r")
    story.facade.step_end()
    story.facade.on_request_started("w")
    grant = story.facade.prepare_store(keys_of(2, b"m"), "w")
    assert grant is not None
    assert len(grant.keys) == 2, "the request goes on, and its block may go"


def test_a_lease_runs_out() -> None:
    story = Story(slots=2, lease_timeout_s=5.0)
    keys = keys_of(1)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys, "r")
    story.facade.step_end()
    story.answer_all()
    assert story.facade.lookup(keys[0], "r") is True
    assert story.facade.statistics().primary.promotion_slots == 1
    story.now += 5.0
    story.facade.step_end()
    assert story.facade.statistics().primary.promotion_slots == 0


def test_behind_a_block_still_being_asked_for_nothing_is_promoted() -> None:
    """Only a contiguous prefix: what lies behind a gap may turn out to be useless."""
    story = Story(slots=4)
    known = keys_of(1)
    story.store(known)
    story.store(keys_of(4, b"n"), "other")
    unknown = b"u" + bytes(5)
    other_group = known[0][:-4] + b"\x00\x00\x00\x01"
    story.facade.on_request_started("r")
    assert story.facade.lookup_state(unknown, "r") is BlockState.PROBING
    assert story.facade.lookup_state(known[0], "r") is BlockState.PROBING
    assert story.facade.lookup_state(other_group, "r") is BlockState.PROBING
    story.facade.step_end()
    assert all(type(batch).__name__ == "ProbeBatch" for batch in story.answer_all(Outcome.ABSENT))
    assert story.facade.lookup(unknown, "r") is False
    assert story.facade.lookup_state(known[0], "r") is BlockState.FILLING


def test_a_request_is_served_only_from_the_tiers_it_allows() -> None:
    story = Story(slots=2, tiers=2)
    keys = keys_of(1)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.facade.on_request_started("none", tiers=0)
    assert story.facade.lookup(keys[0], "none") is False
    story.facade.on_request_started("second", tiers=0b10)
    assert story.facade.lookup(keys[0], "second") is None
    story.facade.step_end()
    story.answer_all()
    assert story.facade.lookup(keys[0], "second") is True
    assert story.facade.load_sources("second")[keys[0]] == 1


def test_the_next_tier_is_tried_when_one_fails_to_deliver() -> None:
    story = Story(slots=2, tiers=2)
    keys = keys_of(1)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.facade.on_request_started("r")
    assert story.facade.lookup(keys[0], "r") is None
    story.facade.step_end()
    story.answer_all(Outcome.DAMAGED)
    assert story.facade.lookup(keys[0], "r") is None, "now from the second tier"
    story.facade.step_end()
    story.answer_all()
    assert story.facade.lookup(keys[0], "r") is True
    assert story.facade.load_sources("r")[keys[0]] == 1


def test_a_reset_quarantines_what_is_in_use_and_never_waits() -> None:
    """Promise 7: the GPU lets go by on_reset_flushed, a tier by reporting."""
    story = Story(slots=4)
    story.facade.on_request_started("r")
    stored = story.facade.prepare_store(keys_of(2), "r")
    assert stored is not None
    story.facade.complete_store(stored.keys, "r")  # two slots are read by a cascade
    writing = story.facade.prepare_store(keys_of(1, b"w"), "r")  # one is written by the GPU
    assert writing is not None
    story.facade.reset()
    assert story.facade.statistics().primary.quarantined_slots == 3
    assert story.facade.lookup(stored.keys[0], "r") is None, "the tier may have it"
    story.facade.complete_store(writing.keys, "r")
    assert story.facade.statistics().primary.ready_slots == 0, "what nobody waits for is ignored"
    story.facade.on_reset_flushed()
    assert story.facade.statistics().primary.quarantined_slots == 2
    story.answer_all(Outcome.FAILED)
    assert story.facade.get_finished() == 0
    assert story.facade.statistics().primary.quarantined_slots == 0


def test_the_end_of_an_older_store_of_the_same_block_leaves_the_new_one_unreadable() -> None:
    """Request and key are the same; only the epoch says that nothing is written yet."""
    story = Story(tiers=0, slots=4)
    (key,) = keys_of(1)
    story.facade.on_request_started("r")
    old = story.facade.prepare_store([key], "r")
    assert old is not None
    story.facade.reset()
    new = story.facade.prepare_store([key], "r")
    assert new is not None
    assert new.epoch == old.epoch + 1 == story.facade.epoch
    story.facade.complete_store([key], "r", epoch=old.epoch)
    assert story.facade.lookup(key, "r") is None, "it is being written"
    story.facade.complete_store([key], "r", success=False, epoch=old.epoch)
    story.facade.complete_store([key], "r", epoch=new.epoch)
    assert story.facade.lookup(key, "r") is True
    assert story.facade.statistics().primary.counts.unknown_completions == 2


def test_the_end_of_an_older_load_of_the_same_block_leaves_the_new_one_its_pin() -> None:
    story = Story(tiers=0, slots=1)
    keys = keys_of(1)
    story.store(keys)
    story.facade.on_request_started("r")
    old = story.facade.epoch
    story.facade.prepare_load(keys, "r")
    story.facade.reset()
    story.facade.on_reset_flushed()
    story.store(keys)
    story.facade.prepare_load(keys, "r")
    new = story.facade.epoch
    story.facade.complete_load(keys, "r", epoch=old)
    story.facade.step_end()
    assert story.facade.statistics().primary.pinned_slots == 1
    assert story.facade.prepare_store(keys_of(1, b"n"), "r") is None, "the GPU still reads"
    story.facade.complete_load(keys, "r", epoch=new)
    assert story.facade.statistics().primary.pinned_slots == 0


def test_the_event_stream_folds_to_what_is_resident() -> None:
    story = Story(tiers=0, slots=2)
    story.store(keys_of(2))
    story.store(keys_of(1, b"n"), "other")
    events = story.facade.take_events()
    assert [(event.kind, len(event.keys)) for event in events] == [
        (EventKind.STORED, 2),
        (EventKind.REMOVED, 1),
        (EventKind.STORED, 1),
    ]
    story.facade.reset()
    assert [event.kind for event in story.facade.take_events()] == [EventKind.CLEARED]
    assert story.facade.take_events() == []


def test_a_tier_that_wants_whole_requests_gets_what_is_here_already() -> None:
    story = Story(slots=4, whole=True)
    keys = keys_of(2)
    story.store(keys)
    story.facade.on_request_started("r")
    grant = story.facade.prepare_store([*keys, *keys_of(1, b"n")], "r")
    assert grant is not None
    assert grant.keys == keys_of(1, b"n")
    assert [batch.keys for batch in story.answer_all()] == [tuple(keys)]


def test_a_store_does_not_evict_the_heads_that_it_was_offered_with() -> None:
    """Of a request whose head is here, as much of the tail is stored as there is other room."""
    story = Story(tiers=0, slots=4)
    keys = keys_of(6)
    story.store(keys[:3])
    story.store(keys_of(1, b"n"), "other")
    story.facade.on_request_started("r")
    grant = story.facade.prepare_store(keys, "r")
    assert grant is not None
    assert (grant.keys, grant.evicted) == (keys[3:4], keys_of(1, b"n"))
    assert story.runtime.primary.resident() == set(keys[:3])
    assert story.facade.statistics().primary.counts.stores_dropped == 2


def test_a_store_that_no_memory_of_this_size_has_room_for_is_granted_nothing() -> None:
    """It is no refusal, after which vLLM would offer the same again in each step."""
    story = Story(tiers=0, slots=1)
    story.facade.on_request_started("r")
    grant = story.facade.prepare_store(keys_of(2), "r", cuts=[2])
    assert grant is not None
    assert grant.keys == grant.slots == grant.evicted == []
    assert story.facade.statistics().primary.counts.stores_dropped == 2


def test_a_block_is_stored_once_it_was_offered_often_enough() -> None:
    story = Story(tiers=0, store_threshold=2)
    keys = keys_of(2)
    story.facade.on_request_started("r")
    first = story.facade.prepare_store(keys, "r")
    second = story.facade.prepare_store(keys, "r")
    assert first is not None
    assert second is not None
    assert (first.keys, second.keys) == ([], keys)
    assert story.facade.statistics().primary.counts.stores_skipped == 2


def test_a_failed_store_leaves_nothing_behind() -> None:
    story = Story(slots=2)
    story.facade.on_request_started("r")
    grant = story.facade.prepare_store(keys_of(2), "r")
    assert grant is not None
    story.facade.complete_store(grant.keys, "r", success=False)
    assert story.facade.statistics().primary.free_slots == 2
    assert story.answer_all() == []


def test_loading_what_is_not_readable_is_the_callers_mistake() -> None:
    story = Story(tiers=0)
    with pytest.raises(Misuse, match=r"block 6b0000000000 is not readable\. Call it only for"):
        story.facade.prepare_load(keys_of(1), "r")


def test_completions_of_what_never_began_are_counted_and_ignored() -> None:
    """Promise 8: no assertion of ours takes the engine down."""
    story = Story(tiers=0)
    story.store(keys_of(1))
    story.facade.complete_load(keys_of(1), "r")
    story.facade.complete_store(keys_of(3), "r")
    assert story.facade.statistics().primary.counts.unknown_completions == 4


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
    story = Story(slots=2, tiers=2)
    keys = keys_of(1)
    story.store(keys)
    story.store(keys_of(2, b"n"), "other")
    story.runtime.cell.raises_faults = False
    story.facade.on_request_started("r")
    assert story.facade.lookup(keys[0], "r") is None
    story.facade.step_end()
    story.runtime.cell.break_down(story.runtime.engine.links[0])
    assert story.facade.lookup(keys[0], "r") is None, "the second tier has it"
    story.facade.step_end()
    story.answer_all()
    assert story.facade.lookup(keys[0], "r") is True
    assert story.facade.statistics().primary.quarantined_slots == 1


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
    story = Story(slots=4)
    keys, facade = keys_of(4), story.facade
    story.store(keys)
    story.store(keys_of(4, b"n"), "other")
    handled = handled_once.watch(story.runtime.primary)
    facade.on_request_started("r")
    if call == "lookup":
        assert facade.lookup_state(keys[0], "r") is BlockState.FILLING
    elif call == "reserve":
        assert facade.reserve_prefix([GroupKeys(tuple(keys[:2]), (1, 2))], "r") == 2
    else:
        grant = facade.prepare_store(keys, "r")
        assert grant is not None
        assert len(grant.evicted) == 4
    kinds = {type(each).__name__ for each in handled.values()}
    assert kinds >= {f"{call.title()}AfterEviction", "Victims"}
    assert facade.statistics().faults == 0
