"""``kvtier check`` finds what an engine would refuse, in its words, and changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main
from kvtier_backends.memory import MemoryBackend
from tests.unit.backends.disk._disk import open_disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio

SPEC = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}


def everything_in(folder: Path) -> list[tuple[str, int, int]]:
    """Return what a folder holds, and when it was changed."""
    found = [(path, path.lstat()) for path in sorted([folder, *folder.rglob("*")])]
    return [(str(path), state.st_mtime_ns, state.st_mode) for path, state in found]


class Check:
    """Runs the command on a configuration."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._file = tmp_path / "kv.json"
        self._capsys = capsys

    def __call__(self, config: dict[str, Any], *options: str, status: int) -> dict[str, list[str]]:
        self._file.write_text(json.dumps(config))
        assert main(["check", str(self._file), "--json", "-", *options]) == status
        found: dict[str, list[str]] = json.loads(self._capsys.readouterr().out)
        return found

    def refused(self, *tiers: dict[str, Any], **config: Any) -> list[str]:
        """Return the refusals of these tiers."""
        whole = {**SPEC, "cpu_bytes_to_use": "1MiB", "secondary_tiers": list(tiers), **config}
        return self(whole, "--block-bytes", "4KiB", status=1)["refused"]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(tmp_path, capsys)


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, Any]:
    """Return a configuration as --kv-transfer-config gets it."""
    tiers = [
        {"type": "disk", "path": str(tmp_path / "disk/{dp_rank}"), "capacity_bytes": "16MiB"},
        {"type": "fs", "root_dir": str(tmp_path / "below/fs")},
    ]
    extra = {**SPEC, "cpu_bytes_to_use": "1MiB", "secondary_tiers": tiers}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def test_a_sound_configuration_is_passed_and_nothing_is_made(
    check: Check, sound: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "kv.json").touch()
    check(sound, status=0)
    before = everything_in(tmp_path)
    for options in (("--block-bytes", "64KiB"), ("--dp-rank", "3"), ()):
        found = check(sound, *options, status=0)
        assert found["refused"] == []
        assert [line.partition(" ")[0] for line in found["tiers"]] == ["1:disk", "2:fs"]
        sizes = [line for line in found["not_checked"] if "--block-bytes" in line]
        assert bool(sizes) is ("--block-bytes" not in options)
    assert f"{tmp_path}/disk/3" in check(sound, "--dp-rank", "3", status=0)["tiers"][0]
    assert [each[0] for each in everything_in(tmp_path)] == [each[0] for each in before]
    check(sound["kv_connector_extra_config"], status=0)
    check({"kv_transfer_config": sound}, status=0)


@pytest.mark.parametrize("behind_vllm", [False, True])
def test_weights_that_nothing_tells_from_others_are_said(
    check: Check, sound: dict[str, Any], tmp_path: Path, behind_vllm: bool
) -> None:
    config = extra = sound["kv_connector_extra_config"]
    if behind_vllm:
        extra = {
            "type": "KVTierSecondaryTier",
            "module_path": "kvtier.vllm",
            "tier": extra["secondary_tiers"][0],
        }
        config = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [extra],
        }

    def warned(*options: str) -> list[str]:
        warnings = check(config, *options, status=0)["warned"]
        return [text for text in warnings if text.startswith("nothing tells")]

    model = tmp_path / "model"
    (model / "below").mkdir(parents=True)
    assert "no weight files" in warned("--model", str(model))[0]
    assert "streamed" in warned("--model", "s3://bucket/model")[0]
    assert "'tensorizer'" in warned("--model", str(model), "--load-format", "tensorizer")[0]
    assert "random" in warned("--model", str(model), "--load-format", "dummy")[0]
    assert warned("--model", "org/name-of-the-hub") == []
    (model / "below" / "model.gguf").touch()
    assert warned("--model", str(model)) == []
    assert any("weights" in line for line in check(config, status=0)["not_checked"])
    extra["weights_version"] = "v1"
    assert warned("--model", "s3://bucket/model") == []
    assert not any("weights" in line for line in check(config, status=0)["not_checked"])


