"""A kvtier tier behind vLLM's own ``TieringOffloadingManager``, which is the real one here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier.errors import ConfigError
from kvtier.tools.cli.main import main
from kvtier.vllm import KVTierSecondaryTier
from kvtier_backends.memory import MemoryBackend
from stress.bench.sides import make_keys
from tests.support.patience import PATIENCE_S, until
from tests.support.redis_servers import running as running_server
from tests.vllm.support.own_tiering import (
    BLOCK,
    Tiering,
    bytes_of,
    disk,
    entry,
    memory,
    tiering,
)
from tests.vllm.support.scripted_tier import COUNTED, ScriptedTier

if TYPE_CHECKING:
    from pathlib import Path

SLOTS = 8
KEYS = make_keys(0, 4)
OTHERS = make_keys(100, SLOTS)  #: as many as the primary tier holds
SOON = 0.05  #: a deadline that is meant to pass
HANG = {"hang": True}


def pushed_out(running: Tiering, keys: list[bytes] = KEYS) -> Tiering:
    """Store blocks, and have others take their slots in the primary tier."""
    running.store(keys)
    running.store(OTHERS)
    return running


def tiers(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "disk in a process": disk(folder / "process", isolation="process"),
        "fs": {"type": "fs", "root_dir": str(folder / "fs"), "isolation": "thread"},
        "memory": memory(),
    }


@pytest.mark.parametrize("name", ["disk in a process", "fs", "memory"])
def test_blocks_that_left_the_primary_tier_come_back_from_the_tier(
    name: str, tmp_path: Path
) -> None:
    with tiering(tiers(tmp_path)[name]) as running:
        pushed_out(running)
        assert running.load(KEYS) == len(KEYS)
        assert running.tier.get_stats() is not None


def test_a_tier_has_reached_its_server_when_the_manager_is_made(tmp_path: Path) -> None:
    with running_server("valkey", tmp_path / "server") as server:
        patient = {"connect_timeout_s": PATIENCE_S, "startup_connect_timeout_s": PATIENCE_S}
        with tiering({"type": "redis", "url": server.url, **patient}) as running:
            assert running.tier._facade.statistics().tiers[0].connection == "UP"
            pushed_out(running)
            assert running.load(KEYS) == len(KEYS)


def test_one_of_vllms_tiers_inside_keeps_blocks(tmp_path: Path) -> None:
    """kvtier between vLLM's manager and vLLM's tier: nothing waits for that tier any more."""
    files = {"type": "vllm", "tier": {"type": "fs", "root_dir": str(tmp_path)}}
    with tiering(files) as running:
        pushed_out(running)
        assert running.load(KEYS) == len(KEYS)
    assert len(list(tmp_path.rglob("*.bin"))) >= len(KEYS)


def test_what_one_of_vllms_tiers_tells_of_itself_is_told_to_vllm() -> None:
    example = {"type": "vllm", "tier": {"type": "example", "custom_param": 67}}
    with tiering(example) as running:
        names = KVTierSecondaryTier.config_info_keys(entry(example))
        assert dict(running.tier.config_info()) == dict.fromkeys(names, 67)
        assert len(names) == hasattr(SecondaryTierManager, "config_info_keys")  # vLLM 0.33
    with tiering(memory()) as running:
        assert KVTierSecondaryTier.config_info_keys(entry(memory())) == ()
        assert running.tier.config_info() == {}


def test_what_one_of_vllms_tiers_counts_inside_is_told_to_vllm() -> None:
    defined = KVTierSecondaryTier.build_metric_definitions(entry(scripted()))
    with tiering(scripted()) as running:
        ScriptedTier.last.stats = OffloadingConnectorStats()
        ScriptedTier.last.stats.increase_counter(COUNTED, 3, ("scripted",))
        running.store(KEYS)
        stats = running.tier.get_stats()
        assert stats.data["data"][COUNTED] == {("scripted",): 3}
        assert stats.data["data"].keys() <= defined.keys()
        assert COUNTED not in running.tier.get_stats().data["data"]


def scripted() -> dict[str, Any]:
    tier = {"type": "ScriptedTier", "module_path": "tests.vllm.support.scripted_tier"}
    return {"type": "vllm", "tier": tier}


@pytest.mark.parametrize("weights", [{"commit": "c"}, {"unknown": "they are streamed"}])
def test_a_restart_finds_the_blocks_again_if_it_is_known_to_be_of_the_same_model(
    weights: dict[str, str], tmp_path: Path
) -> None:
    facts = {"model": {"weights": weights}}
    with tiering(disk(tmp_path), facts=facts) as running:
        running.store(KEYS)
    with tiering(disk(tmp_path), facts={"model": "another"}) as running:
        assert running.load(KEYS) == 0
    with tiering(disk(tmp_path), facts=facts) as running:
        assert running.load(KEYS) == (0 if "unknown" in weights else len(KEYS))


def test_a_prefix_longer_than_the_staging_slots_is_loaded_whole() -> None:
    keys = make_keys(0, 64)
    with tiering(memory(), slots=128, staging_bytes=3 * BLOCK) as running:
        running.store(keys)
        running.store(make_keys(1000, 128))
        assert running.load(keys) == len(keys)


def test_of_a_prompt_that_pins_too_much_the_head_is_stored() -> None:
    """vLLM names the blocks of a store in any order; a tail without its head is of no use."""
    keys = make_keys(0, SLOTS)
    with tiering(memory()) as running:
        context = running.begin(keys)
        output = running.manager.prepare_store(keys, context)
        for key, slot in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            running.view[slot] = bytes_of(key)
        running.manager.complete_store(keys[::-1], context)
        running.manager.on_request_finished(context)
        running.settle()
        running.store(OTHERS)
        assert running.load(keys) == SLOTS // 2
        assert running.load(keys[: SLOTS // 2]) == SLOTS // 2


def test_damaged_blocks_are_misses_and_the_others_of_their_job_hits() -> None:
    with tiering(memory(load={"corrupt_every": 2})) as running:
        pushed_out(running)
        assert running.load(KEYS) == len(KEYS) // 2


def test_a_load_that_hangs_is_a_miss_at_its_deadline() -> None:
    with tiering({**memory(load=HANG), "promote_timeout_s": SOON}, close_timeout_s=SOON) as running:
        pushed_out(running)
        assert running.load(KEYS) == 0
        running.settle()


def test_a_load_that_ends_late_writes_to_no_slot_that_has_been_given_away() -> None:
    """vLLM takes the slots back with the job, and has no quarantine."""
    late = memory(load={"delay_s": 3 * SOON, "calls_max": 1})
    with tiering({**late, "promote_timeout_s": SOON}, close_timeout_s=SOON) as running:
        pushed_out(running)
        assert running.load(KEYS) == 0
        running.store(OTHERS)  # all slots are theirs now
        staging = running.tier._facade.statistics
        until(lambda: running.step() or not staging().primary.quarantined_slots)
        context = running.begin(OTHERS)
        assert set(running.find(OTHERS, context)) == {LookupResult.HIT}
        for key, slot in zip(OTHERS, slots_of(running, OTHERS, context), strict=True):
            assert np.array_equal(running.view[slot], bytes_of(key))


def slots_of(running: Tiering, keys: list[bytes], context: Any) -> list[int]:
    slots: list[int] = running.manager.prepare_load(keys, context).chunk_ids.tolist()
    running.manager.complete_load(keys, context)
    return slots


@pytest.mark.parametrize("operation", ["load", "store"])
def test_a_reset_does_not_wait_for_a_tier_that_hangs(operation: str) -> None:
    """vLLM's own tiers block there."""
    with tiering(memory(**{operation: HANG}), close_timeout_s=SOON) as running:
        if operation == "load":
            pushed_out(running)
            context = running.begin(KEYS)
            for _ in range(3):
                running.look_up(KEYS, context)
        else:
            for first in (0, 4):  # which takes all slots
                running.store(make_keys(first, 4), settles=False)
        running.reset()
        assert not running.manager._jobs
        before = running.view.copy()
        running.settle()
        assert np.array_equal(running.view, before)


