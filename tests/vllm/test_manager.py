"""What steps, resets, events and the end do in the manager, over actors in the test cell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import Locality, Medium

from kvtier.vllm.releases import NOTIFIES_WHEN_FLUSHED
from kvtier.vllm.scheduler import manager as manager_module
from tests.vllm.support.stepped_manager import FS, MEMORY, context, keys, stepped


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
        if NOTIFIES_WHEN_FLUSHED:
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
        played.evict()
        asked = played.start(context("r", [*keys("AB"), *keys("AB", group=1)]))
        manager.prepare_store(keys("C"), asked)
        for key in keys("AB"):
            manager.lookup(key, asked)
        assert manager._granted._of
        assert manager._group_lookups._of
        requests = manager.requests
        assert requests.is_undecided("r")
        requests.of("r").refuse(is_refused=True)
        manager.reset_cache()
        assert not manager._granted._of
        assert not manager._group_lookups._of
        assert not requests.is_undecided("r")
        assert not requests.of("r").was_refused
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
        clock.now += 0.01
        played.step()
        assert len(clock.slept) == 2, "that is what a step takes which computes"
        assert clock.slept[0] < 0.001, "and a pause takes far less"
        played.start(context("runs", keys("B")))
        played.step()
        played.step()
        assert len(clock.slept) == 2, "a request runs, however little it computes"


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


def test_events_have_vllms_words() -> None:
    tiers = [{**FS, "enable_kv_events": True, "locality": "REMOTE"}]
    with stepped(slots=1, tiers=tiers) as played:
        (a,), (b,) = keys("A"), keys("B")
        played.store("w", [a])
        played.store("v", [b])
        seen = list(played.manager.take_events())
        assert all(isinstance(event.keys, list) for event in seen)
        facts = [
            (event.keys, event.medium, event.removed, event.locality, event.ownership)
            for event in seen
        ]
        cpu, storage = Medium.CPU, Medium.STORAGE
        (tier,) = played.manager._tiers
        assert facts == [
            ([a], cpu, False, None, None),
            ([a], cpu, True, None, None),
            ([b], cpu, False, None, None),
            ([a], storage, False, Locality.REMOTE, tier.name),
            ([b], storage, False, Locality.REMOTE, tier.name),
        ]
        assert list(played.manager.take_events()) == []


def test_labels_name_all_tiers() -> None:
    with stepped(tiers=[MEMORY, FS]) as played:
        names = [labels["tier"] for labels in played.manager.config_info()]
        assert names == ["0:primary", *(tier.name for tier in played.manager._tiers)]


def test_the_lock_is_an_empty_one() -> None:
    with stepped() as played, played.manager.lock, played.manager.lock:
        assert played.manager.get_stats() is not None


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
