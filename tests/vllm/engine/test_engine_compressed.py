"""An engine in bfloat16 serves blocks that another has compressed, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.play import assert_at_rest, play, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333]


def run(llama: Path, log_folder: Path, root: Path) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": str(root), "compression": "bitplane-zstd"}
    (told,) = run_scenario(
        play,
        log_folder=log_folder,
        model=str(llama),
        extra_config=kvtier_config(secondary_tiers=[tier]),
        lengths=LENGTHS,
        rounds=1,
        dtype="bfloat16",
    )
    assert_at_rest(told["statistics"])
    return dict(told)


@pytest.mark.one_release
def test_another_engine_serves_compressed_blocks(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    first = run(llama, log_folder, tmp_path / "kv")
    assert first["cached"] == [0] * len(LENGTHS)
    files = [path.stat().st_size for path in (tmp_path / "kv").rglob("*.kv")]
    assert len(files) == sum(whole_blocks(LENGTHS)) // 32
    assert sum(files) < 0.8 * len(files) * (first["block_bytes"] + 4096)
    second = run(llama, log_folder, tmp_path / "kv")
    assert second["tokens"] == first["tokens"]
    assert second["cached"] == whole_blocks(LENGTHS)
