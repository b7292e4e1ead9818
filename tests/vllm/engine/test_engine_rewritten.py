"""A model's files are rewritten between two starts of a real engine, at the same path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import looks
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import play_round, prompts_of, whole_blocks
from tests.vllm.support.weights import fine_tune

LENGTHS = [300, 417]  #: in tokens
READ = 'vllm:kv_offload_tiering_read_bytes{{tier="{}"}}'


def start_and_play(model: str, root: str) -> dict[str, Any]:
    """Start an engine with both kinds of tiers, and play once its disk says what it has.

    Before that, a disk finds nothing, whatever it has.
    """
    tiers: list[dict[str, Any]] = [
        {"type": "disk", "path": f"{root}/disk", "capacity_bytes": 32 << 20},
        {"type": "fs", "root_dir": f"{root}/fs"},
    ]
    with engine(model, kvtier_config(secondary_tiers=tiers)) as running:
        for _ in looks(running.statistics):
            if "blocks" in running.settle()["tiers"][0]["backend_gauges"]:
                break
        return play_round(running, prompts_of(LENGTHS))


def tokens_without_kvtier(model: str) -> list[list[int]]:
    with engine(model, None) as plain:
        return plain.run_one_by_one(prompts_of(LENGTHS)).tokens


def rewritten(model: str, root: str) -> dict[str, Any]:
    """Each step keeps the file's name, size and time, but the last one: only its content tells."""
    (file,) = Path(model).glob("*.safetensors")
    before = file.stat()
    kept, other = (Path(root, f"{name}.safetensors") for name in ("kept", "other"))
    shutil.copy2(file, kept)
    told: dict[str, Any] = {"plain": tokens_without_kvtier(model)}
    told["first"] = start_and_play(model, root)
    fine_tune(kept, other, seed=1)
    file.write_bytes(other.read_bytes())
    assert file.stat().st_ino == before.st_ino
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    told["fine-tuned in place"] = start_and_play(model, root)
    told["plain, fine-tuned"] = tokens_without_kvtier(model)
    kept.rename(file)
    os.utime(file, (before.st_atime, before.st_mtime + 7))
    told["put back"] = start_and_play(model, root)
    return told


@pytest.mark.one_release
def test_a_fine_tune_in_place_finds_nothing_and_the_old_file_finds_its_own(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """``test_weights.py`` has what else may become of files."""
    model = shutil.copytree(llama, tmp_path / "model")  # to be written to
    told = run_scenario(rewritten, log_folder=log_folder, model=str(model), root=str(tmp_path))
    first, tuned, put_back = (told[name] for name in ("first", "fine-tuned in place", "put back"))
    for each in (first, tuned):
        assert each["cached"] == [0, 0]
        for tier in ("1:disk", "2:fs"):
            assert each["metrics"].get(READ.format(tier), 0) == 0
        for tier in each["statistics"]["tiers"]:
            assert tier["counts"]["write_bytes"] > 0, "a miss, and no tier that is down"
    assert first["tokens"] == put_back["tokens"] == told["plain"]
    assert tuned["tokens"] == told["plain, fine-tuned"] != told["plain"]
    assert put_back["cached"] == whole_blocks(LENGTHS)
    metrics = put_back["metrics"]
    assert metrics.get(READ.format("1:disk"), 0) == 0, "it may be another file for all it knows"
    assert metrics[READ.format("2:fs")] > 0
