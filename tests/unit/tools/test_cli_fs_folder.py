"""``kvtier ls``, ``fsck``, ``purge`` and ``evict`` on the folder of an ``fs`` tier."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core.generations import Generations, mark_of_name, marked
from kvtier.plugin_api.backend import Namespace, Outcome
from kvtier.tools.cli import evict as evict_command
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.main import main
from tests.unit.backends.disk._disk import open_disk
from tests.unit.backends.fs._fs import CONTEXT, FILE_BYTES, key_of, open_fs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
BLOCKS = 20


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Twenty blocks, the first ones stored longest ago."""
    path = tmp_path / "kv"
    async with open_fs(path) as fs:
        for number in range(BLOCKS):
            await fs.store(number)
            os.utime(fs.path(number), (1e9 + 100 * number, 1e9 + 100 * number))
    return path


class Shell:
    """Runs commands and reads their figures."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        assert main([*map(str, arguments), "--json", "-"]) == status
        figures: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return figures

    def shown(self, *arguments: object, status: int = 0) -> str:
        assert main([*map(str, arguments)]) == status
        return self._capsys.readouterr().out

    def refused(self, *arguments: object) -> str:
        assert main([*map(str, arguments)]) == BAD_INPUT
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


async def present(folder: Path) -> list[int]:
    async with open_fs(folder) as fs:
        return [number for number in range(BLOCKS) if await fs.load(number) is Outcome.DONE]


def damage(folder: Path, number: int) -> Path:
    (path,) = folder.rglob(f"{key_of(number).hex()}.kv")
    with path.open("r+b") as file:
        file.seek(77)
        file.write(b"\xff")
    return path


# --- ls ---


async def test_ls_shows_namespaces_blocks_bytes_and_the_bound(folder: Path, kvtier: Shell) -> None:
    figures = kvtier("ls", folder)
    (row,) = figures["namespaces"]
    assert (row["blocks"], row["bytes"]) == (BLOCKS, BLOCKS * FILE_BYTES)
    assert (row["oldest_s"], row["newest_s"]) == (10**9, 10**9 + 100 * (BLOCKS - 1))
    assert figures["capacity_bytes"] is None
    async with open_fs(folder, capacity_bytes=100 * FILE_BYTES) as fs:
        while await fs.store(100) is not Outcome.DONE:
            pass
        figures = kvtier("ls", folder)
        assert figures["capacity_bytes"] == 100 * FILE_BYTES
        assert str(os.getpid()) in figures["cleaner"]
        assert row["namespace"] in kvtier.shown("ls", folder)


async def test_ls_says_why_two_engines_do_not_share(folder: Path, kvtier: Shell) -> None:
    alone = kvtier.shown("ls", folder).partition("What separates them")[2]
    assert ("org/m" in alone, "dtype" in alone) == (True, False)
    other = Namespace({"model_name": "org/m", "dtype": "bf16", "rope": {"rope_theta": 5.0}})
    async with open_fs(folder, replace(CONTEXT, namespace=other)) as fs:
        await fs.store(1)
    figures = kvtier("ls", folder)
    assert [row["facts"] for row in figures["namespaces"]] == [CONTEXT.namespace.facts, other.facts]
    shown = kvtier.shown("ls", folder).partition("What separates them")[2]
    assert "rope.rope_theta" in shown
    assert "dtype" not in shown


# --- fsck ---


async def test_fsck_finds_and_repairs_a_damaged_block(folder: Path, kvtier: Shell) -> None:
    assert kvtier("fsck", folder)["blocks_sound"] == BLOCKS
    path = damage(folder, 3)
    figures = kvtier("fsck", folder, status=1)
    assert figures["cases"] == {"blocks_damaged": 1}
    assert path.name in figures["problems"][0]["file"]
    assert path.exists(), "nothing is changed without --repair"
    assert "--repair" in kvtier.shown("fsck", folder, status=1)
    assert kvtier("fsck", folder, "--repair", status=1)["repaired"] == 1
    assert not path.exists()
    assert kvtier("fsck", folder)["sound"]


async def test_fsck_takes_a_torn_block_for_damaged(folder: Path, kvtier: Shell) -> None:
    os.truncate(damage(folder, 3), 100)
    assert kvtier("fsck", folder, status=1)["cases"] == {"blocks_damaged": 1}


@pytest.mark.parametrize(("kind", "judged"), [("auth_key_env", BLOCKS), ("encryption_key_env", 0)])
async def test_fsck_needs_no_key_and_takes_no_protected_block_for_damaged(
    kind: str, judged: int, tmp_path: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--repair`` it would remove all of them."""
    monkeypatch.setenv("KEYS", "5a" * 32)
    path = tmp_path / "kv"
    async with open_fs(path, **{kind: "KEYS"}) as fs:
        for number in range(BLOCKS):
            await fs.store(number)
    figures = kvtier("fsck", path, "--repair")
    assert (figures["blocks_sound"], figures["blocks_unverified"]) == (judged, BLOCKS - judged)
    (torn,) = path.rglob(f"{key_of(3).hex()}.kv")
    torn.write_bytes(torn.read_bytes()[:-8] + b"\xff" * 8)
    assert kvtier("fsck", path, status=1)["cases"] == {"blocks_damaged": 1}


