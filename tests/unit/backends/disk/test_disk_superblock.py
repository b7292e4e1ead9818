"""A running engine keeps its folder's superblock: by it the folder is known."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.folder.claim import read_superblock
from kvtier_backends.disk.format import PAGE_BYTES
from tests.support.needs import needs
from tests.unit.backends._media import mount, unmount
from tests.unit.backends.disk._disk import open_disk, two_filesystems

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio


def delete(superblock: Path) -> None:
    superblock.unlink()


def cut(superblock: Path) -> None:
    os.truncate(superblock, PAGE_BYTES // 2)


def flip_a_byte_of_the_first_copy(superblock: Path) -> None:
    raw = bytearray(superblock.read_bytes())
    raw[8] ^= 1
    superblock.write_bytes(raw)


def append(superblock: Path) -> None:
    superblock.write_bytes(superblock.read_bytes() + b"more")


def put_another_ones_there(superblock: Path) -> None:
    raw = bytearray(superblock.read_bytes())
    raw[:PAGE_BYTES] = bytes(PAGE_BYTES)
    raw[PAGE_BYTES:] = bytes(PAGE_BYTES)
    superblock.with_name("else").write_bytes(raw)
    superblock.with_name("else").replace(superblock)


HARMS = [delete, cut, flip_a_byte_of_the_first_copy, append, put_another_ones_there]


@pytest.mark.parametrize("harm", HARMS)
async def test_a_superblock_that_is_harmed_is_written_again(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    """Without it, the next engine would find nothing of what the folder holds."""
    superblock = tmp_path / "kv" / "superblock"
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(20))
        await disk.backend.tick()
        before = superblock.read_bytes()
        assert disk.count("superblock_restored") == 0
        harm(superblock)
        await disk.backend.tick()
        assert superblock.read_bytes() == before
        await disk.backend.tick()
        assert disk.count("superblock_restored") == 1
        assert await disk.load(1) == [Outcome.DONE]
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.found(range(20)) == list(range(20))


async def test_another_folder_in_its_place_is_given_no_superblock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have come there after the lock was looked at."""
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1)
        await disk.backend.tick()
        (tmp_path / "kv").rename(tmp_path / "away")
        (tmp_path / "kv").mkdir()
        (tmp_path / "kv" / "lock").touch()
        monkeypatch.setattr(type(disk.backend._claim), "stands", lambda _claim: True)
        await disk.backend.tick()
        assert [each.name for each in (tmp_path / "kv").iterdir()] == ["lock"]
        assert disk.count("superblock_restored") == 0


async def test_what_is_no_file_is_left_in_the_place_of_a_superblock(tmp_path: Path) -> None:
    superblock = tmp_path / "kv" / "superblock"
    async with open_disk(tmp_path / "kv") as disk:
        await disk.backend.tick()
        superblock.unlink()
        superblock.mkdir()
        await disk.backend.tick()
        assert superblock.is_dir()
        assert disk.count("upkeep_failed") == 0
        superblock.rmdir()
        await disk.backend.tick()
        assert superblock.is_file()


@needs("mount")
async def test_a_folder_that_lost_its_superblock_is_used_again_after_a_remount(
    tmp_path: Path,
) -> None:
    """``python -m stress --layer filesystem --seed 71``: the tier stayed away for good.

    Under another device number the folder is known by its superblock alone, and that had been
    harmed a second before.
    """
    with two_filesystems(tmp_path) as (place, second):
        async with open_disk(place / "kv") as disk:
            await disk.store(1)
            folder_id = read_superblock(str(place / "kv")).folder_id
            delete(place / "kv" / "superblock")
            await disk.backend.tick()
            shutil.copytree(place / "kv", second / "kv")
            unmount(place)
            for _ in range(2):
                await disk.backend.tick()
            mount("--bind", second, place)
            await disk.backend.tick()
            assert disk.count("folder_came_back") == 1
            assert await disk.store(2) == [Outcome.DONE]
            assert read_superblock(str(place / "kv")).folder_id == folder_id
