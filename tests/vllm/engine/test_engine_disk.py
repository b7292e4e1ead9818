"""The ``disk`` tier in a real engine: a cache on a local disk that survives its engine.

One story, told by two processes: the first plays, is asked for its folder by
the second, plays on, and is killed in the middle of a store; the second then
takes the folder over. Each test looks at one part of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from vllm.v1.kv_offload.base import LookupResult

from stress.bench.sides import NOTHING_NEW, make_context, make_keys
from tests.support.patience import until
from tests.unit.backends.disk._disk import folder_bytes
from tests.vllm.support.children import start_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.managers import manager
from tests.vllm.support.notes import leave, wait_for
from tests.vllm.support.play import assert_at_rest, grown, play_round, prompts_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from kvtier_backends.disk.device import Device, Transfer

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
CUT_LENGTHS = [640]  #: of the prompt whose store is cut off
NEW_LENGTHS = [100]  #: of prompts that nobody has asked before
FILLING_LENGTHS = [1000] * 10  #: more blocks than the folder has room for
CAPACITY, CAPACITY_BYTES = "16MiB", 16 << 20
PAGE_BYTES = 4096
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:disk"}'
WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:disk"}'
HITS = 'vllm:kv_offload_tiering_chunk_hits{tier="1:disk"}'
LOADED = "vllm:kv_offload_load_bytes"
STORED = "vllm:kv_offload_store_bytes"


def disk(path: Path | str, **options: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "capacity_bytes": CAPACITY, **options}


def config_of(path: str, **options: Any) -> dict[str, Any]:
    """Return the tutorial's configuration, as ``test_tutorial.py`` checks, with smaller sizes."""
    tiers = [disk(path, **options)]
    return kvtier_config(cpu_bytes_to_use="64MiB", secondary_tiers=tiers, on_reset="keep")


# --- the first process ---


def first_engine(model: str, path: str, notes: str) -> None:
    """Play from everywhere, go on when somebody else wants the folder, then be killed.

    Its tier runs in a thread, where a write can be torn; the second one's in a process.
    """
    with engine(model, config_of(path, isolation="thread")) as running:
        rounds = [play_round(running, prompts_of(LENGTHS)) for _ in range(2)]
        empty_dram(running)
        rounds.append(play_round(running, prompts_of(LENGTHS)))
        leave(f"{notes}/played")
        wait_for(f"{notes}/refused")
        empty_dram(running)
        rounds.append(play_round(running, prompts_of(LENGTHS)))
        leave(f"{notes}/rounds", json.dumps(rounds))

        tear_next_write(f"{notes}/torn")
        cut = running.run(prompts_of(CUT_LENGTHS, seed=1000))
        leave(f"{notes}/cut", json.dumps(cut.as_json()))
        running.idle()


def empty_dram(running: Engine) -> None:
    facade = running.manager().facade
    facade.reset()
    facade.on_reset_flushed()


def tear_next_write(note: str) -> None:
    """Let the next write of blocks end in the middle. Neither it nor any later write returns."""
    from kvtier_backends.disk import backend  # noqa: F401 - defines the devices
    from kvtier_backends.disk.device import Device

    is_torn = False

    def tearing(write: Callable[[Device, list[Transfer]], Awaitable[Any]]) -> Any:
        async def torn(self: Device, transfers: Sequence[Transfer]) -> Any:
            nonlocal is_torn
            if not is_torn and transfers[0].size <= PAGE_BYTES:  # a header, or entries
                return await write(self, list(transfers))
            if not is_torn:
                is_torn = True
                await write(self, [first_half(transfers[0])])
                leave(note)
            return await asyncio.Event().wait()

        return torn

    for kind in Device.__subclasses__():
        patch.object(kind, "write", tearing(kind.write)).start()


def first_half(transfer: Transfer) -> Transfer:
    buffers = transfer.buffers
    half = len(buffers) // 2
    return transfer._replace(buffers=[*buffers[:half], buffers[half][:PAGE_BYTES]])


# --- the second process ---


def second_engine(model: str, path: str, notes: str) -> dict[str, Any]:
    """Ask for a folder in use; once its engine is dead, take it over, twice; then fill it."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    told: dict[str, Any] = {}
    wait_for(f"{notes}/played")
    try:
        with engine(model, config_of(path)):
            told["refusal"] = "none"
    except Exception as refused:  # noqa: BLE001 - whatever vLLM makes of it
        told["refusal"] = str(refused)
    ensure_kv_transfer_shutdown()  # vLLM keeps the worker's side of a start that failed
    leave(f"{notes}/refused")
    wait_for(f"{notes}/killed")
    with engine(model, config_of(path)) as running:
        told["killed"] = play_after_start(running, seed=2000)
        told["cut"] = play_round(running, prompts_of(CUT_LENGTHS, seed=1000))
    with engine(model, config_of(path, eviction_policy="lru")) as running:
        told["closed"] = play_after_start(running, seed=3000)
        kill_tier(running)
        empty_dram(running)
        told["without"] = play_round(running, prompts_of(LENGTHS))
        wait_until_back(running)
        empty_dram(running)
        told["back"] = play_after_start(running, seed=5000)
        told["filling"] = fill(running, prompts_of(FILLING_LENGTHS, seed=4000))
        empty_dram(running)
        # The newest first: what is missing is stored anew, and takes the place of the oldest.
        told["full"] = fill(running, prompts_of(FILLING_LENGTHS, seed=4000)[::-1])
    return told


def fill(running: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Play prompts, each once the tier has stored the one before.

    More blocks at once than the whole folder has room for would rightly be refused: what is
    being stored makes no room.
    """
    rounds = [play_round(running, [prompt]) for prompt in prompts]
    joined = {name: [of for each in rounds for of in each[name]] for name in ("tokens", "cached")}
    return {**rounds[-1], **joined}


