"""Settings of a replay, and the folders that it makes and removes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.replay.folders import Folders
from kvtier.tools.replay.settings import read_config_file, read_runtime, read_slots, read_tier

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.settings.runtime_config import RuntimeConfig

SIZES = {
    "4096": 4096,
    "16KiB": 16 * 1024,
    "16k": 16 * 1024,
    "2GiB": 2 * 1024**3,
    "2GB": 2 * 1000**3,
    "1.5 MiB": 1024 * 1536,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes_are_read_as_people_write_them(text, size) -> None:
    assert read_bytes(text, "--dram") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XiB", "1 2", "²", "nan", "1e3", "9" * 400])
def test_what_is_no_size_is_refused_by_its_name(text) -> None:
    with pytest.raises(ConfigError, match=r"--dram=.* is not a size"):
        read_bytes(text, "--dram")


def test_a_share_is_of_the_traces_distinct_blocks() -> None:
    assert read_slots("2%", block_bytes=16384, distinct_blocks=182_790) == 3655
    assert read_slots("1MiB", block_bytes=16384, distinct_blocks=182_790) == 64
    with pytest.raises(ConfigError, match="no request has a whole block"):
        read_slots("100%", block_bytes=16384, distinct_blocks=0)


def test_short_tiers_and_json_mean_the_same() -> None:
    assert read_tier("fs:a/b:c") == {"type": "fs", "root_dir": "a/b:c"}
    disk = {"type": "disk", "path": "a/b:c", "capacity_bytes": 2 * 1024**3}
    assert read_tier("disk:a/b:c:2GiB") == disk
    assert read_tier("memory:1MiB") == {"type": "memory", "capacity_bytes": 1024**2}
    assert read_tier(' {"type": "fs", "root_dir": "x"}') == read_tier("fs:x")


@pytest.mark.parametrize("text", ["fs", "fs:", "disk:a", "disk:a:", "tape:x", '{"type": ', ""])
def test_a_tier_that_is_none_is_refused(text) -> None:
    with pytest.raises(ConfigError, match="--tier"):
        read_tier(text)


def runtime(values: dict[str, Any], **given: Any) -> RuntimeConfig:
    defaults: dict[str, Any] = {"dram": None, "tiers": [], "policy": None}
    return read_runtime(values, block_bytes=4096, distinct_blocks=1000, **{**defaults, **given})


def test_a_configuration_of_vllms_is_taken_as_it_is() -> None:
    config = runtime(
        {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm",
            "cpu_bytes_to_use": 1 << 20,
            "block_size": 64,
            "eviction_policy": "arc",
            "secondary_tiers": [{"type": "memory", "capacity_bytes": 4096}],
        }
    )
    assert config.slot_count == 256
    assert config.eviction_policy == "arc"
    assert [tier.name for tier in config.tiers] == ["1:memory"]


def test_flags_take_the_place_of_what_the_configuration_says() -> None:
    config = runtime(
        {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [{"type": "memory"}]},
        dram="10%",
        tiers=["fs:x", "memory:4096"],
        policy="arc",
    )
    assert config.slot_count == 100
    assert [tier.name for tier in config.tiers] == ["1:fs", "2:memory"]
    assert {config.eviction_policy, *(tier.eviction_policy for tier in config.tiers)} == {"arc"}


def test_what_the_engine_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'evicton_policy'"):
        runtime({"evicton_policy": "lru"}, dram="10%")
    with pytest.raises(ConfigError, match="no size"):
        runtime({})
    with pytest.raises(ConfigError, match="the primary tier has no slot"):
        runtime({}, dram="0.01%")


def test_a_configuration_file_may_hold_what_is_around_it(tmp_path) -> None:
    file = tmp_path / "config.json"
    inner = {"cpu_bytes_to_use": 1}
    file.write_text(json.dumps({"kv_connector": "x", "kv_connector_extra_config": inner}))
    assert read_config_file(str(file)) == inner
    file.write_text(json.dumps(inner))
    assert read_config_file(str(file)) == inner


@pytest.mark.parametrize("text", ["[1]", "{", '{"kv_connector_extra_config": 1}', "\ud800"])
def test_a_configuration_file_that_is_none_is_refused(tmp_path, text) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, errors="surrogatepass")
    with pytest.raises(ConfigError, match="--config"):
        read_config_file(str(file))
    with pytest.raises(ConfigError, match="--config"):
        read_config_file(str(tmp_path / "none"))


def fill(folder: Path) -> None:
    (folder / "a/b/c").mkdir(parents=True)
    (folder / "a/b/c/file").write_text("x")
    (folder / "a/lone").write_text("x")
    (folder / "link").symlink_to(folder / "a")


def use(folders: Folders, folder: Path) -> list[str]:
    """Claim a folder, put things in, and remove what is to go."""
    folders.claim("root_dir", str(folder))
    fill(folder)
    pieces = folders.to_remove()
    done: list[int] = []
    left = folders.remove(pieces, done.append)
    assert sum(done) == len(pieces)
    return left


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_goes_with_what_was_made_of_it(tmp_path, is_there) -> None:
    """Its parents too; one that was empty is empty again."""
    folder = tmp_path / "made/for/this"
    if is_there:
        folder.mkdir(parents=True)
    assert use(Folders(keep=False), folder) == []
    assert list(tmp_path.rglob("*")) == (
        [tmp_path / each for each in ("made", "made/for", "made/for/this")] if is_there else []
    )


def test_what_was_in_a_folder_is_never_removed(tmp_path) -> None:
    """The run is refused, unless everything is kept."""
    (tmp_path / "precious").write_text("x")
    folders = Folders(keep=False)
    with pytest.raises(ConfigError, match="is not empty"):
        folders.claim("root_dir", str(tmp_path))
    assert folders.remove(folders.to_remove(), lambda _: None) == []
    use(Folders(keep=True), tmp_path)
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "a/b/c/file").exists()


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folders = Folders(keep=False)
    folders.claim("root_dir", str(tmp_path / "made"))
    (tmp_path / "made" / "link").symlink_to(outside)
    assert folders.remove(folders.to_remove(), lambda _: None) == []
    assert list(tmp_path.iterdir()) == [outside]
    assert (outside / "precious").exists()


def test_a_file_in_a_folders_place_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder"):
        Folders(keep=False).claim("root_dir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="file"):
        Folders(keep=False).claim("root_dir", str(tmp_path / "file/below"))
