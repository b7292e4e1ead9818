"""``kvtier ls``, ``fsck`` and ``purge``: what they print, what they return, what they refuse."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier.settings.plugins import offline_classes
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.main import main
from kvtier_backends.disk import backend as backend_module
from kvtier_backends.disk import format as fmt
from kvtier_backends.disk.offline import purge_requests
from kvtier_backends.disk.offline.inspection import Folder
from tests.unit.backends.disk._disk import (
    BLOCK_BYTES,
    CONTEXT,
    OTHER_CONTEXT,
    open_disk,
)

pytestmark = pytest.mark.anyio
OWN, OTHER = fmt.namespace_digest(CONTEXT).hex(), fmt.namespace_digest(OTHER_CONTEXT).hex()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "TICK_S", 0.01)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Twenty blocks of one namespace and seven of another, and three regions opened ahead."""
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        await disk.store(*range(20))
        await disk.come_to_rest()
    async with open_disk(path, OTHER_CONTEXT) as disk:
        await disk.store(*range(7))
        await disk.come_to_rest()
    return path


class Shell:
    """Runs commands and reads their figures."""

    def __init__(self, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._report = report
        self._capsys = capsys
        self.out = ""

    def __call__(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        given = [*map(str, arguments), "--json", str(self._report)]
        assert main(given) == status
        self.out = self._capsys.readouterr().out
        figures: dict[str, Any] = json.loads(self._report.read_text())
        return figures

    def refused(self, *arguments: object) -> str:
        """Return what is said; nothing may have been done."""
        assert main([*map(str, arguments)]) == BAD_INPUT
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err


@pytest.fixture
def kvtier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "report.json", capsys)


def damage(path: Path) -> None:
    """Flip a bit of one block."""
    with Folder(str(path)) as folder:
        report = folder.inspect(0)
    assert report.geometry is not None
    with (path / "segment-00000.kv").open("r+b") as file:
        file.seek(report.geometry.slot_at(2) + 77)
        file.write(b"\xff")


# --- ls ---


async def test_ls_shows_namespaces_blocks_bytes_and_ages(folder: Path, kvtier: Shell) -> None:
    figures = kvtier("ls", folder)
    rows = {row["namespace"]: row for row in figures["namespaces"]}
    assert {name: row["blocks"] for name, row in rows.items()} == {OWN: 20, OTHER: 7}
    assert rows[OWN]["bytes"] == 20 * BLOCK_BYTES
    assert rows[OWN]["key_id"] is None
    assert rows[OWN]["oldest_s"] <= rows[OWN]["newest_s"]
    assert (figures["blocks"], figures["in_use"], figures["engine_pid"]) == (27, False, None)
    assert figures["regions"]["region_sound"] == 3 + 3
    for text in (str(folder), OWN[:12], OTHER[:12], "8,192"):
        assert text in kvtier.out


async def test_ls_says_why_two_engines_do_not_share(folder: Path, kvtier: Shell) -> None:
    figures = kvtier("ls", folder)
    facts = {row["namespace"]: row["facts"] for row in figures["namespaces"]}
    assert facts == {OWN: CONTEXT.namespace.facts, OTHER: OTHER_CONTEXT.namespace.facts}
    shown = kvtier.out.partition("What separates them")[2].partition("Figures")[0].split()
    assert [word for word in shown if word[0].isalnum() or word[0] == "("] == [
        *("fact", "namespace", "value"),
        *("dtype", OWN[:12], "bf16", OTHER[:12], "(missing)"),
        *("model_name", OWN[:12], "org/m", OTHER[:12], "org/other"),
    ]


async def test_ls_of_an_open_folder_names_the_engine(folder: Path, kvtier: Shell) -> None:
    async with open_disk(folder) as disk:
        await disk.store(100)
        figures = kvtier("ls", folder)
        assert (figures["in_use"], figures["engine_pid"]) == (True, os.getpid())
        assert f"by process {os.getpid()}" in kvtier.out
        assert figures["blocks"] == 28


async def test_json_on_stdout_is_all_of_stdout(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ls"], ["fsck"], ["purge", "--all", "--dry-run"]):
        assert main([*command, str(folder), "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["path"] == str(folder)


# --- fsck ---


async def test_json_follows_links_and_replaces_nothing_that_is_no_file(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.json").symlink_to("real.json")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    terminal, device = os.openpty()  # whatever goes wrong, nobody needs this one
    for place in ("link.json", "pipe", os.ttyname(device)):
        assert main(["ls", str(folder), "--json", str(tmp_path / place)]) == 0
    assert json.loads(os.read(reader, 1 << 16)) == json.loads((tmp_path / "real.json").read_text())
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert Path(os.ttyname(device)).is_char_device()
    for each in (reader, terminal, device):
        os.close(each)


async def test_fsck_of_a_sound_folder_is_0(folder: Path, kvtier: Shell) -> None:
    figures = kvtier("fsck", folder)
    assert (figures["sound"], figures["blocks_sound"], figures["problems"]) == (True, 27, [])
    assert "Sound." in kvtier.out


async def test_fsck_finds_repairs_and_then_finds_nothing(folder: Path, kvtier: Shell) -> None:
    damage(folder)
    before = (folder / "segment-00000.kv").read_bytes()
    figures = kvtier("fsck", folder, status=1)
    (problem,) = figures["problems"]
    assert problem == {"case": "blocks_damaged", "region": 0, "count": 1, "what": "in slots 2"}
    assert "Problems: 1. Nothing was changed" in kvtier.out
    assert (folder / "segment-00000.kv").read_bytes() == before
    figures = kvtier("fsck", folder, "--repair", status=1)
    assert (figures["repaired"], figures["sound"]) == (1, False)
    assert "1 repaired, 0 left" in kvtier.out
    assert (figures["in_use"], figures["engine_pid"]) == (False, None), "nobody but itself"
    assert kvtier("fsck", folder)["blocks_sound"] == 26


async def test_fsck_repairs_a_file_that_ends_within_a_table(tmp_path: Path, kvtier: Shell) -> None:
    """Encrypted, and without the key: nothing can be said of the blocks."""
    keys = tmp_path / "keys"
    keys.write_text("11" * 32)
    keys.chmod(0o600)
    path = tmp_path / "kv"
    async with open_disk(path, encryption_key_file=str(keys)) as disk:
        await disk.store(*range(3))
        cut_at = disk.backend._plan.geometry.slots_at - fmt.PAGE_BYTES
    os.truncate(path / "segment-00000.kv", cut_at)
    assert kvtier("fsck", path, "--repair", status=1)["repaired"] == 1
    assert kvtier("fsck", path)["problems"] == []


async def test_fsck_under_an_engine_reads_and_does_not_repair(folder: Path, kvtier: Shell) -> None:
    async with open_disk(folder) as disk:
        assert kvtier("fsck", folder)["in_use"]
        said = kvtier.refused("fsck", folder, "--repair")
        assert f"in use by process {os.getpid()}" in said
        assert "Stop that engine" in said
        assert await disk.store(50) == [Outcome.DONE]


async def test_fsck_says_what_it_cannot_verify_without_a_key(tmp_path: Path, kvtier: Shell) -> None:
    keys = tmp_path / "keys"
    keys.write_text("11" * 32)
    keys.chmod(0o600)
    async with open_disk(tmp_path / "kv", encryption_key_file=str(keys)) as disk:
        await disk.store(*range(10))
    assert kvtier("fsck", tmp_path / "kv")["blocks_unverified"] == 10
    assert "10 encrypted blocks were not verified: give their keys" in kvtier.out
    figures = kvtier("fsck", tmp_path / "kv", "--encryption-key-file", keys)
    assert (figures["blocks_sound"], figures["blocks_unverified"]) == (10, 0)
    keys.chmod(0o644)
    given = ("--encryption-key-file", keys)
    assert "chmod 600" in kvtier.refused("fsck", tmp_path / "kv", *given)
    given = ("--encryption-key-file", tmp_path / "absent")
    assert "No such file" in kvtier.refused("fsck", tmp_path / "kv", *given)


async def test_fsck_of_a_folder_without_its_superblock(folder: Path, kvtier: Shell) -> None:
    (folder / "superblock").unlink()
    assert "is damaged or gone" in kvtier.refused("ls", folder)
    assert "is damaged or gone" in kvtier.refused("purge", folder, "--all")
    (problem,) = kvtier("fsck", folder, status=1)["problems"]
    assert problem["case"] == "folder_damaged"
    assert kvtier("fsck", folder, "--repair", status=1)["repaired"] == 1
    assert [file.name for file in folder.iterdir()] == ["lock"]


# --- purge ---


async def test_purge_by_namespace_takes_a_prefix(folder: Path, kvtier: Shell) -> None:
    digits = next(n for n in range(1, 33) if OTHER[:n] != OWN[:n])
    given = ("purge", folder, "--namespace", OTHER[:digits].upper())
    figures = kvtier(*given, "--dry-run")
    assert (figures["blocks"], figures["dry_run"]) == (7, True)
    assert "would be removed: 7 blocks" in kvtier.out
    assert kvtier("ls", folder)["blocks"] == 27
    figures = kvtier(*given)
    assert figures["namespaces"][0]["namespace"] == OTHER
    assert (figures["bytes"], figures["removed_by"]) == (7 * BLOCK_BYTES, None)
    assert "removed: 7 blocks" in kvtier.out
    assert [row["namespace"] for row in kvtier("ls", folder)["namespaces"]] == [OWN]
    said = kvtier.refused(*given)
    assert "names none of the namespaces there" in said
    assert OWN in said


async def test_purge_by_age_and_of_all(tmp_path: Path, kvtier: Shell) -> None:
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        disk.clock.now_s = disk.clock() - 3 * 3600
        await disk.store(*range(5))
        disk.clock.now_s = None
        await disk.store(*range(5, 20))
    assert kvtier("purge", path, "--older-than", "1d")["blocks"] == 0
    assert kvtier("purge", path, "--older-than", "4h", "--namespace", OWN)["blocks"] == 0
    assert kvtier("purge", path, "--older-than", "179m")["blocks"] == 5
    assert kvtier("purge", path, "--all")["blocks"] == 15
    assert kvtier("ls", path)["blocks"] == 0


async def test_purge_takes_what_a_clock_that_ran_ahead_has_stored(
    tmp_path: Path, kvtier: Shell
) -> None:
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        disk.clock.now_s = disk.clock() + 7200
        await disk.store(*range(5))
    assert kvtier("purge", path, "--all")["blocks"] == 5
    assert kvtier("ls", path)["blocks"] == 0


async def test_purge_of_an_open_folder_is_done_by_its_engine(folder: Path, kvtier: Shell) -> None:
    async with open_disk(folder) as disk:
        await disk.store(*range(100, 105))
        figures = await asyncio.to_thread(kvtier, "purge", folder, "--all")
        assert (figures["blocks"], figures["removed_by"]) == (32, f"process {os.getpid()}")
        assert len(disk.lost) == 25
        assert await disk.load(1) == [Outcome.ABSENT]
        assert kvtier("ls", folder)["blocks"] == 0


async def test_purge_says_if_the_engine_does_not_answer(
    folder: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge_requests, "ACCEPTED_WITHIN_S_MAX", 0.0)
    monkeypatch.setattr(backend_module, "TICK_S", 1000.0)
    async with open_disk(folder):
        figures = kvtier("purge", folder, "--all", status=1)
        assert "did not accept the request" in figures["error"]
        assert "stop it, and run this again" in kvtier.out


# --- what all refuse ---


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["purge"], "nothing is selected. Give --older-than, --namespace, --dead or --all"),
        (["purge", "--all", "--older-than", "1d"], "--all excludes --older-than"),
        (["purge", "--older-than", "1w"], "'1w' is no age"),
        (["purge", "--older-than", ""], "'' is no age"),
        (["purge", "--older-than", "1d", "--namespace", ""], "--namespace '' is no digest"),
        (["purge", "--all", "--namespace", ""], "--all excludes"),
        (["purge", "--namespace", "zz"], "names none of the namespaces there"),
        (["ls", "--json", "absent/report.json"], "there is no folder"),
    ],
)
async def test_options_that_make_no_sense_are_refused(
    folder: Path, kvtier: Shell, arguments: list[str], what: str
) -> None:
    name, *options = arguments
    assert what in kvtier.refused(name, folder, *options)
    assert kvtier("ls", folder)["blocks"] == 27


@pytest.mark.parametrize("command", [["ls"], ["fsck"], ["fsck", "--repair"], ["purge", "--all"]])
async def test_a_folder_that_is_none_is_named(
    command: list[str], tmp_path: Path, kvtier: Shell
) -> None:
    name, *options = command
    said = kvtier.refused(name, tmp_path, *options)
    assert f"{tmp_path} is not recognized as the storage of a tier" in said
    assert {"disk", "fs", "redis", "s3"} <= offline_classes().keys()
    assert f"Types that can be listed: {', '.join(offline_classes())}." in said
    absent = tmp_path / "absent"
    assert f"{absent} does not exist" in kvtier.refused(name, absent, *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["ls"], ["fsck"], ["fsck", "--repair"], ["purge", "--all"]])
async def test_another_ones_folder_is_refused_and_named(
    command: list[str], folder: Path, kvtier: Shell
) -> None:
    folder.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        said = kvtier.refused(command[0], folder, *command[1:])
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
    assert f"{folder}: Permission denied. Run this as the user that the engine runs as." in said


@pytest.mark.parametrize("command", [["ls"], ["fsck"], ["purge", "--all"]])
async def test_ctrl_c_reports_what_was_done_so_far(
    command: list[str], folder: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.inspect

    def interrupted(self: Folder, number: int) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(Folder, "inspect", interrupted)
    name, *options = command
    assert not kvtier(name, folder, *options, status=INTERRUPTED)["complete"]
    assert "Interrupted" in kvtier.out
    monkeypatch.undo()
    assert kvtier("fsck", folder)["sound"]


def test_the_command_starts_without_reading_the_backends() -> None:
    """``kvtier --help`` and the other commands are not to pay for these."""
    program = (
        "import sys\n"
        "from kvtier.tools.cli.main import main\n"
        "main(['ls', '--help'])\n"
        "heavy = ('kvtier_backends', 'numpy', 'vllm')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"
