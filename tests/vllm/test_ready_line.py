"""The one line about the whole that an engine's start writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.support.fuse_folder import fuse_folder
from tests.support.needs import needs
from tests.support.redis_servers import free_port
from tests.vllm.support.managers import manager

if TYPE_CHECKING:
    from pathlib import Path


def test_the_line_says_how_much_there_is_of_what_and_which_tiers(tmp_path: Path) -> None:
    tiers = [
        {"type": "memory", "capacity_bytes": 1 << 20},
        {"type": "fs", "root_dir": str(tmp_path / "kv")},
    ]
    with capture_logs() as lines, manager(secondary_tiers=tiers) as built:
        (line,) = (each for each in lines if each["event"] == "kvtier is ready")
        assert line["log_level"] == "info"
        statistics = built.facade.statistics().primary
        assert line["blocks"] == statistics.slot_count
        assert line["blocks"] * line["block_bytes"] == 1 << 20
        assert line["tiers"] == "1:memory, 2:fs"
        assert "without" not in line
        assert line["seconds"] > 0


def test_an_engine_without_tiers_says_so() -> None:
    with capture_logs() as lines, manager():
        (line,) = lines
        assert (line["event"], line["tiers"]) == ("kvtier is ready", "none")


def test_a_tier_whose_server_is_not_there_is_named_and_waited_for_no_longer_than_allowed() -> None:
    tier = {
        "type": "redis",
        "url": f"redis://127.0.0.1:{free_port()}",
        "startup_connect_timeout_s": 0.01,
    }
    with capture_logs() as lines, manager(secondary_tiers=[tier]):
        (line,) = (each for each in lines if each["event"] == "kvtier is ready")
    assert (line["tiers"], line["connecting"]) == ("1:redis", "1:redis")


@pytest.mark.parametrize(
    ("installed", "is_tested"),
    [
        ("0.32.0", True),
        ("0.32.1+cpu", True),
        ("0.33.0rc1", True),
        ("0.34.0", False),
        ("1.0", False),
    ],
)
def test_a_vllm_that_kvtier_is_not_tested_with_is_named(
    installed: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", installed)
    with capture_logs() as lines, manager():
        warned = [each for each in lines if each["log_level"] == "warning"]
    assert [each["vllm"] for each in warned] == ([] if is_tested else [installed])


@needs("fuse")
def test_a_tier_that_the_engine_starts_without_is_named(tmp_path: Path) -> None:
    """It may be used later; its own line says then what is in it."""
    with fuse_folder(tmp_path) as folder:
        folder.fail()
        root = str(folder.path / "kv")
        tier = {"type": "fs", "root_dir": root, "on_unusable": "skip"}
        with capture_logs() as lines, manager(secondary_tiers=[tier]):
            (line,) = (each for each in lines if each["event"] == "kvtier is ready")
        assert (line["tiers"], line["without"]) == ("1:fs", "1:fs")
        (disabled,) = (each for each in lines if each["event"] == "tier disabled")
        assert root in disabled["reason"]
