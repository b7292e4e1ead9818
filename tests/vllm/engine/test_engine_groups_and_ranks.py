"""Several KV-cache groups, and several ranks: chunk ids and rows are laid out as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import (
    assert_at_rest,
    ours_in_shm,
    own_id,
    play,
    play_round,
    prompts_of,
    whole_blocks,
)

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [700, 400, 130]  #: in tokens; the window is 128, so all but one leave it
RANKS = 2
TWO_RANKS = own_id("test-two-ranks")
FS_READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:fs"}'
LOADED = "vllm:kv_offload_load_bytes"


def memory_then_disk(model: str, root: str, lengths: list[int]) -> list[dict[str, Any]]:
    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": root}])
    first = play(model, config, lengths, rounds=2, blocks=160)
    return first + play(model, config, lengths, rounds=1, blocks=160)


def test_sliding_window_and_full_attention(gemma: Path, tmp_path: Path, log_folder: Path) -> None:
    """A worker that mixes up the groups' chunk ids serves hits and wrong tokens."""
    cold, memory, disk = run_scenario(
        memory_then_disk,
        log_folder=log_folder,
        model=str(gemma),
        root=str(tmp_path / "kv"),
        lengths=LENGTHS,
    )
    expected = whole_blocks(LENGTHS)
    assert cold["cached"] == [0] * len(LENGTHS)
    for hits in (memory, disk):
        assert hits["cached"] == expected
        assert hits["tokens"] == cold["tokens"]
        assert_at_rest(hits["statistics"])
    assert memory["metrics"].get(FS_READ, 0) == 0
    # Not all of the window's blocks are read, but all of the other group's are.
    full_attention = sum(expected) // 32 * disk["block_bytes"]
    assert full_attention < disk["metrics"][LOADED] < 2 * full_attention
    assert disk["metrics"][FS_READ] >= disk["metrics"][LOADED]


def refused(model: str, options: dict[str, Any]) -> str:
    try:
        with engine(model, kvtier_config(**options), blocks=160):
            return "it started"
    except Exception as error:  # noqa: BLE001 - vLLM may wrap it
        return repr(error)


def test_blocks_of_several_vllm_blocks_are_refused_beside_a_window(
    gemma: Path, log_folder: Path
) -> None:
    """vLLM would store them with holes, and a later request would load what nobody wrote."""
    told = run_scenario(
        refused, log_folder=log_folder, model=str(gemma), options={"blocks_per_chunk": 2}
    )
    assert "blocks of 2 vLLM blocks" in told
    assert "Leave both keys out" in told


def two_ranks(model: str, root: str, lengths: list[int], rounds: str) -> list[dict[str, Any]]:
    """Play rounds, some of them from disk: with nothing in DRAM."""
    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": root}], on_reset="keep")
    told = []
    with engine(
        model,
        config,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        engine_id=TWO_RANKS,
    ) as running:
        for name in rounds.split():
            if name == "disk":
                running.manager().facade.reset()
                running.manager().facade.on_reset_flushed()
            told.append(play_round(running, prompts_of(lengths)))
            told[-1]["named_in_shm"] = ours_in_shm(TWO_RANKS)
    return told


@pytest.mark.parametrize(
    "engines",
    [
        ["cold memory disk"],
        # A rank has the same number in the next engine, and that is all that it looks for.
        pytest.param(["cold memory", "disk"], marks=pytest.mark.long),
    ],
    ids=["one-engine", "a-new-engine"],
)
def test_two_tensor_parallel_ranks(
    engines: list[str], llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Each rank writes its own part of a row, and finds it."""
    arguments: dict[str, Any] = {
        "log_folder": log_folder,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "spawns": True,
        "model": str(llama),
        "root": str(tmp_path / "kv"),
        "lengths": LENGTHS,
    }
    told = [run_scenario(two_ranks, rounds=rounds, **arguments) for rounds in engines]
    cold, memory, disk = (each for rounds in told for each in rounds)
    loaded_before = memory["metrics"][LOADED] if len(engines) == 1 else 0
    expected = whole_blocks(LENGTHS)
    size = sum(expected) // 32 * cold["block_bytes"]
    assert cold["cached"] == [0] * len(LENGTHS)
    for hits in (memory, disk):
        assert hits["cached"] == expected
        assert hits["tokens"] == cold["tokens"]
        assert hits["named_in_shm"] == []  # the name is gone once all ranks have mapped it
        assert_at_rest(hits["statistics"])
    assert memory["metrics"].get(FS_READ, 0) == 0
    assert disk["metrics"][FS_READ] == size
    # Workers count what each of them copied, and vLLM adds that up.
    assert disk["metrics"][LOADED] - loaded_before == size
