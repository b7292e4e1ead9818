"""What each call of vLLM's on the manager does, over actors in the test cell."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    TierFilter,
    TierMatcher,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.vllm import manager as manager_module
from tests.vllm.support.stepped_manager import CHUNK_TOKENS, context, keys, stepped

if TYPE_CHECKING:
    from tests.vllm.support.stepped_manager import SteppedManager

MISS, RETRY = LookupResult.MISS, LookupResult.RETRY
HIT, PENDING = LookupResult.HIT, LookupResult.HIT_PENDING
FS = {"type": "fs", "root_dir": "/nowhere"}
MEMORY = {"type": "memory", "capacity_bytes": 1 << 20}
TELLS_WHEN_FLUSHED = manager_module._TELLS_WHEN_FLUSHED


def evict(played: SteppedManager, name: str = "other") -> None:
    """Store as many other blocks as there are slots, so that tiers alone have those of before."""
    slots = played.runtime.primary.slots.count
    played.store(name, [bytes([200 + n]) * 32 + bytes(4) for n in range(slots)])


# --- lookups ---


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


# --- where blocks came from ---


@pytest.mark.parametrize(
    ("tier", "source"), [(FS, CacheHitSource.DISK), (MEMORY, CacheHitSource.HOST)]
)
def test_the_source_of_a_load_is_the_tier_that_brought_the_block(
    tier: dict[str, Any], source: CacheHitSource
) -> None:
    with stepped(slots=4, tiers=[tier]) as played:
        a, b = keys("AB")
        played.store("w", [a])
        evict(played)
        asked = played.promote("r", [a])
        played.start(context("writer", [b]))
        assert played.manager.get_load_source(a, asked) is source
        assert played.manager.get_load_source(b, asked) is CacheHitSource.HOST


def test_sources_are_those_of_now_in_each_step_and_after_a_reset() -> None:
    with stepped(slots=4, tiers=[FS]) as played:
        (a,) = keys("A")
        played.store("w", [a])
        evict(played)
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
        assert not manager._sources


# --- loads ---


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
        evict(played)
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
        evict(played)
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
            assert not manager._orders._of
        assert played.promotion_slots() == 0
        played.step()
        assert not manager._loading
        assert not manager._undecided


def test_a_request_of_several_groups_that_had_no_room_is_promoted_once_there_is_some() -> None:
    """It asks in each step while it waits, is refused once, and asks again in the next."""
    with stepped(slots=6, tiers=[FS], groups=2) as played:
        manager = played.manager
        wanted = {
            name: [*keys(text), *keys(text, group=1)] for name, text in (("a", "AB"), ("b", "CD"))
        }
        for name, order in wanted.items():
            played.store(f"writes {name}", order)
        evict(played)
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


# --- stores ---


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
        assert [grant.keys for grant in manager._granted["w"]] == [first, second]
        manager.complete_store(set(second), writer)
        assert played.runtime.primary.resident() == set(second)
        manager.complete_store({first[0]}, writer)
        assert played.runtime.primary.resident() == {first[0], *second}
        assert not manager._granted
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
        assert manager.prepare_store([c], writer) is None
        again = manager.prepare_store([a, b], writer)
        assert again is not None
        assert (list(again.keys_to_store), list(again.evicted_keys)) == ([], [])
        assert not manager._granted
        manager.complete_load([a, b], reader)
        played.step()
        output = manager.prepare_store([c], writer)
        assert output is not None
        assert list(output.evicted_keys) == [b], "the tail of the only run"


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


# --- steps ---


def test_an_engine_that_nobody_asked_anything_steps_once() -> None:
    with stepped(tiers=[FS]) as played:
        assert played.manager.has_pending_work()
        played.step()
        assert not played.manager.has_pending_work()
        played.manager.lookup(keys("A")[0], played.start(context("r", keys("A"))))
        played.step()
        assert played.manager.has_pending_work(), "a probe is under way"
        played.answer()
        assert not played.manager.has_pending_work()


@pytest.mark.parametrize(("pp_size", "steps"), [(1, 5), (2, 5), (4, 9)])
def test_a_reset_waits_for_the_gpu_as_long_as_steps_may_be_in_flight(
    pp_size: int, steps: int
) -> None:
    """vLLM 0.32 does not say when; 0.33 does."""
    with stepped(slots=2, pp_size=pp_size) as played:
        manager = played.manager
        writer = played.start(context("w", keys("A")))
        manager.prepare_store(keys("A"), writer)
        played.step()
        manager.reset_cache()
        if TELLS_WHEN_FLUSHED:
            played.step()
            assert played.facade.statistics().primary.quarantined_slots == 1
            manager.on_reset_flushed()
            assert played.facade.statistics().primary.quarantined_slots == 0
            return
        for _ in range(steps):
            assert played.facade.statistics().primary.quarantined_slots == 1
            assert manager.has_pending_work()
            played.step()
        assert played.facade.statistics().primary.quarantined_slots == 0
        assert not manager.has_pending_work()


def test_a_reset_forgets_what_was_under_way() -> None:
    """vLLM's connector drops the completions: a later one is of a later store."""
    with stepped(slots=8, tiers=[FS], groups=2) as played:
        manager = played.manager
        played.store("w", keys("AB"))
        evict(played)
        asked = played.start(context("r", [*keys("AB"), *keys("AB", group=1)]))
        manager.prepare_store(keys("C"), asked)
        for key in keys("AB"):
            manager.lookup(key, asked)
        assert manager._granted
        assert manager._passes
        assert manager._undecided
        manager._refused.add("r")
        manager.reset_cache()
        left = (manager._granted, manager._passes, manager._undecided, manager._refused)
        assert not any(left)
        assert manager._ahead_of is None


