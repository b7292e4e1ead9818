"""Bad configuration is refused at start: the message has the key, the value and the remedy.

What a runtime and its tiers refuse by themselves is in ``tests/unit/settings`` and
``tests/unit/backends``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.memory.region import NAME_PREFIX
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.managers import manager
from tests.vllm.support.offloading import CONFIG
from tests.vllm.support.play import ours_in_shm, own_id, play

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = own_id("test-refused")


def tier(root: Path | str, **options: Any) -> dict[str, Any]:
    """In a thread: whoever opens it refuses, and a process of its own starts for a second."""
    return {"type": "fs", "root_dir": str(root), "isolation": "thread", **options}


def test_good_configuration_is_taken(tmp_path: Path) -> None:
    """Otherwise the refusals below would prove nothing. Every key of vLLM's guide is here."""
    with manager(
        eviction_policy="lru",
        store_threshold=2,
        max_tracker_size=1000,
        offload_prompt_only=False,
        self_describing_kv_events=True,
        canonical_layout=False,
        blocks_per_chunk=1,
        secondary_tiers=[
            tier(
                tmp_path / "kv",
                n_read_threads=2,
                n_write_threads=2,
                locality="LOCAL",
                enable_kv_events=True,
            )
        ],
    ) as built:
        assert built.facade.statistics().tiers[0].name == "1:fs"


@pytest.mark.parametrize(
    ("extra_config", "words"),
    [
        ({"canonical_layout": "false"}, ["canonical_layout='false'", "without quotes"]),
        ({"tier_poll_interval_s": 1}, ["tier_poll_interval_s", "1", "Remove it"]),
        ({"cpu_bytes_to_use": "64"}, ["cpu_bytes_to_use='64'", "without quotes"]),
        ({"cpu_bytes_to_use": 100}, ["cpu_bytes_to_use=100", "Give it at least"]),
        (
            {"secondary_tiers": [tier("/nowhere", compression="bitplane-zstd")]},
            ["compression='bitplane-zstd'", "float16", "Remove it"],
        ),
    ],
)
def test_what_the_model_or_vllm_decides_is_refused(
    extra_config: dict[str, Any], words: list[str]
) -> None:
    """The first line that an operator sees must be enough to mend it."""
    assert CONFIG.model.dtype == "float16"
    with pytest.raises(ConfigError) as caught, manager(**extra_config):
        pass
    for word in words:
        assert word in str(caught.value)


def test_a_model_with_nothing_to_offload_is_refused() -> None:
    """It would divide by the bytes of a block."""
    config = replace(CONFIG, worker_kv_bytes_per_block=0, extra_config=kvtier_config())
    with pytest.raises(ConfigError) as caught:
        KVTierOffloadingSpec(config)
    for part in ("kv_bytes_per_chunk=0", "no KV cache", "Remove the kv_transfer_config"):
        assert part in str(caught.value)


def refused_by_an_engine(model: str, root: str) -> dict[str, Any]:
    """Start engines that must not start, then one that must."""
    from pathlib import Path

    told: dict[str, Any] = {"refusals": [], "mapped": []}
    good = kvtier_config(secondary_tiers=[tier(root, isolation="process")])
    told["cold"] = play(model, good, [300], rounds=1)
    (config,) = Path(root).glob("*/config.json")
    description = config.read_text()
    config.write_text("garbage")
    mistyped = kvtier_config(secondary_tiers=[tier(root, isolation="process", n_read_thread=2)])
    unknown, small = {**good, "store_treshold": 2}, {**good, "cpu_bytes_to_use": 1}
    for bad in (good, unknown, small, mistyped):
        try:
            with engine(model, bad, engine_id=REFUSED):
                told["refusals"].append("none")
        except Exception as refused:  # noqa: BLE001 - whatever vLLM makes of it
            told["refusals"].append(str(refused))
        told["mapped"].append(NAME_PREFIX in Path("/proc/self/maps").read_text())
    told["left"] = ours_in_shm(REFUSED)
    config.write_text(description)
    with engine(model, good):
        try:
            with engine(model, good):
                told["second"] = "none"
        except Exception as refused:  # noqa: BLE001 - as above
            told["second"] = str(refused)
    told["disk"] = play(model, good, [300], rounds=1)
    return told


@pytest.mark.one_release
def test_an_engine_does_not_start_with_bad_configuration(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """The refusal reaches the user as it is, and leaves nothing behind."""
    told = run_scenario(
        refused_by_an_engine, log_folder=log_folder, model=str(llama), root=str(tmp_path / "kv")
    )
    damaged, unknown, small, mistyped = told["refusals"]
    assert "config.json" in damaged
    assert "remove its folder" in damaged
    assert "did you mean 'store_threshold'?" in unknown
    assert "cpu_bytes_to_use=1 holds no block" in small
    assert "did you mean 'n_read_threads'?" in mistyped
    assert told["left"] == []
    assert told["mapped"] == [False] * 4, "one interpreter may start again, and has its memory back"
    assert "ensure_kv_transfer_shutdown()" in told["second"]
    assert told["disk"][0]["tokens"] == told["cold"][0]["tokens"]
    assert told["disk"][0]["cached"] == [288]
