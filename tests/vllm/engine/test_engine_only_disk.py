"""The ``disk`` tier inside vLLM's own tiering, in real engines: one entry of a list changed.

vLLM has no worker for the CPU platform; kvtier's does the copies between the engine's
tensors and vLLM's own region. Manager, primary tier and region are vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.backends.disk._disk import folder_bytes
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import PATIENT, Engine, engine, vllms_config
from tests.vllm.support.play import prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
OTHER_LENGTHS = [1000] * 3  #: of prompts that take the place of these in the primary tier
FILLING_LENGTHS = [1000] * 10  #: more blocks than the folder has room for
BLOCK_BYTES = 4 * 2 * 32 * 2 * 32 * 4
PRIMARY_BLOCKS = 80  #: twice the longest prompt: more would not be stored
CAPACITY_BYTES = 16 << 20
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:disk"}'
WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:disk"}'
DAMAGED = 'kvtier:tier_damaged{tier="1:disk"}'
CLOSED = 'kvtier:tier_breaker_state{tier="1:disk",work="loads"}'


def config_of(path: str) -> dict[str, Any]:
    tier = {"type": "disk", "path": path, "capacity_bytes": CAPACITY_BYTES, **PATIENT}
    return vllms_config(PRIMARY_BLOCKS * BLOCK_BYTES, tier)


def played(running: Engine, lengths: list[int], seed: int = 7) -> dict[str, Any]:
    """Run prompts with an empty prefix cache of the engine's own, until no job is left.

    Each when the one before is stored: vLLM stores nothing of what has no room just then.
    """
    running.forget()
    tokens, cached = [], []
    for prompt in prompts_of(lengths, seed):
        result = running.run([prompt])
        tokens += result.tokens
        cached += result.cached
        running.idle()
    running.run([[3]], max_tokens=1)  # publishes the counters
    running.idle()
    return {"tokens": tokens, "cached": cached, "metrics": running.metrics()}


def computed(model: str) -> list[list[int]]:
    with engine(model, None) as running:
        return running.run_one_by_one(prompts_of(LENGTHS)).tokens


def first_engine(model: str, path: str) -> dict[str, Any]:
    with engine(model, config_of(path)) as running:
        cold = played(running, LENGTHS)
        played(running, OTHER_LENGTHS, seed=1000)
        return {"cold": cold, "warm": played(running, LENGTHS)}


def second_engine(model: str, path: str) -> dict[str, Any]:
    """Find what the first one has stored; fill the disk; and get other weights."""
    with engine(model, config_of(path)) as running:
        played(running, [100], seed=2000)
        told = {"again": played(running, LENGTHS)}
        played(running, FILLING_LENGTHS, seed=4000)
        told["full"] = played(running, FILLING_LENGTHS[:1], seed=4000 + 100 * 9)
        told["stored"] = played(running, LENGTHS)
        assert running.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        told["reset"] = played(running, LENGTHS)
        return told


@pytest.fixture(scope="module")
def story(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Have two engines play, one after the other, and one without any tier."""
    folder = tmp_path_factory.mktemp("only-disk")
    path, logs = folder / "kv", folder / "logs"
    told: dict[str, Any] = {
        "computed": run_scenario(computed, log_folder=logs, model=str(llama)),
    }
    for scenario in (first_engine, second_engine):
        told |= run_scenario(scenario, log_folder=logs, model=str(llama), path=str(path))
    return {**told, "bytes": folder_bytes(path)}


def test_hits_from_the_disk_give_the_tokens_of_a_recomputation(story: dict[str, Any]) -> None:
    cold, warm = story["cold"], story["warm"]
    assert cold["tokens"] == warm["tokens"] == story["computed"]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert warm["cached"] == whole_blocks(LENGTHS)
    assert cold["metrics"][WRITTEN] == sum(whole_blocks(LENGTHS)) // 32 * BLOCK_BYTES
    assert warm["metrics"][READ] > 0
    assert warm["metrics"].get(DAMAGED, 0) == 0
    assert warm["metrics"][CLOSED] == 0


def test_an_engine_that_starts_again_finds_what_was_stored(story: dict[str, Any]) -> None:
    """Facts about the model are found without kvtier's own spec: else nothing would be shared."""
    again = story["again"]
    assert again["tokens"] == story["computed"]
    assert again["cached"] == whole_blocks(LENGTHS)
    assert again["metrics"][READ] == sum(whole_blocks(LENGTHS)) // 32 * BLOCK_BYTES


def test_the_disk_stays_within_its_capacity(story: dict[str, Any]) -> None:
    assert sum(whole_blocks(FILLING_LENGTHS)) // 32 * BLOCK_BYTES > CAPACITY_BYTES
    assert story["bytes"] <= CAPACITY_BYTES
    assert story["full"]["cached"] == whole_blocks(FILLING_LENGTHS[:1])


def test_after_a_reset_of_the_connector_nothing_is_found(story: dict[str, Any]) -> None:
    """The weights may be others. They are not, and so the tokens are the same."""
    reset = story["reset"]
    assert reset["cached"] == [0] * len(LENGTHS)
    assert reset["tokens"] == story["computed"]