@pytest.mark.parametrize(
    ("changed", "options", "block_bytes"),
    [
        ({}, (), 16 * 1024),
        ({}, ("--block-size", "32"), 32 * 1024),
        ({}, ("--kv-cache-dtype", "fp8"), 16 * 512),
        ({}, ("--tensor-parallel-size", "8"), 16 * 2 * 1024),
        ({"kv_lora_rank": 96, "qk_rope_head_dim": 32}, (), 16 * 2 * 256),
        # Of these only is certain that one layer's bytes, one each entry, must fit.
        ({"layer_types": ["sliding_attention", "full_attention"]}, (), 16 * 256),
        ({"layer_types": ["mamba", "full_attention"]}, (), 16 * 256),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, (), 16 * 256),
    ],
)
def test_memory_for_no_block_of_the_model_is_refused(
    changed: dict[str, Any],
    options: tuple[str, ...],
    block_bytes: int,
    check: Check,
    sound: dict[str, Any],
    tmp_path: Path,
) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**model, **changed}))
    extra = sound["kv_connector_extra_config"]
    for size, status in ((block_bytes, 0), (block_bytes - 1, 1)):
        extra["cpu_bytes_to_use"] = size
        found = check(sound, "--model", str(tmp_path), *options, status=status)
    assert f"holds no block of {block_bytes} bytes" in found["refused"][0]
    is_certain = block_bytes != 16 * 256
    assert is_certain is any(f"a block has {block_bytes} bytes" in text for text in found["noted"])
    assert is_certain is not any("--block-bytes" in text for text in found["not_checked"])


