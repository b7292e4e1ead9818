"""Storage that a command names: how it is found, also that of a third party's tier."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from typing_extensions import override

from kvtier.plugin_api.offline import Contents, NamespaceBlocks, Offline, Removed, Selection
from kvtier.settings import plugins
from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main
from tests.unit.backends.disk._disk import open_disk
from tests.unit.backends.fs._fs import open_fs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtier.plugin_api.progress import ShowProgress

pytestmark = pytest.mark.anyio
NAME = "org_m_0123456789ab"


class Tapes(Offline):
    """A third party's storage, of blocks of one namespace."""

    held: ClassVar[dict[bytes, int]] = {}

    def __init__(self, place: str) -> None:
        self.place = place

    @classmethod
    @override
    def at(cls, place: str) -> Tapes | None:
        return cls(place) if place.startswith("tape://") else None

    @classmethod
    @override
    def from_options(cls, options: Mapping[str, Any]) -> Tapes:
        return cls(options["at"])

    @override
    def list(self, progress: ShowProgress) -> Contents:
        blocks = NamespaceBlocks(NAME)
        for key, size in self.held.items():
            blocks.add(key, size)
        return Contents([blocks], {"tapes": 3}, [("tapes", "3")])

    @override
    def remove(self, selection: Selection, progress: ShowProgress, *, dry: bool) -> Removed:
        gone = NamespaceBlocks(NAME)
        for key in [key for key in self.held if selection.has(NAME, key)]:
            gone.add(key, self.held[key] if dry else self.held.pop(key))
        return Removed.of_blocks([gone], 0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points of tools, beside kvtier's own: the test adds to them."""
    more: list[EntryPoint] = []
    real = plugins._installed

    def _installed(group: str) -> dict[str, EntryPoint]:
        return real(group) | {each.name: each for each in more if each.group == group}

    monkeypatch.setattr(plugins, "_installed", _installed)
    return more


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, plugins.OFFLINE)


def test_a_third_partys_storage_is_listed_and_purged_like_any_other(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(entry("tape", f"{__name__}:Tapes"))
    monkeypatch.setattr(Tapes, "held", {bytes([n]) * 36: 1000 for n in range(4)})
    for place in ("tape://library", json.dumps({"type": "tape", "at": "tape://library"})):
        assert main(["ls", place, "--json", "-"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert (listed["path"], listed["blocks"], listed["tapes"]) == ("tape://library", 4, 3)
    assert main(["purge", "tape://library", "--namespace", NAME[-12:]]) == 0
    assert "removed: 4 blocks" in capsys.readouterr().out
    assert main(["ls", "tape://library"]) == 0
    assert "tapes" in capsys.readouterr().out
    assert main(["fsck", "tape://library"]) == BAD_INPUT
    assert "can't be verified from outside" in capsys.readouterr().err
    assert main(["evict", "tape://library", "--capacity", "1GB"]) == BAD_INPUT
    assert "it bounds itself" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["no_such_package:Tapes", "broken_package:Tapes"])
async def test_a_class_that_cannot_be_loaded_keeps_no_other_from_use(
    what: str,
    installed: list[EntryPoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('broken_package is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    installed.append(entry("tape", what))
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
    assert main(["ls", str(tmp_path / "kv"), "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["blocks"] == 1
    assert what.partition(":")[0] in printed.err


async def test_a_folder_is_taken_by_its_name_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a configuration a dollar sign stands for a variable; a shell has replaced those."""
    async with open_disk(tmp_path / "disk") as disk:
        await disk.store(1, 2)
    (tmp_path / "disk").rename(tmp_path / "a$NO_SUCH_VARIABLE")
    assert main(["ls", str(tmp_path / "a$NO_SUCH_VARIABLE"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 2


async def test_storage_that_two_types_recognize_is_refused(
    installed: list[EntryPoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(entry("like_fs", "kvtier_backends.fs.offline.storage:FsStorage"))
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
    assert main(["ls", str(tmp_path / "kv")]) == BAD_INPUT
    assert "recognized by more than one type of tier" in capsys.readouterr().err


async def test_a_folder_may_be_named_by_its_tiers_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_disk(tmp_path / "disk") as disk:
        await disk.store(1, 2)
    async with open_fs(tmp_path / "fs") as fs:
        await fs.store(1)
    disk_entry = {"type": "disk", "path": str(tmp_path / "disk"), "capacity_bytes": "1GB"}
    fs_entry = {"type": "fs", "root_dir": str(tmp_path / "fs"), "n_read_threads": 4}
    for tier, blocks in ((disk_entry, 2), (fs_entry, 1)):
        for command in ("ls", "fsck"):
            assert main([command, json.dumps(tier), "--json", "-"]) == 0
            figures = json.loads(capsys.readouterr().out)
            assert figures.get("blocks", figures.get("blocks_sound")) == blocks
    assert main(["ls", '{"type": "disk"}']) == BAD_INPUT
    assert "path is missing" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["[1]", '{"path": 1}', '{"type": ["fs"]}', '{"type": "fs"'])
def test_what_is_no_entry_is_refused(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", entry]) == BAD_INPUT
    assert "secondary_tiers" in capsys.readouterr().err