def kill_tier(running: Engine) -> None:
    """Kill the process that the tier runs in, and nothing else."""
    (tier,) = running.manager().facade._tiers
    os.kill(tier._child.process.pid, signal.SIGKILL)


def wait_until_back(running: Engine) -> None:
    """Wait until another process serves the tier."""
    facade = running.manager().facade

    def is_back() -> bool:
        facade.get_finished()
        (tier,) = facade.statistics().tiers
        return bool(tier.counts.crashes) and tier.breaker == "CLOSED"

    until(is_back, facade.statistics)


def play_after_start(running: Engine, seed: int) -> list[dict[str, Any]]:
    """Play a prompt that is new, then the ones from before.

    A tier says what it has from before ahead of what it is given to store, and
    a round ends when its blocks are stored.
    """
    return [
        play_round(running, prompts)
        for prompts in (prompts_of(NEW_LENGTHS, seed), prompts_of(LENGTHS))
    ]


# --- the story ---


@pytest.fixture(scope="module")
def story(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Have it played, and return what both processes told."""
    folder = tmp_path_factory.mktemp("disk")
    path, notes = folder / "kv", folder / "notes"
    notes.mkdir()
    arguments = {"model": str(llama), "path": str(path), "notes": str(notes)}
    with (
        start_scenario(first_engine, folder / "logs", {}, **arguments) as first,
        start_scenario(second_engine, folder / "logs", {}, **arguments) as second,
    ):
        second.wait_for(notes / "refused")
        rounds = json.loads(first.wait_for(notes / "rounds"))
        computed = json.loads(first.wait_for(notes / "cut"))
        first.wait_for(notes / "torn")
        assert not first.has_ended()
        first.kill()
        leave(str(notes / "killed"))
        told = second.result()
    return {**told, "first": rounds, "computed": computed, "folder_bytes": folder_bytes(path)}


def test_memory_and_disk_give_the_tokens_of_a_recomputation(story: dict[str, Any]) -> None:
    """Hits cover all whole blocks, and come from the tier that still has them."""
    cold, memory, from_disk, _ = rounds = story["first"]
    size = sum(whole_blocks(LENGTHS)) // 32 * cold["block_bytes"]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert grown(rounds, 0, STORED) == grown(rounds, 0, WRITTEN) == size
    for number, read in ((1, 0), (2, size)):
        assert rounds[number]["tokens"] == cold["tokens"]
        assert rounds[number]["cached"] == whole_blocks(LENGTHS)
        assert grown(rounds, number, LOADED) == size
        assert grown(rounds, number, READ) == read
    assert grown(rounds, 2, HITS) == size / cold["block_bytes"]
    assert_at_rest(memory["statistics"])
    assert_at_rest(from_disk["statistics"])


def test_a_second_engine_is_refused_and_the_first_goes_on(story: dict[str, Any]) -> None:
    """It says whose the folder is, and touches nothing in it."""
    for part in ("1:disk", "path=", "is in use by process", "Stop that engine", "or name another"):
        assert part in story["refusal"]
    cold, _, _, later = story["first"]
    assert later["tokens"] == cold["tokens"]
    assert later["cached"] == whole_blocks(LENGTHS)
    assert grown(story["first"], 3, READ) == sum(whole_blocks(LENGTHS)) // 32 * cold["block_bytes"]
    assert_at_rest(later["statistics"])


def test_after_a_kill_in_a_store_all_that_was_stored_is_found(story: dict[str, Any]) -> None:
    """The lock has died with its owner, and nothing of the folder is lost or wrong."""
    new, again = rounds = story["killed"]
    assert new["cached"] == [0]
    assert again["tokens"] == story["first"][0]["tokens"]
    assert again["cached"] == whole_blocks(LENGTHS)
    size = sum(whole_blocks(LENGTHS)) // 32 * again["block_bytes"]
    assert grown(rounds, 1, READ) == grown(rounds, 1, LOADED) == size
    assert again["metrics"].get('kvtier:tier_damaged{tier="1:disk"}', 0) == 0
    assert_at_rest(again["statistics"])


def test_what_a_kill_cut_off_is_a_miss(story: dict[str, Any]) -> None:
    """Some of its bytes were on the disk, and no entry: it is computed anew, and stored."""
    cut = story["cut"]
    assert story["computed"]["cached"] == [0]
    assert cut["cached"] == [0]
    assert cut["tokens"] == story["computed"]["tokens"]
    assert_at_rest(cut["statistics"])


def test_after_a_clean_end_everything_is_found(story: dict[str, Any]) -> None:
    """The folder is released at the end; its next engine may be in the same process."""
    new, again = rounds = story["closed"]
    assert new["cached"] == [0]
    assert again["tokens"] == story["first"][0]["tokens"]
    assert again["cached"] == whole_blocks(LENGTHS)
    size = sum(whole_blocks(LENGTHS)) // 32 * again["block_bytes"]
    assert grown(rounds, 1, READ) == size


def test_the_engine_goes_on_without_a_tier_that_was_killed_and_has_it_back(
    story: dict[str, Any],
) -> None:
    """What the tier had is computed anew for a second or so; another process finds it all."""
    without, (new, again) = story["without"], story["back"]
    assert without["tokens"] == again["tokens"] == story["first"][0]["tokens"]
    assert new["cached"] == [0]
    assert again["cached"] == whole_blocks(LENGTHS)
    assert again["metrics"]['kvtier:tier_crashes{tier="1:disk"}'] == 1
    assert again["metrics"].get('kvtier:tier_damaged{tier="1:disk"}', 0) == 0
    assert_at_rest(again["statistics"])


def test_a_full_folder_stays_within_its_capacity_and_goes_on(story: dict[str, Any]) -> None:
    """What is new takes the place of what is old; nothing is refused for want of room."""
    filling, full = story["filling"], story["full"]
    size = sum(whole_blocks(FILLING_LENGTHS)) // 32 * filling["block_bytes"]
    assert size > CAPACITY_BYTES
    assert story["folder_bytes"] <= CAPACITY_BYTES
    assert full["tokens"] == filling["tokens"][::-1]
    assert full["cached"][0] == whole_blocks(FILLING_LENGTHS)[0]
    assert 0 < sum(full["cached"]) < sum(whole_blocks(FILLING_LENGTHS))
    for each in (filling, full):
        assert each["metrics"].get('kvtier:tier_stores_rejected{tier="1:disk"}', 0) == 0
        assert_at_rest(each["statistics"])


# --- steps from a lookup to its HIT ---

KEYS = make_keys(0, 64)


@pytest.fixture(params=["stored-by-this-engine", "stored-by-an-engine-before"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return a manager whose disk has the blocks, and whose primary tier has not."""
    tiers = [disk(tmp_path / "kv")]
    with manager(secondary_tiers=tiers, on_reset="keep") as built:
        store(built, KEYS)
        if request.param == "stored-by-this-engine":
            built.reset_cache()
            built.on_reset_flushed()
            yield built
            return
    with manager(secondary_tiers=tiers, on_reset="keep") as built:
        # What a tier has from before is told ahead of what it stores.
        store(built, make_keys(1000, 1))
        yield built


def store(built: Any, keys: list[bytes]) -> None:
    """Have blocks stored as vLLM does, with bytes of their own, on disk too."""
    context = make_context("writer", keys)
    built.on_new_request(context)
    granted = built.prepare_store(keys, context)
    assert granted.keys_to_store == keys
    for key, slot in zip(keys, granted.store_spec.chunk_ids, strict=True):
        built._memory.view(int(slot))[:] = content_of(built, key)
    built.complete_store(keys, context)
    built.on_request_finished(context)
    built.on_schedule_end(NOTHING_NEW)
    wait_for_jobs(built)


def content_of(built: Any, key: bytes) -> bytes:
    return key[:32] * (built._memory.block_bytes // 32)


def wait_for_jobs(built: Any) -> None:
    """Wait until the tier has ended what it was given: between two steps, as a model computes."""
    until(lambda: not built.facade.get_finished(), built.facade.statistics)


@pytest.mark.one_release
def test_a_block_on_disk_is_a_hit_in_the_step_after_its_first_lookup(reader: Any) -> None:
    """The tier has said what it has, so no step is spent on asking. vLLM takes three at best."""
    reader.facade.drain_observations()
    context = make_context("reader", KEYS)
    reader.on_new_request(context)

    steps = [[reader.lookup(key, context) for key in KEYS]]
    reader.on_schedule_end(NOTHING_NEW)
    assert reader.has_pending_work()
    wait_for_jobs(reader)
    steps.append([reader.lookup(key, context) for key in KEYS])

    assert steps == [[LookupResult.HIT_PENDING] * len(KEYS), [LookupResult.HIT] * len(KEYS)]
    (tier,) = reader.facade.drain_observations().tiers
    assert tier.probe_seconds == []
    slots = reader.prepare_load(KEYS, context).chunk_ids
    for key, slot in zip(KEYS, slots, strict=True):
        assert reader._memory.view(int(slot)) == content_of(reader, key)
    reader.complete_load(KEYS, context)
    reader.on_request_finished(context)
