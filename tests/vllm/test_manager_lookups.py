"""What a lookup of vLLM's is answered, over actors in the test cell, and where blocks came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadPolicy, TierFilter, TierMatcher
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.vllm.support.stepped_manager import CHUNK_TOKENS, FS, MEMORY, context, keys, stepped

MISS = LookupResult.MISS
RETRY = LookupResult.RETRY
HIT = LookupResult.HIT
PENDING = LookupResult.HIT_PENDING


def test_the_answers_of_a_lookup_are_vllms() -> None:
    with stepped(slots=2, tiers=[FS]) as played:
        (key,) = keys("A")
        asked = played.start(context("r", [key]))
        assert played.manager.lookup(key, asked) is RETRY
        played.step()
        played.answer()
        assert played.manager.lookup(key, asked) is PENDING
        played.step()
        played.answer()
        assert played.manager.lookup(key, asked) is HIT
    with stepped() as played:
        assert played.manager.lookup(key, played.start(context("r", [key]))) is MISS


def test_the_first_lookup_of_a_step_asks_for_all_that_comes_behind() -> None:
    """vLLM asks key by key; what lies ahead is answered from what was found with the first."""
    with stepped(tiers=[FS]) as played:
        order = keys("ABC")
        asked = played.start(context("r", order))
        assert played.manager.lookup(order[0], asked) is RETRY
        played.step()
        (probe,) = played.answer()
        assert list(probe.keys) == order
        assert played.manager.lookup(order[0], asked) is PENDING
        played.step()
        (load,) = played.answer()
        assert list(load.keys) == order


def test_what_was_found_ahead_is_of_one_step_and_one_request() -> None:
    with stepped(tiers=[FS]) as played:
        order = keys("AB")
        asked = played.start(context("r", order))
        assert [played.manager.lookup(key, asked) for key in order] == [RETRY, RETRY]
        played.answer()  # nothing was asked yet
        assert [played.manager.lookup(key, asked) for key in order] == [RETRY, RETRY]
        played.step()
        played.answer()
        other = played.start(context("s", order))
        assert [played.manager.lookup(key, asked) for key in order] == [PENDING, PENDING]
        assert played.manager.lookup(order[0], other) is PENDING
        played.step()
        played.answer()
        assert [played.manager.lookup(key, asked) for key in order] == [HIT, HIT]


def test_what_was_found_ahead_in_an_earlier_step_is_no_answer_in_a_later_one() -> None:
    """The GPU has the head by now, so vLLM asks first for what it asked for second before."""
    with stepped(tiers=[FS]) as played:
        a, b = keys("AB")
        asked = played.start(context("r", [a, b]))
        assert [played.manager.lookup(key, asked) for key in (a, b)] == [RETRY, RETRY]
        played.step()
        played.answer()
        assert played.manager.lookup(b, asked) is PENDING
        played.step()
        played.answer()
        assert played.manager.lookup(b, asked) is HIT


@pytest.mark.parametrize("call", ["store", "complete", "finish", "reset"])
def test_what_was_found_ahead_does_not_outlive_a_change(call: str) -> None:
    """A block stored, evicted or forgotten in the same step is answered as it is now."""
    with stepped(slots=2) as played:
        manager = played.manager
        a, b = keys("AB")
        played.store("w", [a, b])
        asked = context("r", [a, b])
        played.start(asked)
        if call == "complete":
            played.facade.reset()
            played.facade.on_reset_flushed()
            writer = played.start(context("w", [a, b]))
            output = manager.prepare_store([a, b], writer)
            assert output is not None
            assert manager.lookup(a, asked) is PENDING
            manager.complete_store({a, b}, writer)
            assert manager.lookup(a, asked) is HIT
            return
        assert manager.lookup(a, asked) is HIT
        if call == "reset":
            manager.reset_cache()
            assert manager.lookup(a, asked) is MISS
        elif call == "finish":
            manager.on_request_finished(asked)
            played.facade.reset()
            assert manager.lookup(a, asked) is MISS
        else:
            assert manager._ahead_of is asked
            manager.prepare_store([a, b], asked)
            assert manager._ahead_of is None


def test_a_key_that_is_not_the_requests_is_looked_up_by_itself() -> None:
    with stepped(tiers=[FS]) as played:
        a, b, stranger = keys("ABX")
        asked = played.start(context("r", [a, b]))
        assert played.manager.lookup(stranger, asked) is RETRY
        played.step()
        (probe,) = played.answer()
        assert list(probe.keys) == [stranger]
        assert played.manager.lookup(stranger, asked) is PENDING
        assert played.manager.lookup(a, asked) is RETRY


@pytest.mark.parametrize(
    ("cap", "asked_for"),
    [
        (None, 4),
        (2 * CHUNK_TOKENS, 2),
        (3 * CHUNK_TOKENS - 1, 2),
        (1, 1),
        (0, 1),
        (-1, 4),
        (True, 4),
        ("64", 4),
        (100 * CHUNK_TOKENS, 4),
    ],
)
def test_no_more_is_looked_up_ahead_than_max_load_tokens_allows(cap: Any, asked_for: int) -> None:
    with stepped(tiers=[FS]) as played:
        order = keys("ABCD")
        params = {} if cap is None else {"max_load_tokens": cap}
        asked = played.start(context("r", order, **params))
        played.manager.lookup(order[0], asked)
        played.step()
        (probe,) = played.answer()
        assert list(probe.keys) == order[:asked_for]


def test_the_cap_counts_from_the_first_key_that_is_asked_for() -> None:
    """The GPU has those before it."""
    with stepped(tiers=[FS]) as played:
        order = keys("ABCD")
        asked = played.start(context("r", order, max_load_tokens=2 * CHUNK_TOKENS))
        played.manager.lookup(order[1], asked)
        played.step()
        (probe,) = played.answer()
        assert list(probe.keys) == order[1:3]


def test_a_request_is_served_from_the_tiers_that_its_filter_allows() -> None:
    with stepped(slots=2, tiers=[MEMORY, FS]) as played:
        order = keys("A")
        storage = TierFilter((TierMatcher(medium=Medium.STORAGE),))
        for name, allowed, tiers in (
            ("none", TierFilter(()), []),
            ("storage", storage, [1]),
            ("all", TierFilter.ALL, [0, 1]),
        ):
            asked = played.start(replace(context(name), load_tier_filter=allowed))
            played.manager.lookup(order[0], asked)
            played.step()
            played.runtime.cell.settle()
            waiting = [n for n, tier in enumerate(played.runtime.tiers) if tier.batches]
            assert waiting == tiers, name
            for tier in played.runtime.tiers:
                for batch in list(tier.batches):
                    tier.answer(batch, [3] * len(batch.keys))
            played.runtime.cell.settle()


@pytest.mark.parametrize(
    ("policy", "told"),
    [("chunk_level", OffloadPolicy.CHUNK_LEVEL), ("request_level", OffloadPolicy.REQUEST_LEVEL)],
)
def test_vllm_is_told_whether_a_tier_wants_whole_requests(policy: str, told: OffloadPolicy) -> None:
    with stepped(tiers=[MEMORY, {**FS, "offload_policy": policy}]) as played:
        assert played.manager.on_new_request(context("r")).policy is told


@pytest.mark.parametrize(
    ("tier", "source"), [(FS, CacheHitSource.DISK), (MEMORY, CacheHitSource.HOST)]
)
def test_the_source_of_a_load_is_the_tier_that_brought_the_block(
    tier: dict[str, Any], source: CacheHitSource
) -> None:
    with stepped(slots=4, tiers=[tier]) as played:
        a, b = keys("AB")
        played.store("w", [a])
        played.evict()
        asked = played.promote("r", [a])
        played.start(context("writer", [b]))
        assert played.manager.get_load_source(a, asked) is source
        assert played.manager.get_load_source(b, asked) is CacheHitSource.HOST


def test_sources_are_those_of_now_in_each_step_and_after_a_reset() -> None:
    with stepped(slots=4, tiers=[FS]) as played:
        (a,) = keys("A")
        played.store("w", [a])
        played.evict()
        asked = played.start(context("r", [a]))
        manager = played.manager
        assert manager.get_load_source(a, asked) is CacheHitSource.HOST
        played.manager.lookup(a, asked)
        played.step()
        played.answer()
        assert manager.get_load_source(a, asked) is CacheHitSource.DISK, "another step"
        manager.reset_cache()
        assert manager.get_load_source(a, asked) is CacheHitSource.HOST
        manager.on_request_finished(asked)
        assert manager._sources_of is None