def test_after_a_reset_nothing_that_was_stored_before_is_found(tmp_path: Path) -> None:
    """The weights may be others. vLLM's own tiers go on to serve what they have."""
    with tiering(disk(tmp_path)) as running:
        running.store(KEYS)
        running.reset()
        assert running.load(KEYS) == 0
        running.store(KEYS)
        running.store(OTHERS)
        assert running.load(KEYS) == len(KEYS)


def test_a_request_from_before_a_reset_stores_nothing_of_what_older_weights_computed() -> None:
    with tiering(memory()) as running:
        context = running.begin(KEYS)
        running.reset()
        running.store_as(context, KEYS)
        running.manager.on_request_finished(context)
        running.settle()
        running.store(OTHERS)
        assert running.load(KEYS) == 0


def test_a_reset_keeps_what_there_is_if_it_is_told_to(tmp_path: Path) -> None:
    with tiering(disk(tmp_path), on_reset="keep") as running:
        running.store(KEYS)
        running.reset()
        assert running.load(KEYS) == len(KEYS)


def test_a_tier_whose_actor_breaks_is_a_miss_and_ends_its_jobs() -> None:
    with tiering(memory(load=HANG), close_timeout_s=SOON) as running:
        pushed_out(running)
        context = running.begin(KEYS)
        for _ in range(3):
            running.look_up(KEYS, context)
        assert running.manager._jobs
        running.tier._facade._runtime._primary.stop()
        assert set(running.find(KEYS, context)) == {LookupResult.MISS}
        assert not running.manager._jobs
        running.store(OTHERS)


