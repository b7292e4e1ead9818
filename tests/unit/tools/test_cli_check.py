"""``kvtier check`` over real folders: nothing changes. What it finds: ``golden/check.txt``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvtier.errors import StorageUnusable
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.settings.plugins import make_backend
from kvtier.settings.runtime_config import TierConfig
from kvtier_backends.memory import MemoryBackend
from tests.support.needs import needs
from tests.unit.backends._media import mount, tmpfs
from tests.unit.backends.disk._disk import open_disk

if TYPE_CHECKING:
    from tests.unit.tools._shell import Shell

pytestmark = pytest.mark.anyio

README: Final = Path(__file__).parents[3] / "README.md"
SPEC = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}


def test_the_readmes_configuration_is_sound(kvtier: Shell, tmp_path: Path) -> None:
    """All of it but the folder and the sizes, which are another machine's."""
    (printed,) = re.findall(
        r"^\$ cat > kv.json <<'END'\n(.*?)^END$", README.read_text(), re.MULTILINE | re.DOTALL
    )
    assert {f'"{key}": "{value}"' for key, value in SPEC.items()} <= {
        line.strip().rstrip(",") for line in printed.splitlines()
    }, "the two lines that differ from vLLM's tiering"
    for written, here in {
        "/nvme/kvtier": f"{tmp_path}/kv",
        '"8GiB"': '"1MiB"',
        '"200GB"': '"16MiB"',
    }.items():
        assert printed.count(written) == 1
        printed = printed.replace(written, here)
    file = tmp_path / "kv.json"
    file.write_text(printed)
    assert kvtier("check", file)["refused"] == []
    file.write_text(printed.replace('"capacity_bytes"', '"capacity"'))
    assert kvtier("check", file, status=1)["refused"], "the check would find a mistake"


def everything_in(folder: Path) -> list[tuple[str, int, int]]:
    """Return what a folder holds, and when it was changed."""
    found = [(path, path.lstat()) for path in sorted([folder, *folder.rglob("*")])]
    return [(str(path), state.st_mtime_ns, state.st_mode) for path, state in found]


class Check:
    """Runs the command on a configuration with these tiers."""

    def __init__(self, file: Path, kvtier: Shell) -> None:
        self.file = file
        self._kvtier = kvtier

    def __call__(
        self, *tiers: dict[str, Any], size: object = "1MiB", options: Any = (), status: int = 0
    ) -> dict[str, list[str]]:
        config = {**SPEC, "cpu_bytes_to_use": size, "secondary_tiers": tiers}
        self.file.write_text(json.dumps(config))
        return self._kvtier("check", self.file, *options, status=status)

    def refusal(self, tier: dict[str, Any]) -> str:
        """Return the only one of a tier."""
        (text,) = self(tier, options=("--block-bytes", "4KiB"), status=1)["refused"]
        return text


@pytest.fixture
def check(tmp_path: Path, kvtier: Shell) -> Check:
    return Check(tmp_path / "kv.json", kvtier)


def test_nothing_is_made_or_changed(check: Check, tmp_path: Path) -> None:
    tiers = (
        {"type": "disk", "path": str(tmp_path / "disk/{dp_rank}"), "capacity_bytes": "16MiB"},
        {"type": "fs", "root_dir": str(tmp_path / "below/fs")},
    )
    check(*tiers)
    before = everything_in(tmp_path)
    for options in (("--block-bytes", "64KiB"), ("--dp-rank", "3"), ()):
        assert check(*tiers, options=options)["refused"] == []
    after = everything_in(tmp_path)
    assert [each[0] for each in after] == [each[0] for each in before]


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
    tmp_path: Path,
) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**model, **changed}))
    tier = {"type": "redis", "url": "redis://kv1"}
    for size, status in ((block_bytes, 0), (block_bytes - 1, 1)):
        found = check(tier, size=size, options=("--model", tmp_path, *options), status=status)
    assert f"holds no block of {block_bytes} bytes" in found["refused"][0]
    is_certain = block_bytes != 16 * 256
    assert is_certain is any(f"a block has {block_bytes} bytes" in text for text in found["noted"])
    assert is_certain is not any("--block-bytes" in text for text in found["not_checked"])


async def test_a_disk_folder_with_something_else_in_the_place_of_its_lock_is_refused(
    check: Check, tmp_path: Path
) -> None:
    """It was said to be fine, with a traceback beside."""
    path = tmp_path / "kv"
    async with open_disk(path):
        pass
    (path / "lock").unlink()
    (path / "lock").symlink_to(tmp_path / "elsewhere")
    tier = {"type": "disk", "path": str(path), "capacity_bytes": "16MiB"}
    assert "lock is a link, not a file" in check.refusal(tier)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(5, "of the disk"), "See to its storage."),
        (KeyError("of the third party's"), "Tell who wrote its type."),
    ],
)
def test_a_tier_whose_own_check_raises_is_not_said_to_be_fine(
    error: Exception, remedy: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr(MemoryBackend, "check_options", raises)
    text = check.refusal({"type": "memory", "capacity_bytes": 4096})
    assert f"can't be checked ({type(error).__name__}: {error})" in text
    assert text.endswith(remedy)


async def test_a_disk_folder_that_an_engine_uses_is_named_with_its_user(
    check: Check, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    tier = {"type": "disk", "path": str(path), "capacity_bytes": "16MiB"}
    async with open_disk(path):
        assert f"path={str(path)!r} is in use by" in check.refusal(tier)
        told = check({**tier, "on_unusable": "skip"})
        (text,) = told["warned"]
        assert "is in use by" in text
        assert "An engine starts without this tier" in text
        assert told["tiers"] == []
    check(tier)


@needs("mount")
@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"type": "disk", "path": "", "capacity_bytes": "16MiB"}, "filesystem is read-only"),
        ({"type": "fs", "root_dir": ""}, "filesystem is read-only"),
        ({"type": "fs", "root_dir": "absent", "read_only": True}, "is not there"),
    ],
)
def test_a_folder_that_cannot_be_used_now_is_refused_if_an_engine_would(
    tier: dict[str, Any], said: str, check: Check, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "kv", "1m") as folder:
        mount("-o", "remount,ro", folder)
        key = "path" if tier["type"] == "disk" else "root_dir"
        tier = {**tier, key: str(folder / tier[key])}
        assert said in check.refusal(tier)
        (text,) = check({**tier, "on_unusable": "skip"})["warned"]
        assert said in text
        config = TierConfig.from_mapping(1, tier)
        context = BackendContext(4096, Namespace(facts={}), config.name, read_only=config.read_only)
        with pytest.raises(StorageUnusable):
            make_backend(config, context)


def test_a_file_that_nests_too_deeply_is_bad_input(tmp_path: Path, kvtier: Shell) -> None:
    (tmp_path / "kv.json").write_text("{" * 100_000)
    assert "cannot be read as JSON" in kvtier.refused("check", tmp_path / "kv.json")
