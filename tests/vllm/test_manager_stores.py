"""What is granted, ended and evicted for stores of vLLM's, over actors in the test cell."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.vllm.support.stepped_manager import FS, context, keys, stepped

HIT = LookupResult.HIT


def test_a_store_ends_in_the_order_of_its_grant_though_vllm_reports_a_set() -> None:
    """Tiers are given blocks from head to tail, and evict tails first."""
    with stepped(slots=16, tiers=[FS]) as played:
        order = keys("ABCDEFG")
        writer = played.start(context("w", order))
        output = played.manager.prepare_store(order, writer)
        assert output is not None
        assert output.keys_to_store == order
        assert list(output.store_spec.block_ids) == [
            played.runtime.primary.slot_of(key) for key in order
        ]
        played.manager.complete_store(set(order), writer)
        assert [key for batch in played.answer() for key in batch.keys] == order


def test_stores_of_one_request_end_each_with_its_own_grant() -> None:
    with stepped(slots=8) as played:
        manager = played.manager
        first, second = keys("AB"), keys("CD")
        writer = played.start(context("w", [*first, *second]))
        manager.prepare_store(first, writer)
        manager.prepare_store(second, writer)
        assert [grant.keys for grant in manager._granted._of["w"]] == [first, second]
        manager.complete_store(set(second), writer)
        assert played.runtime.primary.resident() == set(second)
        manager.complete_store({first[0]}, writer)
        assert played.runtime.primary.resident() == {first[0], *second}
        assert not manager._granted._of
        manager.complete_store(set(first), writer, success=False)
        assert played.runtime.primary.resident() == {first[0], *second}
        assert played.runtime.primary.counts.unknown_completions == 1


def test_a_failed_store_leaves_no_block() -> None:
    with stepped(slots=8) as played:
        writer = played.start(context("w", keys("AB")))
        played.manager.prepare_store(keys("AB"), writer)
        played.manager.complete_store(set(keys("AB")), writer, success=False)
        primary = played.facade.statistics().primary
        assert (primary.free_slots, primary.ready_slots) == (8, 0)


def test_a_store_without_room_is_refused_and_one_of_nothing_new_is_not() -> None:
    with stepped(slots=2) as played:
        manager = played.manager
        a, b, c = keys("ABC")
        played.store("w", [a, b])
        reader = played.start(context("r", [a, b]))
        assert [manager.lookup(key, reader) for key in (a, b)] == [HIT, HIT]
        manager.prepare_load([a, b], reader)
        writer = played.start(context("s", [a, b, c]))
        assert manager.prepare_store([c], writer) is None, "vLLM offers it again"
        again = manager.prepare_store([a, b], writer)
        assert again is not None
        assert (list(again.keys_to_store), list(again.evicted_keys)) == ([], [])
        assert not manager._granted._of
        manager.complete_load([a, b], reader)
        played.step()
        output = manager.prepare_store([c], writer)
        assert output is not None
        assert list(output.evicted_keys) == [b], "the tail of the only run"


@pytest.mark.parametrize("chunk_blocks", [1, 2])
def test_blocks_of_a_chunk_are_offered_once_where_a_window_may_slide_on(chunk_blocks: int) -> None:
    """Of a chunk that vLLM offers again, it leaves out what has left the window since.

    The rig's seed 1022: the blocks that it did offer were copied to the others' places.
    """
    with stepped(slots=1, chunk_blocks=chunk_blocks) as played:
        manager = played.manager
        a, b = keys("AB")
        played.store("w", [a])
        reader = played.start(context("r", [a]))
        assert manager.lookup(a, reader) is HIT
        manager.prepare_load([a], reader)
        output = manager.prepare_store([b], played.start(context("s", [b])))
        if chunk_blocks == 1:
            assert output is None
        else:
            assert output is not None
            assert list(output.keys_to_store) == []
        assert played.facade.statistics().primary.counts.stores_dropped == 1


def test_slots_of_several_groups_are_granted_in_the_order_of_the_offer() -> None:
    """They are judged in token order; vLLM pairs what it offered with slots by its own order."""
    with stepped(slots=8, groups=2) as played:
        full, window = keys("ABC"), keys("ABC", group=1)
        offered = [*full, *window]
        writer = played.start(context("w", offered))
        output = played.manager.prepare_store(offered, writer)
        assert output is not None
        assert output.keys_to_store == offered
        assert list(output.store_spec.block_ids) == [
            played.runtime.primary.slot_of(key) for key in offered
        ]


def test_a_store_of_several_groups_is_cut_at_one_token() -> None:
    with stepped(slots=5, groups=2) as played:
        full, window = keys("ABC"), keys("ABC", group=1)
        writer = played.start(context("w", [*full, *window]))
        output = played.manager.prepare_store([*full, *window], writer)
        assert output is not None
        assert output.keys_to_store == [*full[:2], *window[:2]]


def test_blocks_are_used_in_token_order_where_there_are_several_groups() -> None:
    """So the tails of all groups go before their heads."""
    with stepped(slots=4, groups=2) as played:
        full, window = keys("AB"), keys("AB", group=1)
        writer = played.start(context("w", [*full, *window]))
        output = played.manager.prepare_store([*full, *window], writer)
        assert output is not None
        played.manager.complete_store(set(output.keys_to_store), writer)
        played.manager.touch([*full, *window], writer)
        played.manager.on_request_finished(writer)
        played.step()
        other = played.start(context("o", keys("XY")))
        output = played.manager.prepare_store(keys("XY"), other)
        assert output is not None
        assert set(output.evicted_keys) == {full[1], window[1]}


def test_a_block_that_is_touched_goes_after_one_that_is_not() -> None:
    with stepped(slots=2) as played:
        old, young = keys("AB")
        played.store("w", [old])
        played.store("v", [young])
        played.manager.touch([old], played.start(context("r", [old])))
        output = played.manager.prepare_store(keys("X"), played.start(context("o", keys("X"))))
        assert output is not None
        assert list(output.evicted_keys) == [young]


def test_the_order_of_a_requests_blocks_is_told_when_it_ends() -> None:
    """It used the tail first, which goes first all the same."""
    with stepped(slots=2) as played:
        head, tail = keys("AB")
        played.store("w", [head, tail])
        asked = played.start(context("r", [head, tail]))
        for key in (tail, head):
            played.manager.touch([key], asked)
        played.manager.on_request_finished(asked)
        played.step()
        output = played.manager.prepare_store(keys("X"), played.start(context("o", keys("X"))))
        assert output is not None
        assert list(output.evicted_keys) == [tail]
