"""``kvtier ls``, ``fsck``, ``purge`` and ``evict`` beside engines, and when they are interrupted.

What else they print, do and refuse over storage is in ``golden``.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier.tools.cli import evict as evict_command
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier_backends.disk import backend as disk_backend
from kvtier_backends.disk.offline import purge_requests
from kvtier_backends.disk.offline.inspection import Folder
from kvtier_backends.fs.bound.protocol import SPACE
from tests.support.needs import needs
from tests.unit.backends._media import mount, unmount
from tests.unit.backends.disk._disk import open_disk
from tests.unit.backends.fs._fs import FILE_BYTES, ODD_NAMES, key_of, open_fs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.tools._shell import Shell

pytestmark = pytest.mark.anyio
FS_BLOCKS = 20


@pytest.fixture
async def disk(tmp_path: Path) -> Path:
    """Twenty blocks, in more than one region."""
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(20))
        await disk.come_to_rest()
    return tmp_path / "kv"


@pytest.fixture
async def fs(tmp_path: Path) -> Path:
    """Twenty blocks, the first ones stored longest ago."""
    async with open_fs(tmp_path / "kv") as fs:
        for number in range(FS_BLOCKS):
            await fs.store(number)
            os.utime(fs.path(number), (1e9 + 100 * number, 1e9 + 100 * number))
    return tmp_path / "kv"


async def test_purge_says_if_the_engine_does_not_answer(
    disk: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge_requests, "ACCEPTED_WITHIN_S_MAX", 0.0)
    monkeypatch.setattr(disk_backend, "TICK_S", 1000.0)
    async with open_disk(disk):
        figures = kvtier("purge", disk, "--all", status=1)
        assert "did not accept the request" in figures["error"]
        assert "stop it, and run this again" in kvtier.shown("purge", disk, "--all", status=1)


@needs("mount")
async def test_purge_says_why_it_could_not_remove_blocks(fs: Path, kvtier: Shell) -> None:
    mount("--bind", fs, fs)
    try:
        mount("-o", "remount,bind,ro", fs)
        shown = kvtier.shown("purge", fs, "--all", status=1)
    finally:
        unmount(fs)
    assert f"{FS_BLOCKS} blocks could not be removed (Read-only file system)." in shown


@pytest.mark.parametrize("command", [["ls"], ["fsck"], ["fsck", "--repair"], ["purge", "--all"]])
async def test_another_ones_folder_is_refused_and_named(
    command: list[str], disk: Path, kvtier: Shell
) -> None:
    disk.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        said = kvtier.refused(command[0], disk, *command[1:])
    finally:
        if is_root:
            os.seteuid(0)
        disk.chmod(0o700)
    assert f"{disk}: Permission denied. Run this as the user that the engine runs as." in said


@pytest.mark.parametrize("command", [["ls"], ["fsck"], ["purge", "--all"]])
async def test_ctrl_c_reports_what_was_done_so_far(
    command: list[str], disk: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.inspect

    def interrupted(self: Folder, number: int) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(Folder, "inspect", interrupted)
    name, *options = command
    assert not kvtier(name, disk, *options, status=INTERRUPTED)["complete"]
    assert "Interrupted" in kvtier.shown(name, disk, *options, status=INTERRUPTED)
    monkeypatch.undo()
    assert kvtier("fsck", disk)["sound"]


async def test_ls_shows_the_bound_and_who_cleans(fs: Path, kvtier: Shell) -> None:
    async with open_fs(fs, capacity_bytes=100 * FILE_BYTES) as engine:
        while await engine.store(100) is not Outcome.DONE:
            pass
        figures = kvtier("ls", fs)
        assert figures["capacity_bytes"] == 100 * FILE_BYTES
        assert str(os.getpid()) in figures["cleaner"]
        assert figures["cleaner"] in kvtier.shown("ls", fs)


async def test_engines_hear_of_what_evict_removes(fs: Path, kvtier: Shell) -> None:
    lost: list[bytes] = []
    async with open_fs(fs, capacity_bytes=100 * FILE_BYTES) as engine:
        engine.backend.on_lost = lost.extend
        while await engine.store(100) is not Outcome.DONE:
            pass
        reader = engine.backend._folder_bound._removals
        while reader._seen is None:
            await engine.load(100)
        kvtier("evict", fs, "--capacity", "1")
        while key_of(100) not in lost:
            await engine.probe(100)


@pytest.mark.parametrize("command", [["evict", "--capacity", "1"], ["purge", "--all"]])
async def test_foreign_files_of_any_name_are_removed(
    command: list[str], fs: Path, kvtier: Shell
) -> None:
    (fs / SPACE).mkdir()  # engines are told the names
    leaf = next(fs.rglob("*.kv")).parent
    for each in ODD_NAMES:
        (leaf / os.fsdecode(each)).write_bytes(b"foreign")
    name, *options = command
    kvtier(name, fs, *options)
    assert not [*leaf.iterdir()]


async def test_evict_goes_on_every_so_often_until_it_is_interrupted(
    fs: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = iter((False, True))
    monkeypatch.setattr(evict_command, "_was_interrupted", lambda _seconds: next(rounds))
    given = ("evict", fs, "--capacity", 8 * FILE_BYTES, "--every", 60, "--json", "-")
    lines = kvtier.shown(*given, status=INTERRUPTED).splitlines()
    assert [json.loads(line)["blocks_removed"] for line in lines] == [FS_BLOCKS - 8, 0]
