"""A start that is interrupted, or fails late, leaves nothing open for the next one to meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from kvtier.vllm import secondary_tier, start
from kvtier.vllm.hosted import backend
from tests.vllm.support.managers import manager
from tests.vllm.support.own_tiering import disk, tiering
from tests.vllm.support.scripted_tier import ScriptedTier

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.one_release


@pytest.mark.parametrize(
    "raised_by", ["KVTierManager", "RecordingManager", "wait_for_servers", "_say_ready"]
)
def test_an_engine_whose_start_ended_late_starts_again_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised_by: str
) -> None:
    """In a notebook: Ctrl-C while it waits for a server, and the folder would be in use."""
    settings: dict[str, Any] = {"secondary_tiers": [disk(tmp_path / "kv")]}
    if raised_by != "KVTierManager":
        settings["record"] = str(tmp_path / "record.zst")
    with monkeypatch.context() as patch:
        patch.setattr(start, raised_by, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), manager(**settings):
            pass
    with manager(**settings) as built:
        assert [tier.name for tier in built.facade.statistics().tiers] == ["1:disk"]


def test_so_does_a_tier_behind_vllms_own_tiering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(secondary_tier, "wait_for_servers", Mock(side_effect=OSError))
        with pytest.raises(OSError), tiering(disk(tmp_path / "kv")):  # noqa: PT011 - it has no text
            pass
    with tiering(disk(tmp_path / "kv")) as running:
        assert running.tier.get_stats() is not None


def test_a_hosted_tier_that_kvtier_cannot_use_is_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a vLLM whose private parts have moved; its tier may hold a port."""
    monkeypatch.setattr(backend, "HostedJobs", Mock(side_effect=AttributeError))
    tier = {"type": "ScriptedTier", "module_path": "tests.vllm.support.scripted_tier"}
    with (
        pytest.raises(AttributeError),
        manager(secondary_tiers=[{"type": "vllm", "tier": tier}]),
    ):
        pass
    assert "shutdown" in ScriptedTier.last.threads
