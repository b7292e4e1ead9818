"""vLLM's own tiers as tiers of kvtier: what they keep comes back, whatever else they do."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import ConfigError
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.vllm.hosted.stats import WAITING_MAX
from kvtier.vllm.spec import KVTierOffloadingSpec
from tests.support.patience import until
from tests.vllm.support.managers import manager
from tests.vllm.support.scripted_tier import COUNTED, METHODS, SEEN, ScriptedTier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOTS = 8
BLOCK = 8192
NO_STEP = ScheduleEndContext((), ())
SHORT_S = {"probe_timeout_s": 0.05, "promote_timeout_s": 0.05, "store_timeout_s": 0.05}


def hosted(tier: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"type": "vllm", "tier": tier, **settings}


def scripted(settings: dict[str, Any] | None = None, **script: Any) -> dict[str, Any]:
    tier = {"type": "ScriptedTier", "module_path": "tests.vllm.support.scripted_tier", **script}
    return hosted(tier, **(settings or {}))


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(GROUP_BYTES)


def block_of(number: int) -> bytes:
    return bytes([number % 255 + 1]) * BLOCK


class Engine:
    """Plays one engine's requests on a manager, as vLLM does, block by block."""

    def __init__(self, played: Any) -> None:
        self.manager = played
        self._requests = 0

    @contextmanager
    def request(
        self, numbers: list[int], params: dict[str, Any] | None = None
    ) -> Iterator[ReqContext]:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}", kv_transfer_params=params)
        for place, number in enumerate(numbers):
            context.set_offload_key_position(key_of(number), 32 * (place + 1))
        self.manager.on_new_request(context)
        yield context
        self.step()  # the one in which it ran: vLLM ends no request before
        self.manager.on_request_finished(context)
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end(NO_STEP)

    def open(self) -> None:
        """Wait until tiers are open: with short limits, one that opens slowly counts as hung."""
        until(lambda: all(tier._opening.is_open for tier in self.manager.facade._tiers))

    def store(self, numbers: list[int]) -> None:
        """Write blocks as the GPU would, and let the tiers take them."""
        with self.request(numbers) as context:
            keys = [key_of(number) for number in numbers]
            until(lambda: self._stored(keys, context))

    def _stored(self, keys: list[bytes], context: ReqContext) -> bool:
        self.step()
        grant = self.manager.prepare_store(keys, context)
        if grant is None:
            return False
        for key, slot in zip(grant.keys_to_store, grant.store_spec.chunk_ids, strict=True):
            number = int.from_bytes(key[:-GROUP_BYTES], "big")
            self.manager._memory.view(int(slot))[:] = block_of(number)
        self.manager.complete_store(grant.keys_to_store, context)
        return True

    def settle(self) -> None:
        """Step until no job is under way."""

        def is_at_rest() -> bool:
            self.step()
            (tier,) = self.statistics().tiers
            return not (tier.cascade_jobs_in_flight or tier.promotion_jobs_in_flight)

        until(is_at_rest)

    def evict(self) -> None:
        """Have the primary tier full of other blocks. A tier may pin half of it at a time."""
        self.settle()
        for _ in range(2):
            self.store([1000 + self._requests * SLOTS + n for n in range(SLOTS // 2)])
            self.settle()

    def counts(self, what: str, wanted: int) -> None:
        """Wait until the backend has told of a count."""

        def is_told() -> bool:
            self.step()
            (tier,) = self.statistics().tiers
            return {**tier.backend_counters, **tier.backend_gauges}.get(what) == wanted

        until(is_told, lambda: self.statistics().tiers[0])

    def read(self, numbers: list[int]) -> list[int]:
        """Return which blocks were hits, from the first on; each must have its own bytes."""
        with self.request(numbers) as context:
            keys = [key_of(number) for number in numbers]
            hits: list[bytes] = []

            def is_decided() -> bool:
                hits.clear()
                for key in keys:
                    result = self.manager.lookup(key, context)
                    if result is not LookupResult.HIT:
                        break
                    hits.append(key)
                self.step()
                return result in (LookupResult.HIT, LookupResult.MISS)

            until(is_decided)
            if hits:
                spec = self.manager.prepare_load(hits, context)
                for key, slot in zip(hits, spec.chunk_ids, strict=True):
                    number = int.from_bytes(key[:-GROUP_BYTES], "big")
                    assert bytes(self.manager._memory.view(int(slot))) == block_of(number)
                self.manager.complete_load(hits, context)
        return [int.from_bytes(key[:-GROUP_BYTES], "big") for key in hits]

    def statistics(self) -> Any:
        return self.manager.facade.statistics()


@contextmanager
def engine(*tiers: dict[str, Any], **others: Any) -> Iterator[Engine]:
    settings = {"cpu_bytes_to_use": SLOTS * BLOCK, "eviction_policy": "lru", **others}
    with manager(**settings, secondary_tiers=list(tiers)) as played:
        yield Engine(played)


# --- vLLM's fs ---


def test_a_file_that_was_damaged_is_a_miss_and_is_not_read_again(tmp_path: Path) -> None:
    with engine(hosted({"type": "fs", "root_dir": str(tmp_path)})) as played:
        played.store([1, 2])
        played.evict()
        (file,) = [each for each in tmp_path.rglob("*.bin") if key_of(1)[:-4].hex() in each.name]
        file.write_bytes(bytes(BLOCK))
        assert played.read([1]) == []
        assert played.read([2]) == [2]
        assert played.read([1]) == []
        (tier,) = played.statistics().tiers
        assert tier.counts.damaged == 1
        played.counts("blocks_not_trusted", 1)


def test_after_a_reset_nothing_older_is_found_and_newer_blocks_are(tmp_path: Path) -> None:
    with engine(hosted({"type": "fs", "root_dir": str(tmp_path)})) as played:
        played.store([1, 2])
        played.evict()
        played.manager.reset_cache()
        played.step()
        assert played.read([1, 2]) == []
        played.store([1, 2])
        played.evict()
        assert played.read([1, 2]) == [1, 2]
        (tier,) = played.statistics().tiers
        assert tier.counts.read_bytes == 2 * BLOCK


# --- a user's own ---


def test_medium_and_source_are_the_hosted_tiers() -> None:
    with engine(scripted({"locality": "REMOTE"})) as played:
        (tier,) = played.manager._tiers
        assert tier.medium is Medium.STORAGE
        assert tier.hit_source is CacheHitSource.DISK
    with engine(hosted({"type": "example"})) as played:
        (tier,) = played.manager._tiers
        assert (tier.medium, tier.hit_source) == (Medium.CPU, CacheHitSource.HOST)


def test_blocks_come_back_and_no_request_of_the_tier_is_left_open() -> None:
    with engine(scripted()) as played:
        played.store([1, 2, 3])
        played.evict()
        assert played.read([1, 2, 3, 9]) == [1, 2, 3]
        until(lambda: not ScriptedTier.last.requests)


def test_a_tier_that_lies_is_found_out() -> None:
    with engine(scripted()) as played:
        played.store([1, 2])
        played.evict()
        ScriptedTier.last.lies = True
        assert played.read([1, 2]) == []
        ScriptedTier.last.lies = False
        assert played.read([1, 2]) == []  # not trusted any more
        played.store([1, 2])  # until it is stored anew
        played.evict()
        assert played.read([1, 2]) == [1, 2]


def test_a_load_that_fails_midway_keeps_what_it_brought() -> None:
    with engine(scripted()) as played:
        played.store([1, 2, 3])
        played.evict()
        ScriptedTier.last.failing = {key_of(3)}
        assert played.read([1, 2, 3]) == [1, 2]
        (tier,) = played.statistics().tiers
        assert tier.counts.failed == 1  # the tier says that it has it


def test_one_thread_calls_all_methods_of_a_tier_and_another_one_ends_it() -> None:
    """A tier of vLLM 0.33 that says False to ``tolerates_off_thread_polling`` relies on it.

    A load that nobody can tell the end of is among it, for which the tier's jobs are drained.
    """
    with engine(scripted(SHORT_S)) as played:
        played.open()
        tier = ScriptedTier.last
        played.store([1, 2, 3])
        played.evict()
        assert played.read([1, 2, 3, 9]) == [1, 2, 3]
        played.evict()
        tier.raises_in = "get_finished_jobs"
        played.read([1, 2])
        until(lambda: played.step() or "drain_jobs" in tier.threads)
        tier.raises_in = ""
        played.settle()
        lived_on = {name: set(threads) for name, threads in tier.threads.items()}
    assert lived_on.keys() == {*METHODS} - {"shutdown"}
    (own,) = set.union(*lived_on.values())
    assert own != threading.current_thread().name
    (last,) = tier.threads["shutdown"]
    assert last != own
    for name, threads in tier.threads.items():
        assert threads <= {own, *([last] if name in ("drain_jobs", "shutdown") else [])}, name
    assert tier.overlaps == []


def test_what_a_tier_removes_by_itself_is_known_to_be_gone() -> None:
    with engine(scripted()) as played:
        played.store([1, 2])
        played.evict()
        ScriptedTier.last.removed = [key_of(1)]
        played.store([9])  # to make room, say
        played.settle()

        def is_known() -> bool:
            played.step()
            known = played.manager.facade._primary.audit().directory.known
            return key_of(1) not in known and key_of(2) in known

        until(is_known)
        assert played.read([2]) == [2]
        assert played.statistics().tiers[0].counts.load_misses == 0


def reported(*metrics: tuple[str, float]) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    for metric, value in metrics:
        label = () if metric == SEEN else ("scripted",)
        add = stats.observe_histogram if metric == SEEN else stats.increase_counter
        add(metric, value, label)
    return stats


def test_what_a_tier_counts_itself_is_told_to_vllm_as_far_as_it_has_defined_it() -> None:
    """vLLM's front end ends at a metric that it does not know."""
    assert scripted_metrics() >= {COUNTED, SEEN, "scripted:level"}
    with engine(scripted()) as played:
        told = OffloadingConnectorStats()
        for count in (2, 3):
            ScriptedTier.last.stats = reported((COUNTED, count), (SEEN, 7.5), ("unheard:of", 1))
            played.store([count])
            played.settle()
            told.aggregate(played.manager.get_stats())
        assert told.data["data"][COUNTED] == {("scripted",): 5}
        assert told.data["data"][SEEN] == {(): [7.5, 7.5]}
        assert "unheard:of" not in told.data["data"]
        assert played.manager._watch.dropped["bad_value"] == 2


def scripted_metrics() -> set[str]:
    return set(KVTierOffloadingSpec.metrics({"secondary_tiers": [scripted(), hosted({})]}))


def test_a_tier_is_asked_for_no_more_counts_than_vllm_takes() -> None:
    with engine(scripted()) as played:
        for number in range(WAITING_MAX + 8):
            ScriptedTier.last.stats = reported((COUNTED, 1))
            played.store([number])
            played.settle()
        assert ScriptedTier.last.stats is not None, "it counts on"
        told = played.manager.get_stats()
        assert told.data["data"][COUNTED] == {("scripted",): WAITING_MAX}


def test_what_a_tier_tells_of_itself_is_told_to_vllm() -> None:
    with engine(scripted(), hosted({"type": "example", "custom_param": 67})) as played:
        _, first, second = played.manager.config_info()
        assert first == {"mood": "calm", "tier": "1:vllm"}
        keys = {"example_info"} if hasattr(SecondaryTierManager, "config_info_keys") else set()
        assert second.keys() - {"tier"} == keys  # vLLM 0.33
        tiers = [scripted(), hosted({"type": "example"})]
        declared = KVTierOffloadingSpec.config_info_keys({"secondary_tiers": tiers})
        assert not keys or set(declared) >= {"mood", "example_info", "tier"}


def test_results_of_unknown_jobs_are_counted_and_otherwise_ignored() -> None:
    with engine(scripted()) as played:
        ScriptedTier.last.extra = [JobResult(10**6, success=True)]
        played.store([1])
        played.evict()
        assert played.read([1]) == [1]
        played.counts("unknown_jobs", 1)


def test_a_late_load_writes_no_slot_that_is_anothers() -> None:
    """The deadline passes, and the tier writes afterwards: the slot is kept back until then."""
    with engine(scripted(SHORT_S)) as played:
        played.open()
        played.store([1])
        played.evict()
        tier = ScriptedTier.last
        tier.held = []
        assert played.read([1]) == []
        assert played.statistics().primary.quarantined_slots == 1
        others = list(range(20, 20 + SLOTS - 1))  # as many as there are slots besides
        for number in others:
            played.store([number])
        for job in tier.held:
            tier.finish_load(job)
        tier.held = None

        def is_given_back() -> bool:
            played.step()
            return not played.statistics().primary.quarantined_slots

        until(is_given_back)
        assert played.read(others) == others


@pytest.mark.parametrize("method", METHODS)
def test_a_tier_that_raises_in_any_method_costs_hits_and_nothing_else(method: str) -> None:
    with engine(scripted(SHORT_S)) as played:
        played.open()
        played.store([1, 2])
        played.settle()
        ScriptedTier.last.raises_in = method
        played.store([100 + n for n in range(SLOTS)])
        played.read([1, 2])
        played.store([3])
        assert played.read([3]) == [3]
        ScriptedTier.last.raises_in = ""
        played.settle()


@pytest.mark.parametrize("method", METHODS)
def test_a_tier_that_hangs_in_any_method_holds_up_no_call_and_no_request(method: str) -> None:
    """It hangs for as long as calls and requests go on: one that waited for it would never end."""
    with engine(scripted(SHORT_S), close_timeout_s=0.05) as played:
        played.open()
        played.store([1, 2])
        played.evict()
        tier = ScriptedTier.last
        tier.hangs_in = method
        for _ in range(3):
            played.read([1, 2])
            assert played.read([99]) == []  # is asked for: nobody knows where it is
            played.store([3])
            assert played.read([3]) == [3]
            if tier.hangs.is_set():
                break
        assert tier.hangs.is_set() == (method not in ("drain_jobs", "shutdown"))
        if method in ("drain_jobs", "shutdown"):
            return  # it hangs at the end, which the manager doesn't wait for
        tier.hangs_in = ""
        tier.goes_on.set()
        played.settle()


# --- the door ---


def test_limits_of_vllms_tiering_reach_no_hosted_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """Its factory would look the class up, and refuse the tier."""
    limits = {"backpressure": {"backpressure_cls": "NoSuchDetector"}}
    with engine(hosted({"type": "example", **limits})) as played:
        played.open()
    assert capsys.readouterr().out.count("a key of vLLM's is ignored") == 1


@pytest.mark.parametrize(
    ("tier", "text"),
    [
        ({"type": "vllm"}, "tier is missing"),
        (
            hosted({"type": "ServingTier", "module_path": "tests.vllm.support.tenant_tier"}),
            "serves the requests of other engines",
        ),
        (hosted({"type": "kvcr"}), "Use p2p, or vLLM's TieringOffloadingSpec"),
        (hosted({"type": "nosuch"}), "type='nosuch' can't be loaded"),
        (hosted({"type": "X", "module_path": "no.such.module"}), "can't be loaded"),
        (hosted({"root_dir": "/x"}), "type"),
        (hosted({"type": "fs"}), "root_dir"),
        (hosted({"type": "fs", "root_dir": "/proc/nowhere"}), "vLLM can't build its tier 'fs'"),
        (hosted({"type": "example", "enable_kv_events": True}), "Set it beside tier"),
        (hosted({"type": "example"}, isolation="process"), "isolation"),
        (hosted({"type": "example"}, nosuch=1), "nosuch"),
    ],
)
def test_what_can_t_be_hosted_is_refused_with_the_remedy(tier: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused, engine(tier):
        pass
    assert text in str(refused.value)
