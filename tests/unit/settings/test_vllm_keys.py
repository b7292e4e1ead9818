"""A key that a newer vLLM knows is ignored with a warning; one that nobody knows is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.settings.extra_config import read_settings
from kvtier.settings.vllm_keys import VLLMKeys, keys_of_connector, keys_of_tier

if TYPE_CHECKING:
    from pathlib import Path

SCHEDULER = """
class Scheduler:
    def __init__(self, spec):
        self.budget = int(spec.extra_config.get("future_budget", 0))
        self.other = kv_transfer_config.kv_connector_extra_config["future_mode"]
        self.cache = self.settings.get("no_key_of_ours")
"""
FACTORY = """
SecondaryTierFactory.register_tier("fs", "vllm.v1.kv_offload.tiering.fs.manager", "Manager")
SecondaryTierFactory.register_tier("obj", "vllm.v1.kv_offload.tiering.obj.manager", "Missing")
"""
MANAGER = """
class Manager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, root_dir, n_read_threads=16,
                 future_fsync=False, *, direct=None):
        self.own = tier.extra_config.get("of_a_tier")
"""


@pytest.fixture
def newer_vllm(tmp_path: Path) -> str:
    """Return the folder of a vLLM whose source has keys of the future."""
    for name, text in {
        "v1/kv_offload/scheduler.py": SCHEDULER,
        "v1/kv_offload/broken.py": "def (",
        "v1/kv_offload/tiering/factory.py": FACTORY,
        "v1/kv_offload/tiering/fs/manager.py": MANAGER,
    }.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path / "vllm")


def test_keys_are_found_where_vllm_reads_them(newer_vllm: str) -> None:
    assert keys_of_connector(newer_vllm) == {"future_budget", "future_mode"}
    assert keys_of_tier(newer_vllm, "fs") == {
        "root_dir",
        "n_read_threads",
        "future_fsync",
        "direct",
    }
    assert keys_of_tier(newer_vllm, "obj") == frozenset()
    assert keys_of_tier(newer_vllm, "nix") == frozenset()


def test_a_key_that_vllm_knows_is_ignored_and_named_once(
    newer_vllm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "future_budget": 5,
        "secondary_tiers": [{"type": "fs", "root_dir": "/kv", "future_fsync": True}],
    }
    keys = VLLMKeys(newer_vllm)
    for _ in range(2):
        read = read_settings(config, slot_count=8, block_bytes=1, ignores=keys)
        assert read.tiers[0].options == {"root_dir": "/kv"}
    log = capsys.readouterr().out
    assert log.count("future_budget") == 1
    assert log.count("future_fsync") == 1


def test_limits_of_vllms_tiering_are_ignored_and_the_log_says_why(
    newer_vllm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever changes to kvtier changes two lines, and keeps the others."""
    tiers = [
        {"type": "fs", "root_dir": "/kv", "backpressure": {}},
        {"type": "disk", "backpressure": 1},
    ]
    config = {"backpressure": {"backpressure_cls": "EMA"}, "secondary_tiers": tiers}
    read = read_settings(config, slot_count=8, block_bytes=1, ignores=VLLMKeys(newer_vllm))
    assert [tier.options for tier in read.tiers] == [{"root_dir": "/kv"}, {}]
    log = capsys.readouterr().out
    assert log.count("key=backpressure") == log.count("kvtier limits the work in flight") == 3


def test_a_key_that_nobody_knows_stays_refused(newer_vllm: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'future_bugdet' \(value 5\)"):
        read_settings(
            {"future_bugdet": 5}, slot_count=8, block_bytes=1, ignores=VLLMKeys(newer_vllm)
        )


def test_an_option_of_our_own_tier_is_never_ignored(newer_vllm: str) -> None:
    """``direct`` is ours, though this vLLM has one too; and vLLM has no disk tier."""
    keys = VLLMKeys(newer_vllm)
    for option in (
        "root_dir",
        "n_read_threads",
        "n_write_threads",
        "layout",
        "allow_unchecksummed",
        "direct",
    ):
        assert not keys(option, "fs")
    assert not keys("future_fsync", "disk")


def test_without_vllm_nothing_is_ignored(tmp_path: Path) -> None:
    assert not VLLMKeys(str(tmp_path))("future_budget")
