"""A tier that is read only serves what others store, and changes nothing: mounts here are real."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs import FsBackend, open_root
from tests.support.needs import needs
from tests.unit.backends._media import mount, unmount
from tests.unit.backends.fs._fs import CONTEXT, make_fs, open_fs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
DONE, ABSENT, DAMAGED = Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED
READER = replace(CONTEXT, read_only=True)
LAYOUTS = pytest.mark.parametrize("layout", ["kvtier", "vllm"])


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_root, "CHECK_PAUSE_S", 0.0)


def state_of(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return what a write would change of all that is there."""
    found = {}
    for path in sorted((root, *root.rglob("*"))):
        status = path.stat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


@LAYOUTS
async def test_it_serves_and_changes_nothing(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "kv"
    async with open_fs(root, layout=layout) as writer:
        assert await writer.store(1) is DONE
        assert await writer.store(2) is DONE
        os.truncate(writer.path(2), 10)
    before = state_of(root)
    async with open_fs(root, READER, layout=layout) as reader:
        assert await reader.probe(1)
        assert await reader.load(1) is DONE
        assert await reader.load(2) is DAMAGED
        assert await reader.load(3) is ABSENT
    assert state_of(root) == before


@needs("mount")
@LAYOUTS
async def test_it_serves_a_mount_that_is_read_only(tmp_path: Path, layout: str) -> None:
    async with open_fs(tmp_path / "kv", layout=layout) as writer:
        assert await writer.store(1) is DONE
    (tmp_path / "mounted").mkdir()
    mount("--bind", "-o", "ro", tmp_path / "kv", tmp_path / "mounted")
    try:
        with pytest.raises(ConfigError, match="Read-only file system"):
            make_fs(tmp_path / "mounted", layout=layout)
        options = {"root_dir": str(tmp_path / "mounted"), "layout": layout}
        assert FsBackend.check_options(options, READER) == str(tmp_path / "mounted")
        async with open_fs(tmp_path / "mounted", READER, layout=layout) as reader:
            assert await reader.load(1) is DONE
    finally:
        unmount(tmp_path / "mounted")


@LAYOUTS
async def test_what_others_store_later_is_found(tmp_path: Path, layout: str) -> None:
    """Pods that read may start before the one that writes; a purge may come between."""
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    with capture_logs() as lines:
        async with open_fs(root, READER, layout=layout) as reader:
            assert not await reader.probe(1)
            assert list(root.iterdir()) == []
            for number in (1, 2):
                async with open_fs(root, layout=layout) as writer:
                    assert await writer.store(number) is DONE
                assert await reader.probe(number)
                assert await reader.load(number) is DONE
                for each in root.iterdir():
                    shutil.rmtree(each)
                assert not await reader.probe(number)
    said = [(line["kind"], line["log_level"]) for line in lines if "kind" in line]
    assert said == [("folder_lost", "warning"), ("folder_lost", "info")], "each is said once"
    assert "holds nothing yet" in str(next(line for line in lines if "kind" in line)["reason"])


async def test_another_engines_namespace_that_comes_later_is_not_served(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    async with open_fs(root, READER) as reader:
        async with open_fs(root) as writer:
            assert await writer.store(1) is DONE
            config = next(root.glob("*/config.json"))
            config.write_text(config.read_text().replace("bf16", "fp8"))
        assert not await reader.probe(1)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for options, root, words in (
        ({}, tmp_path / "missing", "with read_only no folder is made"),
        ({"capacity_bytes": 1 << 30}, tmp_path, "read_only is set"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_fs(root, READER, **options)
        with pytest.raises(ConfigError, match=words):
            FsBackend.check_options({"root_dir": str(root), **options}, READER)
    assert not (tmp_path / "missing").exists()