class Spinning:
    """Stands in for ``time`` in the manager's module: a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_an_engine_that_spins_lets_its_tiers_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where steps follow one another at once, and only while a tier works."""
    clock = Spinning()
    monkeypatch.setattr(manager_module, "time", clock)
    with stepped(tiers=[FS]) as played:
        played.step()
        played.step()
        assert clock.slept == [], "no tier has anything to do"
        played.manager.lookup(keys("A")[0], played.start(context("r", keys("A"))))
        clock.now += manager_module.SPIN_S
        played.step()
        assert clock.slept == [], "the step computed"
        clock.now += manager_module.SPIN_S / 2
        played.step()
        assert clock.slept == [manager_module.SPIN_YIELD_S]
        clock.now += manager_module.SPIN_S - manager_module.SPIN_YIELD_S / 2
        played.step()
        assert len(clock.slept) == 2, "the time is counted from the end of the pause"


def test_the_region_loses_its_name_as_soon_as_all_have_mapped_it() -> None:
    with stepped() as played:
        tries: list[bool] = []

        def try_unlink() -> bool:
            tries.append(len(tries) == 1)
            return tries[-1]

        played.manager._region = SimpleNamespace(try_unlink=try_unlink, close=played.region.close)
        for _ in range(4):
            played.step()
        assert tries == [False, True], "and nobody asks again"


# --- observing ---


def test_events_have_vllms_words() -> None:
    tiers = [
        {**MEMORY, "enable_kv_events": True},
        {**FS, "enable_kv_events": True, "locality": "REMOTE"},
    ]
    with stepped(slots=1, tiers=tiers) as played:
        (a,), (b,) = keys("A"), keys("B")
        played.store("w", [a])
        played.store("v", [b])
        played.manager.reset_cache()
        seen = list(played.manager.take_events())
        assert all(isinstance(event.keys, list) for event in seen)
        facts = [
            (event.keys, event.medium, event.removed, event.locality, event.ownership)
            for event in seen
        ]
        cpu, storage = Medium.CPU, Medium.STORAGE
        name = [tier.name for tier in played.manager._tiers]
        assert facts[:3] == [
            ([a], cpu, False, None, None),
            ([a], cpu, True, None, None),
            ([b], cpu, False, None, None),
        ]
        assert facts[3:] == [
            ([a], cpu, False, None, name[0]),
            ([b], cpu, False, None, name[0]),
            ([a], storage, False, Locality.REMOTE, name[1]),
            ([b], storage, False, Locality.REMOTE, name[1]),
        ]
        assert list(played.manager.take_events()) == []


def test_labels_name_all_tiers() -> None:
    with stepped(tiers=[MEMORY, FS]) as played:
        names = [labels["tier"] for labels in played.manager.config_info()]
        assert names == ["0:primary", *(tier.name for tier in played.manager._tiers)]


def test_the_lock_is_an_empty_one() -> None:
    with stepped() as played, played.manager.lock, played.manager.lock:
        assert played.manager.get_stats() is not None


# --- the end ---


@pytest.mark.parametrize("is_quiet", [True, False])
def test_memory_is_released_only_when_no_tier_can_touch_it(is_quiet: bool) -> None:
    with stepped() as played:
        manager = played.manager
        done: list[str] = []
        manager.facade = SimpleNamespace(close=lambda: is_quiet)
        manager._memory = SimpleNamespace(release=lambda: done.append("memory"))
        manager._region = SimpleNamespace(
            close=lambda: done.append("region"), try_unlink=lambda: done.append("name")
        )
        manager.shutdown()
        assert done == (["memory", "region"] if is_quiet else ["name"])
        manager.facade = played.facade
        manager._memory = SimpleNamespace(release=lambda: None)