async def test_fsck_counts_blocks_that_vllm_wrote_and_does_not_judge_them(
    tmp_path: Path, kvtier: Shell
) -> None:
    async with open_fs(tmp_path / "kv", layout="vllm") as fs:
        await fs.store(1)
        fs.path(2).parent.mkdir(parents=True)
        fs.path(2).write_bytes(bytes(16384))
        figures = kvtier("fsck", tmp_path / "kv")
    assert (figures["blocks_sound"], figures["blocks_unverified"]) == (1, 1)


async def test_fsck_refuses_keys_for_an_fs_folder(folder: Path, kvtier: Shell) -> None:
    assert "Leave it out" in kvtier.refused("fsck", folder, "--encryption-key-file", "k")


# --- purge ---


async def test_purge_removes_by_age_by_namespace_or_all(folder: Path, kvtier: Shell) -> None:
    os.utime(next(folder.rglob(f"{key_of(5).hex()}.kv")))
    assert kvtier("purge", folder, "--older-than", "1d", "--dry-run")["blocks"] == BLOCKS - 1
    assert await present(folder) == list(range(BLOCKS))
    assert kvtier("purge", folder, "--older-than", "1d")["blocks"] == BLOCKS - 1
    assert await present(folder) == [5]
    assert "names none" in kvtier.refused("purge", folder, "--namespace", "zz")
    namespace = kvtier("ls", folder)["namespaces"][0]["namespace"]
    assert kvtier("purge", folder, "--namespace", namespace[-12:-4])["blocks"] == 1
    assert kvtier("purge", folder, "--all", "--yes")["blocks"] == 0


async def test_blocks_of_weights_without_a_name_are_shown_and_purged_by_themselves(
    folder: Path, kvtier: Shell
) -> None:
    """A named generation, and the weights of the model's files, stay."""
    assert "dead" not in kvtier.shown("ls", folder)
    (alive,) = folder.rglob(f"{key_of(1).hex()}.kv")
    dead = Generations().begin(None)
    assert dead is not None
    for mark in (dead, mark_of_name("step 1")):
        (key,) = marked((key_of(1),), mark)
        alive.with_name(f"{key.hex()}.kv").write_bytes(alive.read_bytes())
    os.utime(alive.with_name(f"{marked((key_of(1),), dead)[0].hex()}.kv"), (1e9, 1e9))
    (row,) = kvtier("ls", folder)["namespaces"]
    assert (row["blocks"], row["dead_blocks"], row["dead_bytes"]) == (BLOCKS + 2, 1, FILE_BYTES)
    assert "dead" in kvtier.shown("ls", folder)
    assert kvtier("purge", folder, "--dead", "--older-than", "300000d")["blocks"] == 0
    assert kvtier("purge", folder, "--dead", "--older-than", "7d")["blocks"] == 1
    assert kvtier("purge", folder, "--dead")["blocks"] == 0
    assert kvtier("ls", folder)["blocks"] == BLOCKS + 1


# --- evict ---


