"""Bad configuration is refused at start: the message has the key, the value and the remedy."""

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


def refusal(**extra_config: Any) -> str:
    """Return the text that the operator reads."""
    with pytest.raises(ConfigError) as caught, manager(**extra_config):
        pass
    return str(caught.value)


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


def test_compression_is_refused_for_another_type_than_bfloat16(tmp_path: Path) -> None:
    assert CONFIG.model.dtype == "float16"
    text = refusal(secondary_tiers=[tier(tmp_path / "kv", compression="bitplane-zstd")])
    for word in ("compression='bitplane-zstd'", "float16", "Remove it"):
        assert word in text


@pytest.mark.one_release
@pytest.mark.parametrize(
    ("extra_config", "key", "value", "remedy"),
    [
        ({"store_treshold": 2}, "store_treshold", "2", "did you mean 'store_threshold'?"),
        ({"colour": "red"}, "colour", "red", "Known keys:"),
        ({"store_threshold": "2"}, "store_threshold", "'2'", "without quotes"),
        ({"store_threshold": True}, "store_threshold", "True", "whole number"),
        ({"canonical_layout": "false"}, "canonical_layout", "'false'", "without quotes"),
        ({"max_tracker_size": 0}, "max_tracker_size", "0", "at least 1"),
        ({"eviction_policy": "mru"}, "eviction_policy", "'mru'", "did you mean 'lru'"),
        ({"tier_poll_interval_s": 1}, "tier_poll_interval_s", "1", "Remove it"),
        ({"cpu_bytes_to_use": "64"}, "cpu_bytes_to_use", "'64'", "without quotes"),
        ({"cpu_bytes_to_use": 100}, "cpu_bytes_to_use", "100", "Give it at least"),
        ({"secondary_tiers": {"type": "fs"}}, "secondary_tiers", "'fs'", "list of mappings"),
        ({"secondary_tiers": [{"type": "s4"}]}, "type", "'s4'", "Known: "),
        ({"secondary_tiers": [{}]}, "type", "secondary_tiers[0]", "Set it"),
        ({"secondary_tiers": [{"type": "fs"}]}, "root_dir", "1:fs", "Set it"),
    ],
)
def test_a_bad_key_or_value_is_refused(
    extra_config: dict[str, Any], key: str, value: str, remedy: str
) -> None:
    """The first line that an operator sees must be enough to mend it."""
    text = refusal(**extra_config)
    for part in (key, value, remedy):
        assert part in text


@pytest.mark.one_release
@pytest.mark.parametrize(
    ("options", "key", "value", "remedy"),
    [
        ({"n_read_thread": 3}, "n_read_thread", "3", "did you mean 'n_read_threads'?"),
        ({"n_read_threads": "3"}, "n_read_threads", "'3'", "without quotes"),
        ({"n_write_threads": 0}, "n_write_threads", "0", "at least 1"),
        ({"locality": "NEAR"}, "locality", "'NEAR'", "LOCAL, REMOTE"),
        ({"enable_kv_events": "yes"}, "enable_kv_events", "'yes'", "true or false"),
        ({"promote_timeout_s": 0}, "promote_timeout_s", "0", "above 0"),
        ({"layout": "flat"}, "layout", "'flat'", "kvtier, vllm"),
    ],
)
def test_a_bad_key_or_value_of_a_tier_is_refused(
    tmp_path: Path, options: dict[str, Any], key: str, value: str, remedy: str
) -> None:
    """The tier is named too: there may be several."""
    text = refusal(secondary_tiers=[tier(tmp_path / "kv", **options)])
    for part in (key, value, remedy, "fs"):
        assert part in text


@pytest.mark.one_release
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Not there and not to be made, no folder, below a file, or anybody's to write to."""
    file = tmp_path / "file"
    file.touch()
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    for root, remedy in (
        ("/proc/kvtier", "Create it for this user, or name another"),
        (str(file), "Name a folder"),
        (str(file / "below"), "Name a folder"),
        (str(public), "Run chmod o-w on it"),
    ):
        text = refusal(secondary_tiers=[tier(root)])
        for part in ("1:fs", f"root_dir={root!r}", remedy):
            assert part in text


def test_a_model_with_nothing_to_offload_is_refused() -> None:
    """It would divide by the bytes of a block."""
    config = replace(CONFIG, worker_kv_bytes_per_block=0, extra_config=kvtier_config())
    with pytest.raises(ConfigError) as caught:
        KVTierOffloadingSpec(config)
    for part in ("kv_bytes_per_chunk=0", "no KV cache", "Remove the kv_transfer_config"):
        assert part in str(caught.value)


@pytest.mark.one_release
def test_two_tiers_on_one_folder_are_refused(tmp_path: Path) -> None:
    """By whatever name."""
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    (tmp_path / "kv").mkdir()
    tiers = [tier(tmp_path / "kv"), tier(tmp_path / "link")]
    text = refusal(secondary_tiers=tiers)
    for part in ("1:fs", "2:fs", str(tmp_path / "kv"), "a place of its own"):
        assert part in text


@pytest.mark.one_release
@pytest.mark.parametrize("garbage", [b"\xff\xfe{", b"", b"[]", b"{" * 100_000])
def test_a_damaged_description_of_a_folder_is_refused(tmp_path: Path, garbage: bytes) -> None:
    """Blocks of nobody knows what are not served."""
    with manager(secondary_tiers=[tier(tmp_path / "kv")]):
        pass
    (config,) = tmp_path.glob("kv/*/config.json")
    config.write_bytes(garbage)
    text = refusal(secondary_tiers=[tier(tmp_path / "kv")])
    for part in ("1:fs", "root_dir=", str(config), "remove its folder"):
        assert part in text


@pytest.mark.one_release
def test_blocks_of_another_geometry_are_refused(tmp_path: Path) -> None:
    """The digest in the folder's name may clash; the description tells."""
    with manager(secondary_tiers=[tier(tmp_path / "kv")]):
        pass
    (config,) = tmp_path.glob("kv/*/config.json")
    config.write_text(config.read_text().replace("float16", "float32"))
    text = refusal(secondary_tiers=[tier(tmp_path / "kv")])
    for part in ("holds other blocks", "float32", "float16", "Name another root_dir"):
        assert part in text


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
