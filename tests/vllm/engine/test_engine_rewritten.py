"""A model's files are rewritten between two starts of a real engine, at the same path."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.play import whole_blocks
from tests.vllm.support.weights import fine_tune, start_and_play, tokens_without_kvtier

LENGTHS = [300, 417]  #: in tokens
READ = 'vllm:kv_offload_tiering_read_bytes{{tier="{}"}}'


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """Return a copy, to be written to."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


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
    (file,) = Path(model).glob("*.safetensors")
    told: dict[str, Any] = {"first": start_and_play(model, root, LENGTHS)[0]}
    later_s = file.stat().st_mtime + 7
    os.utime(file, (later_s, later_s))
    told["touched"] = start_and_play(model, root, LENGTHS)[0]
    merge(file, "model.layers.0.self_attn.v_proj.weight")
    told["merged"] = start_and_play(model, root, LENGTHS)[0]
    told["plain"] = tokens_without_kvtier(model, LENGTHS)
    return told


@pytest.mark.one_release
def test_one_tensor_that_was_rewritten_is_another_model_and_a_touched_file_is_not(
    model: Path, tmp_path: Path, log_folder: Path
) -> None:
    """The old KV data was served: the tensor lay between two of sixteen samples of the file."""
    told = run_scenario(rewritten, log_folder=log_folder, model=str(model), root=str(tmp_path))
    assert told["touched"]["tokens"] == told["first"]["tokens"]
    assert told["touched"]["cached"] == whole_blocks(LENGTHS)
    metrics = told["touched"]["metrics"]
    assert metrics.get(READ.format("1:disk"), 0) == 0, "it may be another file for all it knows"
    assert metrics[READ.format("2:fs")] > 0
    assert told["merged"]["cached"] == [0, 0]
    assert told["merged"]["tokens"] == told["plain"] != told["first"]["tokens"]


def replaced(model: str, root: str) -> dict[str, Any]:
    """Each step keeps the file's name, size and time: only its content tells."""
    (file,) = Path(model).glob("*.safetensors")
    before = file.stat()
    kept, other = (Path(root, f"{name}.safetensors") for name in ("kept", "other"))
    shutil.copy2(file, kept)
    told: dict[str, Any] = {}

    def start(name: str) -> None:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        told[f"plain {name}"] = tokens_without_kvtier(model, LENGTHS)
        told[name] = start_and_play(model, root, LENGTHS)[0]

    start("first")
    fine_tune(kept, other, seed=1)
    file.write_bytes(other.read_bytes())
    assert file.stat().st_ino == before.st_ino
    start("fine-tuned in place")
    fine_tune(kept, other, seed=2)
    other.rename(file)
    start("swapped")
    kept.rename(file)
    start("put back")
    return told


@pytest.mark.one_release
def test_a_fine_tune_in_place_and_a_swapped_file_find_nothing_and_the_old_file_finds_its_own(
    model: Path, tmp_path: Path, log_folder: Path
) -> None:
    told = run_scenario(replaced, log_folder=log_folder, model=str(model), root=str(tmp_path))
    names = ["first", "fine-tuned in place", "swapped"]
    for name in names:
        assert told[name]["cached"] == [0, 0], name
        for tier in ("1:disk", "2:fs"):
            assert told[name]["metrics"].get(READ.format(tier), 0) == 0, (name, tier)
        for tier in told[name]["statistics"]["tiers"]:
            assert tier["counts"]["write_bytes"] > 0, "a miss, and no tier that is down"
    for name in (*names, "put back"):
        assert told[name]["tokens"] == told[f"plain {name}"], name
    assert len({str(told[name]["tokens"]) for name in names}) == len(names)
    assert told["put back"]["tokens"] == told["first"]["tokens"]
    assert told["put back"]["cached"] == whole_blocks(LENGTHS)
    assert told["put back"]["metrics"][READ.format("2:fs")] > 0


def index_changed(model: str, root: str) -> dict[str, Any]:
    from safetensors import safe_open

    (file,) = Path(model).glob("*.safetensors")
    other = file.with_name("tuned.safetensors")
    fine_tune(file, other, seed=1)
    told: dict[str, Any] = {}
    for used in (file, other):
        with safe_open(used, "pt") as opened:
            index = {"metadata": {}, "weight_map": dict.fromkeys(opened.keys(), used.name)}
        Path(model, "model.safetensors.index.json").write_text(json.dumps(index))
        told[used.name] = start_and_play(model, root, LENGTHS)[0]
        told[f"plain {used.name}"] = tokens_without_kvtier(model, LENGTHS)
    return told


@pytest.mark.one_release
def test_an_index_that_names_another_file_is_another_model(
    model: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Both files lie there all the time; vLLM loads the one that the index names."""
    told = run_scenario(index_changed, log_folder=log_folder, model=str(model), root=str(tmp_path))
    first, tuned = (told[f"plain {name}.safetensors"] for name in ("model", "tuned"))
    assert first != tuned
    assert told["model.safetensors"]["tokens"] == first
    assert told["tuned.safetensors"]["cached"] == [0, 0]
    assert told["tuned.safetensors"]["tokens"] == tuned