@pytest.mark.parametrize("ahead_h", [6, -6])
async def test_purge_takes_the_age_of_blocks_by_the_servers_clock(
    folder: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch, ahead_h: int
) -> None:
    """Blocks may be the server's or other hosts', and this host's clock hours off."""
    real = time.time
    for number, age_h in ((4, 25), (5, 23)):
        stored_s = real() - 3600 * age_h
        os.utime(next(folder.rglob(f"{key_of(number).hex()}.kv")), (stored_s, stored_s))
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * ahead_h)
    assert kvtier("purge", folder, "--older-than", "1d", "--dry-run")["blocks"] == BLOCKS - 1
    assert kvtier("purge", folder, "--older-than", "1d")["blocks"] == BLOCKS - 1
    assert await present(folder) == [5]


async def test_evict_removes_what_was_used_least_recently(folder: Path, kvtier: Shell) -> None:
    figures = kvtier("evict", folder, "--capacity", str(8 * FILE_BYTES))
    assert figures["blocks_removed"] == BLOCKS - 8
    assert figures["bytes_left"] == 8 * FILE_BYTES
    assert await present(folder) == list(range(BLOCKS - 8, BLOCKS))
    assert kvtier("evict", folder, "--capacity", "1GiB", "--once")["blocks_removed"] == 0


async def test_evict_bounds_a_folder_that_vllm_fills(tmp_path: Path, kvtier: Shell) -> None:
    async with open_fs(tmp_path / "kv", layout="vllm") as fs:
        await fs.store(1)
        for number in range(2, 10):
            fs.path(number).parent.mkdir(parents=True, exist_ok=True)
            fs.path(number).write_bytes(bytes(16384))
        figures = kvtier("evict", tmp_path / "kv", "--capacity", str(4 * 16384))
    assert figures["blocks"] == 9
    assert figures["bytes_left"] <= 4 * 16384


async def test_evict_says_when_the_folder_holds_too_much_still(folder: Path, kvtier: Shell) -> None:
    (namespace,) = folder.iterdir()
    (namespace / "abc").mkdir(exist_ok=True)
    (namespace / "abc" / "unfinished.tmp").write_bytes(bytes(10_000))
    figures = kvtier("evict", folder, "--capacity", "4KiB", status=1)
    assert (figures["other_bytes"], figures["bytes_left"]) == (10_000, 10_000)
    assert "no blocks" in kvtier.shown("evict", folder, "--capacity", "4KiB", status=1)


async def test_engines_hear_of_what_evict_removes(folder: Path, kvtier: Shell) -> None:
    lost: list[bytes] = []
    async with open_fs(folder, capacity_bytes=100 * FILE_BYTES) as fs:
        fs.backend.on_lost = lost.extend
        while await fs.store(100) is not Outcome.DONE:
            pass
        reader = fs.backend._folder_bound._removals
        while reader._seen is None:
            await fs.load(100)
        kvtier("evict", folder, "--capacity", "1")
        while key_of(100) not in lost:
            await fs.probe(100)


async def test_evict_goes_on_every_so_often_until_it_is_interrupted(
    folder: Path, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = iter((False, True))
    monkeypatch.setattr(evict_command, "_was_interrupted", lambda _seconds: next(rounds))
    given = ("evict", folder, "--capacity", str(8 * FILE_BYTES), "--every", "60", "--json", "-")
    lines = kvtier.shown(*given, status=INTERRUPTED).splitlines()
    assert [json.loads(line)["blocks_removed"] for line in lines] == [BLOCKS - 8, 0]


async def test_evict_refuses_storage_that_bounds_itself(tmp_path: Path, kvtier: Shell) -> None:
    async with open_disk(tmp_path / "disk"):
        said = kvtier.refused("evict", tmp_path / "disk", "--capacity", "1GB")
    assert "it bounds itself" in said


async def test_evict_refuses_sizes_and_pauses_that_are_none(folder: Path, kvtier: Shell) -> None:
    assert "--capacity='much'" in kvtier.refused("evict", folder, "--capacity", "much")
    every = ("--capacity", "1GB", "--every", "0")
    assert "above 0" in kvtier.refused("evict", folder, *every)
