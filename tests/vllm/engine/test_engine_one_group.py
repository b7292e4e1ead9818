"""The ``fs`` tier: hits from memory and from disk give the tokens of a recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.play import assert_at_rest, grown, play_round, prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 64, 31]  #: in tokens; most are no multiple of a block
FS_READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:fs"}'
FS_WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:fs"}'
FS_HITS = 'vllm:kv_offload_tiering_chunk_hits{tier="1:fs"}'
LOADED = "vllm:kv_offload_load_bytes"
STORED = "vllm:kv_offload_store_bytes"


def cold_then_memory_then_corrupted(model: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    with engine(model, config) as running:
        told = [play_round(running, prompts_of(LENGTHS)) for _ in range(2)]
        invert_every_slot(running)
        return [*told, play_round(running, prompts_of(LENGTHS))]


def invert_every_slot(running: Engine) -> None:
    """Damage the primary tier behind kvtier's back."""
    memory = running.manager()._memory
    for slot in range(memory.slot_count):
        view = memory.view(slot)
        view[:] = bytes(byte ^ 0x40 for byte in view) if any(view) else view


def disk_in_an_engine_that_vllm_sizes(model: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Start as ``--kv-offloading-size 0.0625`` does: vLLM names connector, role and bytes."""
    from vllm.config import KVTransferConfig

    del config["cpu_bytes_to_use"]
    transfer = KVTransferConfig(kv_connector_extra_config=config)
    with engine(model, None, kv_transfer_config=transfer, kv_offloading_size=0.0625) as running:
        return [play_round(running, prompts_of(LENGTHS))]


@pytest.mark.parametrize(
    ("first", "second", "block_tokens"),
    [
        ({}, {}, 32),
        # That its rows are right, test_cpu_worker.py shows by their bytes, and the rig.
        pytest.param(
            {"blocks_per_chunk": 3, "canonical_layout": True},
            {"block_size": 96, "canonical_layout": True},
            96,
            marks=pytest.mark.long,
        ),
    ],
    ids=["one-gpu-block", "three-canonical"],
)
def test_the_same_tokens_from_memory_and_in_a_new_engine_from_disk(
    llama: Path,
    tmp_path: Path,
    log_folder: Path,
    first: dict[str, Any],
    second: dict[str, Any],
    block_tokens: int,
) -> None:
    """Hits cover all whole blocks, each byte is counted, and a damaged byte shows.

    ``block_size`` and ``blocks_per_chunk`` are two names of one thing, so the
    second engine, which uses the other one, finds the first one's blocks.
    """
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    cold, memory, corrupted, disk = rounds = [
        told
        for scenario, options in (
            (cold_then_memory_then_corrupted, first),
            (disk_in_an_engine_that_vllm_sizes, second),
        )
        for told in run_scenario(
            scenario,
            log_folder=log_folder,
            model=str(llama),
            config=kvtier_config(secondary_tiers=tiers, **options),
        )
    ]
    expected = whole_blocks(LENGTHS, block_tokens)
    size = sum(expected) // block_tokens * cold["block_bytes"]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert memory["cached"] == expected
    assert memory["tokens"] == cold["tokens"]
    assert grown(rounds, 0, STORED) == grown(rounds, 0, FS_WRITTEN) == size
    assert grown(rounds, 1, LOADED) == size
    assert grown(rounds, 1, FS_READ) == 0
    assert_at_rest(memory["statistics"])

    # Without this, "the same tokens" might be something that can't fail.
    assert corrupted["cached"] == expected
    assert corrupted["tokens"][1] != cold["tokens"][1]
    assert corrupted["tokens"][-1] == cold["tokens"][-1]  # shorter than a block, so never loaded

    assert disk["statistics"]["primary"]["slot_count"] == (64 << 20) // disk["block_bytes"]
    assert disk["tokens"] == cold["tokens"]
    assert disk["cached"] == expected
    assert disk["metrics"][FS_READ] == disk["metrics"][LOADED] == size
    assert disk["metrics"][FS_HITS] == size / disk["block_bytes"]
    assert disk["metrics"].get(STORED, 0) == 0  # nothing was computed that is worth storing
    assert_at_rest(disk["statistics"])
