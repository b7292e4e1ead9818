"""What is promoted, reserved and loaded for a request of vLLM's, over actors in the test cell."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.vllm.support.stepped_manager import CHUNK_TOKENS, FS, context, keys, stepped

MISS = LookupResult.MISS
HIT = LookupResult.HIT
PENDING = LookupResult.HIT_PENDING


def test_a_load_is_given_slots_in_the_order_of_its_keys() -> None:
    with stepped(slots=8, groups=2) as played:
        full, window = keys("ABC"), keys("ABC", group=1)
        played.store("w", [*full, *window])
        asked = played.start(context("r", [*full, *window]))
        wanted = [window[2], full[1], full[0], window[1]]
        for key in wanted:
            assert played.manager.lookup(key, asked) is HIT
        loaded = played.manager.prepare_load(wanted, asked)
        slots = [played.runtime.primary.slot_of(key) for key in wanted]
        assert list(loaded.block_ids) == slots
        assert played.facade.statistics().primary.pinned_slots == 4
        played.manager.complete_load(set(wanted), asked)
        assert played.facade.statistics().primary.pinned_slots == 0


def test_what_is_reserved_ends_with_the_decision_and_no_sooner() -> None:
    with stepped(slots=8, tiers=[FS]) as played:
        order = keys("AB")
        played.store("w", order)
        played.evict()
        played.promote("runs", order)
        assert played.promotion_slots() == 2
        played.step(new=["somebody else"])
        assert played.promotion_slots() == 2, "it waits, and keeps them"
        played.step(new=["runs"])
        assert played.promotion_slots() == 0


@pytest.mark.parametrize("how", ["loads", "preempted", "resumed", "finished"])
def test_a_decision_shows_in_other_calls_too(how: str) -> None:
    with stepped(slots=8, tiers=[FS]) as played:
        order = keys("AB")
        played.store("w", order)
        played.evict()
        asked = played.promote("r", order)
        manager = played.manager
        if how == "loads":
            assert [manager.lookup(key, asked) for key in order] == [HIT, HIT]
            manager.prepare_load(order[:1], asked)
            assert played.promotion_slots() == 1, "of what it does not load it may be told yet"
            played.step()
        elif how == "preempted":
            played.step(preempted=["r"])
        elif how == "resumed":
            manager.prepare_store(keys("C"), asked)
        else:
            manager.on_request_finished(asked)
            assert not manager.requests
        assert played.promotion_slots() == 0
        played.step()
        assert not manager._loading
        assert not manager.requests.is_undecided("r")


def test_a_request_of_several_groups_that_had_no_room_is_promoted_once_there_is_some() -> None:
    """It asks in each step while it waits, is refused once, and asks again in the next."""
    with stepped(slots=6, tiers=[FS], groups=2) as played:
        manager = played.manager
        wanted = {
            name: [*keys(text), *keys(text, group=1)] for name, text in (("a", "AB"), ("b", "CD"))
        }
        for name, order in wanted.items():
            played.store(f"writes {name}", order)
        played.evict()
        asked = {name: played.start(context(name, order)) for name, order in wanted.items()}
        found = {}
        for _ in range(3):
            for name, order in wanted.items():
                found[name] = [manager.lookup(key, asked[name]) for key in order]
            played.step()
            played.answer()
        assert found["a"] == [HIT] * 4
        assert HIT not in found["b"]
        manager.on_request_finished(asked["a"])
        for _ in range(4):
            last = [manager.lookup(key, asked["b"]) for key in wanted["b"]]
            played.step()
            played.answer()
        assert last in ([MISS] * 4, [HIT] * 4)
        assert last == [HIT] * 4


@pytest.mark.parametrize("is_partial_tail", [True, False])
def test_a_block_that_is_no_chunk_of_a_prefix_is_promoted_by_itself(is_partial_tail: bool) -> None:
    """Where there are several groups, all that a prefix needs is promoted at once, and this not."""
    with stepped(slots=8, tiers=[FS], groups=2) as played:
        (block,) = keys("T")
        played.store("w", [block])
        played.evict()
        made = context("r", [*keys("AB"), *keys("AB", group=1)])
        if is_partial_tail:
            made.set_offload_key_position(block, 2 * CHUNK_TOKENS + 5)
        asked = played.start(made)
        assert played.manager.lookup(block, asked) is PENDING
        played.step()
        played.answer()
        assert played.manager.lookup(block, asked) is HIT


@pytest.mark.parametrize("was_refused", [True, False])
def test_a_request_that_waits_for_no_block_reserves_none(was_refused: bool) -> None:
    """What is here may go while it waits for something else, whatever came of its last try."""
    with stepped(slots=4, tiers=[FS], groups=2) as played:
        manager = played.manager
        wanted = [*keys("AB"), *keys("AB", group=1)]
        played.store("w", wanted)
        asked = played.start(context("r", wanted))
        if was_refused:
            played.evict()
            held = [bytes([200 + n]) * 32 + bytes(4) for n in range(4)]
            reader = played.start(context("reads", held))
            assert [manager.lookup(key, reader) for key in held] == [HIT] * 4
            manager.prepare_load(held, reader)
            for found in ([PENDING] * 4, [MISS] * 4):
                assert [manager.lookup(key, asked) for key in wanted] == found
                played.step()
                played.answer()
            manager.complete_load(held, reader)
            played.store("w", wanted)
        assert [manager.lookup(key, asked) for key in wanted] == [HIT] * 4
        played.step()
        assert played.promotion_slots() == 0
