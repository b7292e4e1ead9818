"""Whose weights: samples of files tell a change, copies agree, and what nobody can tell is said."""

from __future__ import annotations

import json
import os
import shutil
import struct
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.settings.runtime_config import RuntimeConfig
from kvtier.settings.weight_sources import READ_FILES
from kvtier.vllm.identity import weight_files as module
from kvtier.vllm.identity import weights
from kvtier.vllm.identity.sharing import apart_if_unknown
from kvtier.vllm.identity.weight_files import SAMPLES_A_TENSOR_MIN, weight_files
from kvtier.vllm.identity.weights import Weights, weights_of, why_unknown
from tests.vllm.support.managers import manager
from tests.vllm.test_hosted_tiers import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TENSOR_BYTES = 60_000
TENSORS = ("embed", "layers.0.v_proj", "layers.1.v_proj", "norm")


def safetensors(path: Path, changed: Mapping[str, float] | None = None, seed: int = 1) -> None:
    """Write a file of four tensors; ``changed``: in which of them what part of the bytes is."""
    dice = Random(seed)
    body, header = bytearray(), {}
    for name in TENSORS:
        size = 512 if name == "norm" else TENSOR_BYTES
        tensor = bytearray(dice.randbytes(size))
        other = Random(f"other {name}")
        for at in range(size):
            if other.random() < (changed or {}).get(name, 0.0):
                tensor[at] ^= 0xFF
        header[name] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [len(body), len(body) + size],
        }
        body += tensor
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)


def digest(path: Path) -> str:
    found = weight_files(path)
    assert found is not None
    return found.digest


def local(path: Path) -> str:
    found = weight_files(path)
    assert found is not None
    return found.local_digest


def config(model: Path | str, **others: Any) -> Any:
    given = {
        "revision": None,
        "seed": 7,
        "hf_config": SimpleNamespace(_commit_hash=None),
        "model_weights": "",
    }
    return SimpleNamespace(model=str(model), **{**given, **others})


def load(load_format: str = "auto") -> Any:
    return SimpleNamespace(load_format=load_format)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("part", [1.0, 0.05])
def test_a_change_of_any_one_tensor_is_seen(tmp_path: Path, tensor: str, part: float) -> None:
    """Also one that leaves nineteen numbers of twenty as they were, as some training does."""
    file = tmp_path / "model.safetensors"
    safetensors(file)
    before = digest(tmp_path)
    safetensors(file, {tensor: part})
    assert digest(tmp_path) != before


def test_other_names_of_tensors_with_the_same_bytes_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors(file)
    before = digest(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"layers.0.v_proj", b"layers.0.k_proj"))
    assert digest(tmp_path) != before


def test_copies_agree_and_only_the_local_digest_tells_them_apart(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    safetensors(here / "model.safetensors")
    shutil.copytree(here, there)
    assert digest(here) == digest(there)
    assert local(here) != local(there)
    before = local(here)
    assert local(here) == before


def test_a_byte_that_no_sample_has_is_seen_on_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(8 << 20))
    known, before = digest(tmp_path), local(tmp_path)
    later_ns = file.stat().st_mtime_ns + 1_000_000_000
    with file.open("r+b") as opened:
        opened.seek(100_000)
        opened.write(b"x")
    os.utime(file, ns=(later_ns, later_ns))
    assert digest(tmp_path) == known, "it lies between two samples"
    assert local(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["model.gguf", "pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.tensors"]
)
def test_every_mebibyte_of_other_files_is_looked_at(tmp_path: Path, name: str) -> None:
    file = tmp_path / "original" / name  # in a subfolder
    file.parent.mkdir()
    content = bytearray(8 << 20)
    file.write_bytes(content)
    seen = [digest(tmp_path)]
    for number in range(8):
        content[number << 20 : (number + 1) << 20] = bytes([number + 1]) * (1 << 20)
        file.write_bytes(content)
        seen.append(digest(tmp_path))
    assert len(set(seen)) == len(seen)


