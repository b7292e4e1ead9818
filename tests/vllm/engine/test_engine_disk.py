"""The ``disk`` tier in a real engine: a cache on a local disk that survives its engine.

One story, told by two processes: the first plays, goes on while the second is refused its folder
and then starts beside it without one, and is killed; the second then takes the folder over.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.support.patience import until
from tests.vllm.support.children import start_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.notes import leave, wait_for
from tests.vllm.support.play import assert_at_rest, grown, play_round, prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:disk"}'
WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:disk"}'
HITS = 'vllm:kv_offload_tiering_chunk_hits{tier="1:disk"}'
LOADED = "vllm:kv_offload_load_bytes"
STORED = "vllm:kv_offload_store_bytes"


def config_of(path: str, **options: Any) -> dict[str, Any]:
    """Return the tutorial's configuration, as ``test_tutorial.py`` checks, with smaller sizes."""
    tiers = [{"type": "disk", "path": path, "capacity_bytes": "16MiB", **options}]
    return kvtier_config(cpu_bytes_to_use="64MiB", secondary_tiers=tiers, on_reset="keep")


def first_engine(model: str, path: str, notes: str) -> None:
    """Play from everywhere, go on when somebody else wants the folder, and be killed at work."""
    with engine(model, config_of(path)) as running:
        rounds = [play_round(running, prompts_of(LENGTHS)) for _ in range(2)]
        running.empty_dram()
        rounds.append(play_round(running, prompts_of(LENGTHS)))
        leave(f"{notes}/played")
        wait_for(f"{notes}/beside")
        running.empty_dram()
        rounds.append(play_round(running, prompts_of(LENGTHS)))
        leave(f"{notes}/rounds", json.dumps(rounds))
        while True:
            running.run(prompts_of(LENGTHS, seed=1000))
            running.empty_dram()


def second_engine(model: str, path: str, notes: str) -> dict[str, Any]:
    """Ask for a folder in use; start without it; and once its engine is dead, take it over."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    told: dict[str, Any] = {}
    wait_for(f"{notes}/played")
    try:
        with engine(model, config_of(path)):
            told["refusal"] = "none"
    except Exception as refused:  # noqa: BLE001 - whatever vLLM makes of it
        told["refusal"] = str(refused)
    ensure_kv_transfer_shutdown()  # vLLM keeps the worker's side of a start that failed
    patch("kvtier.hosts.process_host.RESTART_PAUSE_S_MAX", 0.5).start()  # between two tries
    with engine(model, config_of(path, on_unusable="skip")) as running:
        told["without"] = play_round(running, prompts_of(LENGTHS))
        running.empty_dram()  # what it has computed itself is forgotten
        leave(f"{notes}/beside")
        wait_for(f"{notes}/killed")

        def has_the_folder() -> bool:
            running.manager().facade.get_finished()
            return bool(running.statistics()["tiers"][0]["breaker"] == "CLOSED")

        until(has_the_folder, running.statistics)
        told["after"] = play_round(running, prompts_of(LENGTHS))
    return told


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
        second.wait_for(notes / "beside")
        rounds = json.loads(first.wait_for(notes / "rounds"))
        assert not first.has_ended()
        first.kill()
        leave(str(notes / "killed"))
        return {**second.result(), "first": rounds}


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


def test_a_second_engine_is_refused_or_starts_without_the_folder_and_the_first_goes_on(
    story: dict[str, Any],
) -> None:
    """It says whose the folder is, and touches nothing in it."""
    for part in ("1:disk", "path=", "is in use by process", "Stop that engine", "or name another"):
        assert part in story["refusal"]
    cold, _, _, later = story["first"]
    assert story["without"]["tokens"] == later["tokens"] == cold["tokens"]
    assert story["without"]["cached"] == [0] * len(LENGTHS)
    assert later["cached"] == whole_blocks(LENGTHS)
    assert grown(story["first"], 3, READ) == sum(whole_blocks(LENGTHS)) // 32 * cold["block_bytes"]
    assert_at_rest(later["statistics"])


def test_after_a_kill_all_that_was_stored_is_found(story: dict[str, Any]) -> None:
    """The lock has died with its owner, and nothing of the folder is lost or wrong."""
    after = story["after"]
    assert after["tokens"] == story["first"][0]["tokens"]
    assert after["cached"] == whole_blocks(LENGTHS)
    size = sum(whole_blocks(LENGTHS)) // 32 * after["block_bytes"]
    assert after["metrics"][READ] == size
    assert after["metrics"].get('kvtier:tier_damaged{tier="1:disk"}', 0) == 0
    assert_at_rest(after["statistics"])