def test_it_takes_no_vllm_and_no_torch(sound: dict[str, Any], tmp_path: Path) -> None:
    """It answers in a second, and on a machine that has neither."""
    (tmp_path / "kv.json").write_text(json.dumps({**sound, "kv_role": None}))
    program = (
        "import sys; from kvtier.tools.cli.main import main\n"
        f"status = main(['check', {str(tmp_path / 'kv.json')!r}])\n"
        "print(status, sorted({'vllm', 'torch'} & sys.modules.keys()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "1 []"
    assert "refused: kv_role=None" in run.stdout
    assert "would refuse 1 thing." in run.stdout


def test_all_that_is_wrong_is_said_at_once(check: Check, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    (tmp_path / "same").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "same")
    refused = check.refused(
        {"type": "fs", "root_dir": str(tmp_path / "file"), "n_read_threads": 0, "colour": 1},
        {"type": "fs", "root_dir": str(public)},
        {"type": "disk", "path": str(tmp_path / "file/below"), "capacity_bytes": "16MiB"},
        {"type": "fs", "root_dir": str(tmp_path / "same"), "probe_timeout_s": 0, "locality": "X"},
        {"type": "disk", "path": str(tmp_path / "link"), "capacity_bytes": "16MiB"},
        {"type": "memory", "capacity_bytes": 1 << 60},
        {"type": "obj"},
        {"type": "disk", "path": "/x", "capacity_bytes": 1, "encryption_key_file": "/missing"},
        {"type": "fs", "root_dir": "/x", "admission": {"policy": "second_touch", "x": 1}},
        {"type": "fs"},
        {"type": "disk", "path": str(tmp_path / "small"), "capacity_bytes": "1KiB"},
        breaker_pause_s=61,
        eviction_policy="mru",
        store_treshold=2,
        cpu_bytes_to_use=1 << 60,
    )
    for parts in (
        ("1:fs", "unknown key 'colour'"),
        ("1:fs", "n_read_threads=0"),
        ("1:fs", "is not a folder"),
        ("2:fs", "chmod o-w"),
        ("3:disk", "is not a folder"),
        ("secondary_tiers[3]", "probe_timeout_s=0"),
        ("secondary_tiers[3]", "locality='X'"),
        ("4:fs and 5:disk", "a place of its own"),
        ("11:disk", "capacity_bytes='1KiB'", "has no room"),
        ("6:memory", f"{1 << 60}"),
        ("'obj'", "Put its entry into one of kvtier's"),
        ("8:disk", "encryption_key_file='/missing'"),
        ("9:fs", "admission", "'x'"),
        ("10:fs", "root_dir is missing"),
        ("breaker_pause_s=61", "breaker_pause_s_max"),
        ("eviction_policy='mru'",),
        ("'store_treshold'", "did you mean 'store_threshold'"),
        ("cpu_bytes_to_use", "bytes of memory that there are"),
    ):
        assert any(all(part in text for part in parts) for text in refused), (parts, refused)


def test_keys_that_an_engine_would_refuse_are_refused(check: Check, tmp_path: Path) -> None:
    keys, public = tmp_path / "keys", tmp_path / "public"
    for path, mode in ((keys, 0o600), (public, 0o644)):
        path.write_text("11" * 32)
        path.chmod(mode)
    fs = {"type": "fs", "root_dir": str(tmp_path / "kv")}
    refused = check.refused(
        {**fs, "auth_key_file": "/missing"},
        {**fs, "auth_key_file": str(public)},
        {**fs, "encryption_key_env": "11" * 32},
        {**fs, "auth_key_file": str(keys), "encryption_key_file": str(keys)},
        {**fs, "auth_key_file": str(keys), "layout": "vllm"},
    )
    for parts in (
        ("1:fs", "auth_key_file='/missing'"),
        ("2:fs", "chmod 600"),
        ("3:fs", "encryption_key_env='...'"),
        ("4:fs", "auth_key_file", "Remove it"),
        ("5:fs", "layout='vllm'", "remove the keys"),
    ):
        assert any(all(part in text for part in parts) for text in refused), (parts, refused)
    assert not any("11" * 32 in text for text in refused)


async def test_a_disk_folder_with_something_else_in_the_place_of_its_lock_is_refused(
    check: Check, tmp_path: Path
) -> None:
    """It was said to be fine, with a traceback beside."""
    path = tmp_path / "kv"
    tier = {"type": "disk", "path": str(path), "capacity_bytes": "16MiB"}
    async with open_disk(path):
        pass
    (path / "lock").unlink()
    (path / "lock").symlink_to(tmp_path / "elsewhere")
    (text,) = check.refused(tier)
    assert "lock is a link, not a file" in text


def test_a_tier_whose_own_check_raises_is_not_said_to_be_fine(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise OSError(5, "of the third party's")

    monkeypatch.setattr(MemoryBackend, "check_options", raises)
    (text,) = check.refused({"type": "memory", "capacity_bytes": 4096})
    assert "can't be checked (OSError: [Errno 5] of the third party's)" in text


async def test_a_disk_folder_that_an_engine_uses_is_named_with_its_user(
    check: Check, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    tier = {"type": "disk", "path": str(path), "capacity_bytes": "16MiB"}
    async with open_disk(path):
        (text,) = check.refused(tier)
        assert f"path={str(path)!r} is in use by" in text
        patient = {**tier, "on_unusable": "skip"}
        told = check({**SPEC, "cpu_bytes_to_use": "1MiB", "secondary_tiers": [patient]}, status=0)
        (text,) = told["warned"]
        assert "is in use by" in text
        assert "An engine starts without this tier" in text
        assert told["tiers"] == []
    check({**SPEC, "cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}, status=0)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda c: c.update(kv_role=None), ("kv_role=None", "kv_both")),
        (lambda c: c.update(kv_connector="LMCacheConnector"), ("kv_connector=", "OffloadingConn")),
        (lambda c: c["kv_connector_extra_config"].pop("spec_name"), ("spec_name=None", "KVTier")),
        (
            lambda c: c["kv_connector_extra_config"].update(spec_module_path="kvtier"),
            ("spec_module_path='kvtier'", "'kvtier.vllm'"),
        ),
        (
            lambda c: c["kv_connector_extra_config"].pop("cpu_bytes_to_use"),
            ("cpu_bytes_to_use is missing", "--kv-offloading-size"),
        ),
    ],
)
def test_what_keeps_vllm_from_using_kvtier_is_found(
    change: Callable[[dict[str, Any]], object], parts: tuple[str, ...], check: Check, sound: Any
) -> None:
    change(sound)
    (text,) = check(sound, status=1)["refused"]
    for part in parts:
        assert part in text


@pytest.fixture
def vllms_own(tmp_path: Path) -> dict[str, Any]:
    """Return a configuration of vLLM's own tiering, with a tier of kvtier's in it."""
    disk = {"type": "disk", "path": str(tmp_path / "{dp_rank}"), "capacity_bytes": "16MiB"}
    entry = {"type": "KVTierSecondaryTier", "module_path": "kvtier.vllm", "tier": disk}
    tiers = [{"type": "fs", "root_dir": "/kv"}, {**entry, "backpressure": {}, "on_reset": "keep"}]
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers}
    return {"spec_name": "TieringOffloadingSpec", **extra}


def test_a_tier_of_kvtiers_in_vllms_own_tiering_is_looked_at(
    check: Check, vllms_own: dict[str, Any], tmp_path: Path
) -> None:
    for config in (
        vllms_own,
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": vllms_own,
        },
    ):
        found = check(config, "--dp-rank", "3", status=0)
        assert found["tiers"] == [f"2:disk at {tmp_path}/3"]
        assert "secondary_tiers[0] ('fs'): it is vLLM's" in found["not_checked"]
    del vllms_own["secondary_tiers"][1]  # and kvtier is not used at all
    assert "vLLM would not use kvtier" in check(vllms_own, status=1)["refused"][0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda e: e.update(module_path="kvtier"), ("module_path='kvtier'", "'kvtier.vllm'")),
        (lambda e: e.pop("tier"), ("tier is missing",)),
        (lambda e: e.update(tier=3), ("tier=3",)),
        (lambda e: e.update(on_rest="keep"), ("'on_rest'", "did you mean 'on_reset'")),
        (lambda e: e.update(eviction_policy="lru"), ("eviction_policy", "vLLM's here")),
        (lambda e: e.update(staging_bytes=4095), ("staging_bytes=4095", "4096")),
        (lambda e: e["tier"].update(admission="x"), ("admission='x'", "vLLM's own tiering")),
        (lambda e: e["tier"].pop("capacity_bytes"), ("2:disk", "capacity_bytes")),
        (lambda e: e["tier"].update(path="/proc/version/x"), ("2:disk", "/proc/version/x")),
        (lambda e: e["tier"].update(type="dsk"), ("type='dsk' is not installed",)),
    ],
)
def test_what_is_wrong_with_it_is_found(
    change: Callable[[dict[str, Any]], object], parts: tuple[str, ...], check: Check, vllms_own: Any
) -> None:
    change(vllms_own["secondary_tiers"][1])
    refused = check(vllms_own, "--block-bytes", "4KiB", status=1)["refused"]
    assert any(all(part in text for part in parts) for text in refused), refused