def test_one_file_can_be_the_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"a" * 100)
    before = weights_of(config(file), load())
    file.write_bytes(b"b" * 100)
    after = weights_of(config(file), load())
    assert before.facts["files"] == 1
    assert before.facts != after.facts


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "modeling_own.py"])
def test_what_decides_what_becomes_of_the_files_is_looked_at(tmp_path: Path, name: str) -> None:
    """vLLM loads the files that an index names, and runs the code of a folder that is trusted."""
    safetensors(tmp_path / "model.safetensors")
    seen = {digest(tmp_path)}
    for content in ("{}", "{ }"):
        (tmp_path / name).write_text(content)
        seen.add(digest(tmp_path))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 4) + b"{[x]" + bytes(100),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}'[:9],
        struct.pack("<Q", 40) + b'{"a": {"data_offsets": [0, 99999999]}}  ' + bytes(9),
    ],
)
def test_what_is_no_safetensors_file_is_looked_at_as_any_other(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    before = digest(tmp_path)
    file.write_bytes(content + b"x")
    assert digest(tmp_path) != before


def test_very_many_tensors_are_looked_at_in_fewer_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the same each of them is looked at."""
    monkeypatch.setattr(module, "SAMPLES_MAX", len(TENSORS) * SAMPLES_A_TENSOR_MIN - 1)
    file = tmp_path / "model.safetensors"
    safetensors(file)
    seen = {digest(tmp_path)}
    for tensor in TENSORS:
        safetensors(file, {tensor: 0.5})
        seen.add(digest(tmp_path))
    assert len(seen) == 1 + len(TENSORS)


def test_links_that_lead_in_circles_end(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors")
    before = digest(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert digest(tmp_path) == before


@pytest.mark.parametrize("load_format", sorted(READ_FILES))
def test_a_loader_that_reads_the_models_files_has_their_digest(
    tmp_path: Path, load_format: str
) -> None:
    safetensors(tmp_path / "model.safetensors")
    known = weights_of(config(tmp_path), load(load_format))
    assert known.facts["sample_digest"] == digest(tmp_path)
    assert known.local_facts


def test_a_model_of_the_hub_has_its_commit() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    by_config = config("org/model", hf_config=SimpleNamespace(_commit_hash=commit))
    assert weights_of(by_config, load()).facts == {"commit": commit}
    assert weights_of(config("org/model", revision=commit), load()).facts == {"commit": commit}
    assert "unknown" in weights_of(config("org/model", revision="main"), load()).facts


def test_weights_that_are_loaded_from_another_model_are_looked_at(tmp_path: Path) -> None:
    """Ultravox names one for audio, and perhaps one for text."""
    for name in ("model", "audio"):
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name / "model.safetensors")

    def found(audio: str | None) -> Weights:
        named = SimpleNamespace(_commit_hash=None, audio_model_id=audio, text_model_id=None)
        return weights_of(config(tmp_path / "model", hf_config=named), load())

    alone, both = found(None), found(str(tmp_path / "audio"))
    safetensors(tmp_path / "audio/model.safetensors", {TENSORS[0]: 0.5})
    assert alone.facts != both.facts != found(str(tmp_path / "audio")).facts
    assert both.local_facts != found(str(tmp_path / "audio")).local_facts
    assert "org/whisper" in found("org/whisper").facts["unknown"]
    assert found(None) == alone


def test_random_weights_are_unknown_and_no_seed_names_them() -> None:
    """An engine that is pushed its weights starts with them: the seed says nothing of those."""
    found = weights_of(config("x"), load("dummy"))
    assert "random" in found.facts["unknown"]
    assert found != weights_of(config("x", seed=8), load("dummy")), "under one name, two weights"


@pytest.mark.parametrize("load_format", ["ipc_cache", "modelexpress", "tensorizer", "of-a-plugin"])
def test_a_loader_that_says_nothing_of_its_source_is_unknown(
    tmp_path: Path, load_format: str
) -> None:
    safetensors(tmp_path / "model.safetensors")
    assert load_format in weights_of(config(tmp_path), load(load_format)).facts["unknown"]


def test_a_plugins_loader_under_a_name_of_vllms_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes it with a warning."""
    safetensors(tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "get_model_loader", lambda _config: Plugins())
    found = weights_of(config(tmp_path), load("safetensors"))
    assert f"{__name__}.Plugins" in found.facts["unknown"]


class Plugins:
    """A loader that brings weights from anywhere."""


def test_streamed_weights_and_an_empty_folder_are_unknown(tmp_path: Path) -> None:
    """The configuration is there, and no weights: they came from an object store."""
    (tmp_path / "config.json").write_text("{}")
    streamed = weights_of(config(tmp_path, model_weights="s3://bucket/m"), load("runai_streamer"))
    assert "s3://bucket/m" in streamed.facts["unknown"]
    assert "no weight files" in weights_of(config(tmp_path), load()).facts["unknown"]


def test_an_engine_of_unknown_weights_is_by_itself_and_says_so() -> None:
    facts = {"worker": {"model": {"weights": {"unknown": "they are streamed"}}}}
    given = runtime({"type": "fs", "root_dir": "kv"})
    with capture_logs() as lines:
        first, second = apart_if_unknown(given, facts), apart_if_unknown(given, facts)
    assert len({given.weights_version, first.weights_version, second.weights_version}) == 3
    assert lines[0]["reason"] == "they are streamed"
    assert "weights_version" in lines[0]["event"]
    with capture_logs() as lines:
        named = runtime({"type": "fs", "root_dir": "kv"}, weights_version="step-7")
        assert apart_if_unknown(named, facts) is named
        apart_if_unknown(runtime({"type": "memory", "capacity_bytes": 1 << 20}), facts)
    assert lines == []


def test_known_weights_are_nobodys_business() -> None:
    given = runtime({"type": "fs", "root_dir": "kv"})
    known = {"model": {"weights": {"commit": "c"}}, "draft_model": {"model": None}}
    assert apart_if_unknown(given, {"worker": known}) is given
    assert apart_if_unknown(given, {"worker": {"undescribed": "why"}}) is given


def test_a_draft_models_unknown_weights_count_too() -> None:
    draft = {"model": {"weights": {"unknown": "of the draft"}}}
    known = {"model": {"weights": {"commit": "c"}}, "draft_model": draft}
    assert why_unknown(known) == "of the draft"


@pytest.mark.parametrize("weights", [{"commit": "c"}, {"unknown": "they are streamed"}])
def test_the_next_engine_finds_the_blocks_of_known_weights_alone(
    weights: dict[str, str], tmp_path: Path
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "isolation": "thread"}
    facts = {"model": {"weights": weights}}
    found = []
    for _ in range(2):
        with manager(facts=facts, secondary_tiers=[tier]) as built:
            played = Engine(built)
            found.append(played.read([1]))
            played.store([1])
            played.settle()
    assert found == [[], [] if "unknown" in weights else [1]]


def runtime(tier: dict[str, Any], **others: Any) -> RuntimeConfig:
    return RuntimeConfig.from_mapping(
        {"secondary_tiers": [tier], **others}, slot_count=4, block_bytes=4096
    )
