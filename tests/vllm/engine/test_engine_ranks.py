"""Two tensor-parallel ranks, in processes of their own: rows are laid out as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import (
    assert_at_rest,
    ours_in_shm,
    own_id,
    play_round,
    prompts_of,
    whole_blocks,
)
from tests.vllm.support.weights import WorkerExtension

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [700, 400, 130]  #: in tokens
TWO_RANKS = own_id("test-two-ranks")
FS_READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:fs"}'
LOADED = "vllm:kv_offload_load_bytes"


def two_ranks(model: str, root: str, rounds: list[str]) -> dict[str, Any]:
    """Play rounds, each named after what is done before it."""
    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": root}], on_reset="keep")
    told = {}
    with engine(
        model,
        config,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        engine_id=TWO_RANKS,
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
    ) as running:
        for name in rounds:
            if name == "disk":
                running.empty_dram()
            elif hasattr(WorkerExtension, name):
                running.llm.collective_rpc(name)
            told[name] = play_round(running, prompts_of(LENGTHS))
            told[name]["named_in_shm"] = ours_in_shm(TWO_RANKS)
    return told


@pytest.mark.parametrize(
    "engines",
    [
        [["cold", "memory", "disk", "count_numbers", "turn"]],
        # A rank has the same number in the next engine, and that is all that it looks for.
        pytest.param([["cold", "memory"], ["disk"]], marks=pytest.mark.long),
    ],
    ids=["one-engine", "a-new-engine"],
)
def test_two_tensor_parallel_ranks(
    engines: list[list[str]], llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Each rank writes its own part of a row, and finds it; and its weights are looked at."""
    arguments: dict[str, Any] = {
        "log_folder": log_folder,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "spawns": True,
        "model": str(llama),
        "root": str(tmp_path / "kv"),
    }
    told: dict[str, Any] = {}
    for rounds in engines:
        told |= run_scenario(two_ranks, rounds=rounds, **arguments)
    cold, memory, disk = (told.pop(name) for name in ("cold", "memory", "disk"))
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
    if told:
        assert told["count_numbers"]["cached"] == expected, "a look changes no weights"
        assert told["turn"]["cached"] == [0] * len(LENGTHS)
        assert told["turn"]["tokens"] != cold["tokens"]
