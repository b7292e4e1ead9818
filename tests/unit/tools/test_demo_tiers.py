"""The demo's tiers: a folder, and a server that it starts and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import valkey

from kvtier.errors import Misuse
from kvtier.tools.demo import tiers as demo_tiers
from kvtier.tools.demo.tiers import CAPACITY_BYTES, TIERS

if TYPE_CHECKING:
    from pathlib import Path


def test_the_demos_server_is_a_cache_and_ends_with_the_block(tmp_path: Path) -> None:
    with TIERS["redis"](tmp_path) as tier:
        path = tier.entry["url"].removeprefix("unix://")
        with valkey.Valkey(unix_socket_path=path) as client:
            client.set("name", bytes(1 << 20))
            assert client.config_get("maxmemory")["maxmemory"] == str(CAPACITY_BYTES)
        assert 1 << 20 < tier.used_bytes() < CAPACITY_BYTES
    with pytest.raises(valkey.ConnectionError, match="refused"):
        tier.used_bytes()


def test_a_server_that_does_not_start_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_tiers, "CAPACITY_BYTES", "lots")
    with pytest.raises(SystemExit, match="maxmemory"), TIERS["redis"](tmp_path):
        pass


def test_without_a_server_the_demo_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_tiers, "packaged_valkey", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Misuse, match="pip install"), TIERS["redis"](tmp_path):
        pass


def test_the_folder_counts_what_its_files_take(tmp_path: Path) -> None:
    with TIERS["disk"](tmp_path) as tier:
        assert tier.used_bytes() == 0
        (tmp_path / "tier").mkdir()
        (tmp_path / "tier" / "region").write_bytes(bytes(1 << 16))
        assert tier.used_bytes() >= 1 << 16
