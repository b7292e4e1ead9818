"""Storage that a command names: how it is found, also that of a third party's tier."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from typing_extensions import override

from kvtier.plugin_api.offline import Contents, NamespaceBlocks, Offline, Removed, Selection
from kvtier.settings import plugins
from tests.unit.backends.disk._disk import open_disk
from tests.unit.backends.fs._fs import open_fs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtier.plugin_api.progress import ShowProgress
    from tests.unit.tools._shell import Shell

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
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what installs a class of a tool's beside kvtier's own, by its name."""
    more: dict[str, EntryPoint] = {}
    real = plugins._installed

    def _installed(group: str) -> dict[str, EntryPoint]:
        return real(group) | (more if group == plugins.OFFLINE else {})

    monkeypatch.setattr(plugins, "_installed", _installed)
    return lambda name, value: more.update({name: EntryPoint(name, value, plugins.OFFLINE)})


def test_a_third_partys_storage_is_listed_and_purged_like_any_other(
    install: Any, monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    install("tape", f"{__name__}:Tapes")
    monkeypatch.setattr(Tapes, "held", {bytes([n]) * 36: 1000 for n in range(4)})
    for place in ("tape://library", json.dumps({"type": "tape", "at": "tape://library"})):
        listed = kvtier("ls", place)
        assert (listed["path"], listed["blocks"], listed["tapes"]) == ("tape://library", 4, 3)
    purged = kvtier.shown("purge", "tape://library", "--namespace", NAME[-12:])
    assert "removed: 4 blocks" in purged
    assert "tapes" in kvtier.shown("ls", "tape://library")
    assert "can't be verified from outside" in kvtier.refused("fsck", "tape://library")
    assert "bounds itself" in kvtier.refused("evict", "tape://library", "--capacity", "1GB")


@pytest.mark.parametrize("what", ["no_such_package:Tapes", "broken_package:Tapes"])
async def test_a_class_that_cannot_be_loaded_keeps_no_other_from_use(
    what: str, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('broken_package is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    install("tape", what)
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
    assert kvtier("ls", tmp_path / "kv")["blocks"] == 1
    assert what.partition(":")[0] in kvtier.err


async def test_a_folder_is_taken_by_its_name_as_it_is(tmp_path: Path, kvtier: Shell) -> None:
    """In a configuration a dollar sign stands for a variable; a shell has replaced those."""
    async with open_disk(tmp_path / "disk") as disk:
        await disk.store(1, 2)
    (tmp_path / "disk").rename(tmp_path / "a$NO_SUCH_VARIABLE")
    assert kvtier("ls", tmp_path / "a$NO_SUCH_VARIABLE")["blocks"] == 2


async def test_storage_that_two_types_recognize_is_refused(
    install: Any, tmp_path: Path, kvtier: Shell
) -> None:
    install("like_fs", "kvtier_backends.fs.offline.storage:FsStorage")
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
    assert "recognized by more than one type of tier" in kvtier.refused("ls", tmp_path / "kv")
