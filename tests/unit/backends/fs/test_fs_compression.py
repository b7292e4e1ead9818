"""Compressed block files are of several sizes: what looks at sizes goes on being right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs.offline.checking import check_folder
from kvtier_backends.fs.offline.inspection import BlockFile, FsFolder
from tests.unit.backends.fs._fs import FILE_BYTES, Fs, key_of, open_fs
from tests.unit.backends.shared._keys import OLD, key_file

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier_backends.fs.offline.checking import Checked

pytestmark = pytest.mark.anyio
ON = {"compression": "bitplane-zstd"}
PAGE = 4096


async def three_blocks(fs: Fs) -> None:
    for number in range(3):
        assert await fs.store(number) is Outcome.DONE


def checked(root: Path, *, repair: bool = False) -> Checked:
    with FsFolder(str(root)) as folder:
        return check_folder(folder, lambda: None, repair=repair)


async def test_files_are_smaller_are_counted_and_come_back_after_a_restart(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv", **ON) as fs:
        await three_blocks(fs)
        sizes = [fs.path(number).stat().st_size for number in range(3)]
        assert max(sizes) < FILE_BYTES
        assert fs.count("compression_bytes_in") == 3 * (FILE_BYTES - PAGE)
        assert fs.count("compression_bytes_out") == sum(sizes) - 3 * PAGE
    async with open_fs(tmp_path / "kv", **ON) as fs:
        for number in range(3):
            assert await fs.probe(number)
            assert await fs.store(number) is Outcome.DONE  # it is known to be there
            assert await fs.load(number) is Outcome.DONE
        assert fs.backend.counters() == {}


@pytest.mark.parametrize("size", [0, 100, PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE - 1, 5 * PAGE])
async def test_a_file_of_another_size_is_a_miss(size: int, tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv", **ON) as fs:
        await three_blocks(fs)
        whole = fs.path(1).read_bytes()
        assert len(whole) == 4 * PAGE
        fs.path(1).write_bytes(whole[:size].ljust(size, b"\0"))
        assert await fs.load(1) is Outcome.DAMAGED
        await fs.backend.remove([key_of(1)])  # as the tier does, which hears of it
        assert await fs.store(1) is Outcome.DONE
        assert await fs.load(1) is Outcome.DONE


async def test_engines_with_and_without_compression_use_folders_of_their_own(
    tmp_path: Path,
) -> None:
    async with open_fs(tmp_path / "kv", **ON) as fs, open_fs(tmp_path / "kv") as other:
        await fs.store(1)
        assert await other.load(1) is Outcome.ABSENT
        await other.store(1)
        assert other.path(1).stat().st_size == FILE_BYTES
        assert await fs.load(1) is await other.load(1) is Outcome.DONE


@pytest.mark.parametrize("key", [None, "auth_key_file", "encryption_key_file"])
async def test_fsck_and_ls_know_compressed_files(key: str | None, tmp_path: Path) -> None:
    keys = {} if key is None else {key: key_file(tmp_path / "keys", OLD)}
    async with open_fs(tmp_path / "kv", **ON, **keys) as fs:
        await three_blocks(fs)
        files = [fs.path(number) for number in range(3)]
    with FsFolder(str(tmp_path / "kv")) as folder:
        blocks = [each for each in folder.files() if isinstance(each, BlockFile)]
    assert sum(block.size for block in blocks) == sum(path.stat().st_size for path in files)
    found = checked(tmp_path / "kv")
    assert (found.blocks, found.unverified) == ((0, 3) if key == "encryption_key_file" else (3, 0))
    assert not found.problems


async def test_fsck_finds_compressed_files_that_are_unsound(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv", **ON) as fs:
        await three_blocks(fs)
        for number, at in ((0, 5), (1, 2 * PAGE + 9)):  # in either plane
            raw = bytearray(fs.path(number).read_bytes())
            raw[at] ^= 1
            fs.path(number).write_bytes(raw)
        fs.path(2).write_bytes(fs.path(2).read_bytes()[PAGE:])
    assert checked(tmp_path / "kv", repair=True).repaired == 3
    assert checked(tmp_path / "kv").blocks == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [({"layout": "vllm"}, "layout"), ({"allow_unchecksummed": True}, "allow_unchecksummed")],
)
async def test_options_with_no_place_for_compressed_blocks_are_refused(
    options: dict[str, str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{named}=.*compress"):
        async with open_fs(tmp_path / "kv", **ON, **options):
            pass
