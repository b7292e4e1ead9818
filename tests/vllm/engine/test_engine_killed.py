"""``kill -9`` at any moment: nothing of ours stays in memory, and the disk serves on."""

from __future__ import annotations

import json
import signal
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.vllm.support.children import run_scenario, start_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.notes import leave
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

LENGTHS = [900, 640, 200]
WHILE_RUNNING = own_id("test-killed-running")
WHILE_STARTING = own_id("test-killed-starting")
FS_HITS = 'vllm:kv_offload_tiering_chunk_hits{tier="1:fs"}'


def config_of(root: str) -> dict[str, Any]:
    return kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": root}])


def work_until_killed(model: str, root: str, ready: str) -> None:
    """Play one round, say so, then keep all parts busy for ever."""
    with engine(model, config_of(root), engine_id=WHILE_RUNNING) as running:
        cold = play_round(running, prompts_of(LENGTHS))
        leave(ready, json.dumps(cold["tokens"]))
        for number in count(1):
            running.run(prompts_of(LENGTHS, seed=1000 * number))


def start_until_killed(model: str, root: str, ready: str) -> None:
    """Stop where memory is mapped and still has a name, that of a device beside the CPU's."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    def build_namespace(*_: Any) -> None:
        size = {"num_chunks": 64, "kv_bytes_per_chunk": 65536, "cpu_page_size": 65536}
        held = SharedOffloadRegion(WHILE_STARTING, rank=0, **size)
        assert held.fd is not None
        leave(ready, ",".join(ours_in_shm(WHILE_STARTING)))
        signal.pause()

    patch("kvtier.vllm.spec.build_namespace", build_namespace).start()
    with engine(model, config_of(root), engine_id=WHILE_STARTING):
        raise AssertionError("the engine has started")


@pytest.mark.one_release
def test_engines_killed_at_work_and_at_start(llama: Path, tmp_path: Path, log_folder: Path) -> None:
    """The name of the memory goes early; what a killed start leaves, the next start sweeps."""
    arguments = {"model": str(llama), "root": str(tmp_path / "kv")}
    at_work, at_start = tmp_path / "at_work", tmp_path / "at_start"
    with (
        start_scenario(work_until_killed, log_folder, {}, ready=str(at_work), **arguments) as first,
        start_scenario(
            start_until_killed, log_folder, {}, ready=str(at_start), **arguments
        ) as second,
    ):
        named = second.wait_for(at_start)
        tokens = json.loads(first.wait_for(at_work))
        assert named == f"kvtier_{WHILE_STARTING},vllm_offload_{WHILE_STARTING}.mmap"
        for child in (first, second):
            assert not child.has_ended()
            assert child.kill() == -signal.SIGKILL
    assert ours_in_shm(WHILE_RUNNING) == []

    (disk,) = run_scenario(
        play,
        log_folder=log_folder,
        model=str(llama),
        extra_config=config_of(arguments["root"]),
        lengths=LENGTHS,
        rounds=1,
    )
    assert ours_in_shm(WHILE_STARTING) == []
    assert disk["tokens"] == tokens
    assert disk["cached"] == whole_blocks(LENGTHS)
    assert disk["metrics"][FS_HITS] == sum(whole_blocks(LENGTHS)) // 32
    assert_at_rest(disk["statistics"])
