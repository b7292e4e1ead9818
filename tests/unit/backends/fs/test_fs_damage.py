"""Files that are not what they should be: never served, and deleted only if they are ours."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import LoadBlock, Outcome
from tests.support.fuse_folder import FuseFolder, fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.unit.backends.fs._fs import (
    BLOCK_BYTES,
    CONTEXT,
    data_of,
    key_of,
    open_fs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@contextmanager
def hanging_reads(parent: Path, block: Path) -> Iterator[FuseFolder]:
    """Have the block, and all in its folder, read through a filesystem that hangs for now."""
    source = parent / "source"
    shutil.move(block.parent, source)
    block.parent.mkdir(mode=0o700)
    folder = FuseFolder(source, block.parent)
    try:
        folder.wait_until_mounted()
        folder.hang("read")
        yield folder
    finally:
        folder.vanish()


async def test_a_torn_file_is_written_anew_by_a_store(tmp_path: Path) -> None:
    """Else a block that nobody may load would stand in the way of its own repair."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        os.truncate(fs.path(1), 4096)
        assert await fs.store(1) is Outcome.DONE
        assert await fs.load(1) is Outcome.DONE


@needs("fuse")
async def test_a_damaged_file_that_cannot_be_removed_is_damaged_and_counted(tmp_path: Path) -> None:
    with fuse_folder(tmp_path) as folder:
        async with open_fs(folder.path / "kv") as fs:
            await fs.store(1)
            os.truncate(fs.path(1), 10)
            folder.fail("unlink", error=errno.EROFS)
            assert await fs.load(1) is Outcome.DAMAGED
            assert fs.count("removes_failed") == 1


async def test_a_file_without_a_trailer_is_a_miss_that_stays(tmp_path: Path) -> None:
    """It may be vLLM's and sound, so it is not ours to delete, nor to serve."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        os.truncate(fs.path(1), BLOCK_BYTES)
        assert not await fs.probe(1)
        assert await fs.load(1) is Outcome.ABSENT
        assert fs.path(1).exists()
        assert fs.count("loads_unchecked_refused") == 1


async def test_a_file_without_a_trailer_is_served_if_accepted(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv", allow_unchecksummed=True) as fs:
        await fs.store(1)
        os.truncate(fs.path(1), BLOCK_BYTES)
        assert await fs.probe(1)
        view = fs.view()
        (loaded,) = await fs.backend.load([LoadBlock(key_of(1), view)])
        assert loaded == (Outcome.DONE, None)
        assert view == data_of(1)
        assert fs.backend.traits.accepts_unchecked


async def test_a_file_in_a_folders_place_fails_stores_only(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        fs.path(1).parent.parent.write_bytes(b"")
        assert await fs.store(1) is Outcome.FAILED
        assert await fs.load(1) is Outcome.ABSENT
        assert not await fs.probe(1)


@needs("fuse")
async def test_a_hung_load_hangs_its_thread_only(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv", n_read_threads=2) as fs:
        await fs.store(1)
        await fs.store(2)
        with hanging_reads(tmp_path, fs.path(1)) as folder:
            async with anyio.create_task_group() as group:
                group.start_soon(fs.load, 1)
                await anyio.lowlevel.checkpoint()
                folder.wait_until_something_hangs()
                with anyio.fail_after(PATIENCE_S):
                    assert await fs.probe(1)
                    assert await fs.load(2) is Outcome.DONE
                    assert await fs.store(3) is Outcome.DONE
                    assert await fs.load(3) is Outcome.DONE
                    assert await fs.store(1) is Outcome.DONE
                group.cancel_scope.cancel()
            assert fs.backend.busy_threads() == 1, "cancelled; the buffer may still be written"
            folder.heal()
            with anyio.fail_after(PATIENCE_S):
                while fs.backend.busy_threads():
                    await anyio.lowlevel.checkpoint()
            assert await fs.load(1) is Outcome.DONE


@needs("fuse")
async def test_closing_while_a_load_hangs_does_not_wait(tmp_path: Path) -> None:
    context = replace(CONTEXT, tier_name="7:closing")
    async with open_fs(tmp_path / "kv", context, n_read_threads=1) as fs:
        await fs.store(1)
        with hanging_reads(tmp_path, fs.path(1)) as folder:
            async with anyio.create_task_group() as group:
                group.start_soon(fs.load, 1)
                await anyio.lowlevel.checkpoint()
                folder.wait_until_something_hangs()
                group.cancel_scope.cancel()
            with anyio.fail_after(PATIENCE_S):
                await fs.backend.close()
            hung = [thread for thread in threading.enumerate() if thread.name == "7:closing-read-0"]
            assert len(hung) == 1
            folder.heal()
            hung[0].join(PATIENCE_S)
            assert not hung[0].is_alive()


async def test_each_trouble_is_said_once_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sick disk fails a thousand blocks a second; the log must not."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(9)

        async def damage(count: int) -> None:
            for number in range(count):
                await fs.store(number)
                os.truncate(fs.path(number), 10)
                assert await fs.load(number) is Outcome.DAMAGED

        with capture_logs() as logs:
            await damage(5)
            assert len(logs) == 1
            assert await fs.load(9) is Outcome.DONE
            await damage(5)
            assert len(logs) == 1, "a success in between, but too soon to call it over"
            monkeypatch.setattr("kvtier_backends.incidents.EPISODE_S_MIN", 0.0)
            assert await fs.load(9) is Outcome.DONE
            await damage(5)
        assert {entry["kind"] for entry in logs} == {"blocks_damaged"}
        assert [entry["log_level"] for entry in logs] == ["warning", "info", "warning"]
        assert fs.count("blocks_damaged") == 15
        assert fs.count("blocks_discarded") == 15


async def test_odd_memory_is_moved_without_o_direct(tmp_path: Path) -> None:
    """A slot off the page grid cannot go by O_DIRECT everywhere; the block still must."""
    async with open_fs(tmp_path / "kv") as fs:
        odd = memoryview(bytearray(BLOCK_BYTES + 1))[1:]
        fs.view = lambda: odd  # type: ignore[method-assign]
        assert await fs.store(1) is Outcome.DONE
        assert await fs.load(1) is Outcome.DONE
