"""Engines whose host memory vLLM's option sizes, or that are given two connectors of kvtier's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config, make_prompts
from tests.vllm.support.play import ours_in_shm, own_id

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def sized_by_vllm(model: str, root: str) -> dict[str, Any]:
    """Start an engine as ``--kv-offloading-size 0.0625`` does, and have prompts come from tiers."""
    from vllm.config import KVTransferConfig

    extra = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": root}])
    del extra["cpu_bytes_to_use"]
    prompts = make_prompts(3, 300)
    with engine(
        model,
        None,
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config=extra),
        kv_offloading_size=0.0625,
    ) as running:
        cold = running.run_one_by_one(prompts)
        running.settle()
        running.forget()
        warm = running.run_one_by_one(prompts)
        primary = running.settle()["primary"]
        block_bytes = running.manager()._memory.block_bytes
        return {
            "same": warm.tokens == cold.tokens,
            "cached": warm.cached,
            "bytes": primary["slot_count"] * block_bytes,
        }


def test_an_engine_has_the_memory_that_kv_offloading_size_names(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """vLLM passes GiB on as a float of bytes, and names connector and role itself."""
    told = run_scenario(
        sized_by_vllm, log_folder=log_folder, model=str(llama), root=str(tmp_path / "kv")
    )
    assert told["bytes"] == 64 * MIB
    assert told["cached"] == [288] * 3
    assert told["same"]


def in_a_multi_connector(model: str, engine_id: str) -> dict[str, Any]:
    """Start engines with two connectors of kvtier's, of different sizes and of equal ones."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    told: dict[str, Any] = {"refusals": []}
    for sizes in ((64 * MIB, 32 * MIB), (32 * MIB, 32 * MIB)):
        connectors = [
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": kvtier_config(cpu_bytes_to_use=size),
            }
            for size in sizes
        ]
        config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            engine_id=engine_id,
            kv_connector_extra_config={"connectors": connectors},
        )
        try:
            with engine(model, None, kv_transfer_config=config):
                told["refusals"].append("none")
        except Exception as refused:  # noqa: BLE001 - whatever vLLM makes of it
            told["refusals"].append(str(refused))
        ensure_kv_transfer_shutdown()  # vLLM keeps the worker's side of a start that failed
    told["left"] = ours_in_shm(engine_id)
    return told


def test_two_connectors_in_one_multi_connector_are_refused_with_the_remedy(
    llama: Path, log_folder: Path
) -> None:
    """They said that the ranks disagree. All have one engine_id, and so one shared memory."""
    engine_id = own_id("test-multi")
    told = run_scenario(
        in_a_multi_connector, log_folder=log_folder, model=str(llama), engine_id=engine_id
    )
    for text in told["refusals"]:
        for part in (f"engine_id={engine_id!r}", "MultiConnector", "its secondary_tiers"):
            assert part in text
    assert told["left"] == []
