"""Plugins are found by their entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.settings.plugins import make_policy

if TYPE_CHECKING:
    from pathlib import Path


def test_a_package_that_is_installed_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is installed is remembered, and looked through again before a name is refused."""
    with pytest.raises(ConfigError, match="'late' is not installed"):
        make_policy("late", 4)
    info = tmp_path / "late_policy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late-policy\nVersion: 1\n")
    lru = type(make_policy("lru", 4))
    entry = f"[kvtier.eviction_policies]\nlate = {lru.__module__}:{lru.__name__}\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(make_policy("late", 4)) is lru


def test_a_package_that_lacks_what_it_needs_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lame_policy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lame-policy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtier.eviction_policies]\nlame = lame_policy:Lame\n")
    (tmp_path / "lame_policy.py").write_text("import what_nobody_has_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'lame'.*what_nobody_has_installed.*Install"):
        make_policy("lame", 4)