def test_two_entries_of_vllms_list_at_one_place_are_refused(check: Check, vllms_own: Any) -> None:
    tiers = vllms_own["secondary_tiers"]
    tiers.append(tiers[1])
    (text,) = check(vllms_own, status=1)["refused"]
    assert "2:disk and 3:disk both use" in text


def test_the_size_that_vllm_is_given_takes_the_place_of_the_key(check: Check, sound: Any) -> None:
    del sound["kv_connector_extra_config"]["cpu_bytes_to_use"]
    check(sound, "--kv-offloading-size", "0.01", status=0)
    alone = {"kv_connector_extra_config": sound["kv_connector_extra_config"]}
    check(alone, "--kv-offloading-size", "0.01", status=0)
    (text,) = check({**sound, "kv_role": None}, "--kv-offloading-size", "0.01", status=1)["refused"]
    assert "kv_role=None" in text
    (text,) = check(sound, "--kv-offloading-size", "1e9", status=1)["refused"]
    assert "bytes of memory that there are" in text


def test_two_connectors_of_a_multi_connector_are_refused(check: Check, sound: Any) -> None:
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [sound]},
    }
    check(multi, status=0)
    multi["kv_connector_extra_config"] = {"connectors": [sound, sound]}
    (text,) = check(multi, status=1)["refused"]
    assert "2 entries" in text
    assert "secondary_tiers of one" in text


def test_another_offloading_connector_may_stand_behind_kvtiers_only(
    check: Check, sound: Any
) -> None:
    vllms = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    multi: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    multi["kv_connector_extra_config"] = {"connectors": [nixl, sound, vllms]}
    check(multi, status=0)
    multi["kv_connector_extra_config"] = {"connectors": [nixl, vllms, sound]}
    (text,) = check(multi, status=1)["refused"]
    assert "Put kvtier's entry first" in text


@pytest.mark.parametrize("text", ["", "[1]", "{", '"x"', "nul", "{" * 100_000])
def test_a_file_that_is_no_configuration_is_bad_input(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv.json").write_text(text)
    assert main(["check", str(tmp_path / "kv.json")]) == BAD_INPUT
    assert main(["check", str(tmp_path / "missing")]) == BAD_INPUT
    assert "--kv-transfer-config" in capsys.readouterr().err