def test_a_request_level_tier_asks_for_whole_requests() -> None:
    with tiering({**memory(), "offload_policy": "request_level"}) as running:
        context = running.begin(KEYS)
        assert running.tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    with tiering(memory()) as running:
        context = running.begin(KEYS)
        assert running.tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"store_threshold": 2}, "store_threshold"),
        ({"on_rest": "keep"}, "on_rest"),
        ({"staging_bytes": 1}, "staging_bytes"),
        ({"tier": {"type": "memory"}}, "capacity_bytes"),
        ({"tier": {**memory(), "admission": "second_touch"}}, "admission"),
        (
            {"tier": {"type": "vllm", "tier": {"type": "example"}, "request_scoped": True}},
            "request_scoped",
        ),
        ({"tier": {"type": "vllm", "tier": {"type": "p2p"}}}, "other engines|request-scoped"),
        ({"secondary_tiers": []}, "secondary_tiers"),
    ],
)
def test_a_bad_entry_is_refused_with_its_key(options: dict[str, Any], named: str) -> None:
    tier = options.pop("tier", memory())
    with pytest.raises(ConfigError, match=named), tiering(tier, **options):
        pass


def test_a_backend_that_goes_by_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is to be told of requests, of which vLLM's manager tells too little."""
    build = MemoryBackend.from_options

    def goes_by_request(*arguments: Any) -> MemoryBackend:
        backend = build(*arguments)
        backend.traits = replace(backend.traits, request_scoped=True)
        return backend

    monkeypatch.setattr(MemoryBackend, "from_options", goes_by_request)
    with pytest.raises(ConfigError, match="is request-scoped"), tiering(memory()):
        pass


def test_kvtier_check_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here, for the type ``vllm`` imports vLLM."""
    tier = {"type": "vllm", "tier": {"type": "x"}, "request_scoped": True}
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [entry(tier)]}
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({"spec_name": "TieringOffloadingSpec", **extra}))
    assert main(["check", str(file)]) == 1
    said = capsys.readouterr().out
    assert "request_scoped=True" in said
    assert "vLLM's own tiering" in said


def test_backpressure_of_vllms_own_works_with_what_is_there_already() -> None:
    """It divides by the bytes that were written."""
    with tiering(
        {**memory(), "offload_policy": "request_level"},
        backpressure={"backpressure_cls": "EMABackpressureDetector"},
    ) as running:
        for _ in range(3):
            running.store(KEYS)
        assert running.load(KEYS) == len(KEYS)


def test_every_method_of_vllms_interface_is_thought_of() -> None:
    """A default of vLLM's that is taken unseen is a feature that silently is none."""
    inherited = {"block_size_bytes", "bp_detector"}
    if hasattr(SecondaryTierManager, "tolerates_off_thread_polling"):  # vLLM 0.33
        inherited.add("tolerates_off_thread_polling")
    for name, member in vars(SecondaryTierManager).items():
        if name[0] != "_" and member is not None:
            assert (name in vars(KVTierSecondaryTier)) is (
                name not in inherited | {"medium", "cache_hit_source"}
            ), name


def test_events_fold_to_what_the_tier_has(tmp_path: Path) -> None:
    """What it evicts, what it had from before, and what a reset takes with it."""
    tier = {**disk(tmp_path, blocks=256), "enable_kv_events": True}
    told: set[bytes] = set()
    with tiering(tier, slots=64, events=True) as running:
        for first in range(0, 800, 32):
            running.store(make_keys(first, 32))
            fold(running, told)
        assert told == resident(running)
        assert len(told) < 800
    with tiering(tier, slots=64, events=True) as running:
        again: set[bytes] = set()
        until(lambda: running.step() or (fold(running, again) and again == resident(running)))
        running.reset()
        until(lambda: running.step() or not fold(running, again))


def fold(running: Tiering, told: set[bytes]) -> set[bytes]:
    """Apply the tier's events, each of which must say something new."""
    for event in running.manager.take_events():
        if event.ownership is None:  # the primary tier's
            continue
        assert event.ownership == "1:disk"
        keys = set(event.keys)
        assert told.issuperset(keys) if event.removed else told.isdisjoint(keys)
        assert event.removed or event.removal_expected
        if event.removed:
            told -= keys
        else:
            told |= keys
    return told


def resident(running: Tiering) -> set[bytes]:
    tier = running.tier._facade._runtime._tiers[0]._cell._tier
    return set(tier._resident)


def test_the_metrics_are_those_that_were_defined() -> None:
    """vLLM's front end ends at one that it does not know."""
    defined = KVTierSecondaryTier.build_metric_definitions(entry(memory()))
    with tiering(memory(load={"corrupt_every": 2})) as running:
        pushed_out(running)
        stats = running.tier.get_stats()
        told = set(stats._types)
        assert "kvtier:tier_damaged" in told
        running.load(KEYS)
        running.tier.get_stats()
        assert running.tier._watch.dropped == dict.fromkeys(running.tier._watch.dropped, 0)
    assert told <= defined.keys()


def test_an_entry_is_all_that_a_user_changes() -> None:
    """vLLM's own factory finds the class."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    assert SecondaryTierFactory.get_tier_class(entry(memory())) is KVTierSecondaryTier
