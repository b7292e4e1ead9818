"""A model's files are rewritten between two starts of a real engine, at the same path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import play, prompts_of, whole_blocks

LENGTHS = [300, 417]  #: in tokens
CAPACITY_BYTES = 32 << 20
READ = 'vllm:kv_offload_tiering_read_bytes{{tier="{}"}}'


def merge(file: Path, name: str) -> None:
    """Write one tensor anew, in place, as a merged adapter or a fine-tune of one layer does."""
    import torch
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        old = opened.get_tensor(name)
    new = old[torch.randperm(old.shape[0], generator=torch.Generator().manual_seed(1))]
    content = bytearray(file.read_bytes())
    before, after = (each.contiguous().numpy().tobytes() for each in (old, new))
    at = content.find(before)
    assert at > 0
    assert before != after
    content[at : at + len(before)] = after
    with file.open("r+b") as opened_anew:
        opened_anew.write(content)


def rewritten(model: str, root: str) -> dict[str, Any]:
    config = kvtier_config(
        secondary_tiers=[
            {"type": "disk", "path": f"{root}/disk", "capacity_bytes": CAPACITY_BYTES},
            {"type": "fs", "root_dir": f"{root}/fs"},
        ]
    )
    (file,) = Path(model).glob("*.safetensors")
    told: dict[str, Any] = {"first": play(model, config, LENGTHS, rounds=1)[0]}
    later_s = file.stat().st_mtime + 7
    os.utime(file, (later_s, later_s))
    told["touched"] = play(model, config, LENGTHS, rounds=1)[0]
    merge(file, "model.layers.0.self_attn.v_proj.weight")
    told["merged"] = play(model, config, LENGTHS, rounds=1)[0]
    with engine(model, None) as plain:
        told["plain"] = plain.run_one_by_one(prompts_of(LENGTHS)).as_json()
    return told


@pytest.mark.one_release
def test_one_tensor_that_was_rewritten_is_another_model_and_a_touched_file_is_not(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """The old KV data was served: the tensor lay between two of sixteen samples of the file."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    told = run_scenario(rewritten, log_folder=log_folder, model=str(model), root=str(tmp_path))
    assert told["touched"]["tokens"] == told["first"]["tokens"]
    assert told["touched"]["cached"] == whole_blocks(LENGTHS)
    metrics = told["touched"]["metrics"]
    assert metrics.get(READ.format("1:disk"), 0) == 0, "it may be another file for all it knows"
    assert metrics[READ.format("2:fs")] > 0
    assert told["merged"]["cached"] == [0, 0]
    assert told["merged"]["tokens"] == told["plain"]["tokens"] != told["first"]["tokens"]
