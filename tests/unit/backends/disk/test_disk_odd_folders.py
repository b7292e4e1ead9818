"""A folder whose medium does not answer, that was mounted anew, or that holds what is no file."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.device import FileDevice
from kvtier_backends.disk.folder import claim, recovery
from kvtier_backends.disk.folder.claim import read_superblock
from kvtier_backends.disk.format import PAGE_BYTES, decode_header_untrusted, encode_header
from kvtier_backends.disk.offline.inspection import Folder, user_of
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until_true
from tests.unit.backends._media import (
    descriptors_left,
    mount,
    open_files,
    open_on,
    unmount,
)
from tests.unit.backends.disk._disk import key_of, make_disk, open_disk, two_filesystems

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtier_backends.disk.device import Transfer

pytestmark = pytest.mark.anyio

# --- a medium that does not answer ---

TROUBLES = [
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EACCES,
    errno.ETIMEDOUT,
    errno.ELOOP,
    errno.EHOSTDOWN,
]


@pytest.mark.parametrize(
    ("number", "is_gone"),
    [*((number, False) for number in TROUBLES), (errno.ENOENT, True), (errno.ENOTDIR, True)],
    ids=lambda each: errno.errorcode[each] if each > 1 else None,
)
async def test_a_lock_that_cannot_be_looked_at_is_not_gone(
    number: int, is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "sick")

    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1)
        with monkeypatch.context() as patch:
            patch.setattr(claim.os, "lstat", fail)
            await disk.backend.tick()
        assert disk.lost == [key_of(1)] * is_gone
        assert disk.count("folder_vanished") == is_gone
        assert disk.count("folder_not_seen") == (not is_gone)
        assert await disk.found([1]) == [1] * (not is_gone)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
async def test_reads_that_fail_for_a_moment_at_the_start_cost_no_block(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        for first in range(0, 100, 10):
            await disk.store(*range(first, first + 10))
    real = FileDevice.read
    calls = 0

    async def read(self: FileDevice, transfers: Sequence[Transfer]) -> list[int | OSError]:
        nonlocal calls
        calls += 1
        if calls <= 3:
            return [OSError(number, "for a moment") for _ in transfers]
        return await real(self, transfers)

    monkeypatch.setattr(FileDevice, "read", read)
    monkeypatch.setattr(recovery, "READ_AGAIN_PAUSE_S", 0.0)
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.found(range(100)) == list(range(100))


# --- a folder that comes back while there is no descriptor ---


@pytest.mark.parametrize("is_new", [False, True], ids=["as it was", "made anew"])
@pytest.mark.parametrize("count", range(5))
async def test_a_folder_that_could_not_be_opened_is_used_once_it_can(
    count: int, is_new: bool, tmp_path: Path
) -> None:
    """Whichever file can't be opened. The tier's own claim on it was in its way then."""
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(20))
        (tmp_path / "kv").rename(tmp_path / "away")
        await disk.backend.tick()
        if not is_new:
            (tmp_path / "away").rename(tmp_path / "kv")
        files, threads = len(open_files()), threading.active_count()
        for _ in range(3):
            with descriptors_left(count):
                await disk.backend.tick()
        if disk.count("folder_came_back") == 0:
            assert len(open_files()) <= files
            # Those of a device that was closed again end by themselves, in their time.
            await until_true(lambda: threading.active_count() <= threads, threading.enumerate)
        await disk.backend.tick()
        assert disk.count("folder_came_back") == 1
        assert await disk.store(50) == [Outcome.DONE]
        assert await disk.load(50) == [Outcome.DONE]


# --- a folder that was mounted anew ---


@needs("mount")
async def test_a_folder_on_a_filesystem_with_another_number_is_used_again(tmp_path: Path) -> None:
    """As after a remount of FUSE, NFS or btrfs: the files are the same, ``st_dev`` is another."""
    with two_filesystems(tmp_path) as (place, second):
        async with open_disk(place / "kv") as disk:
            await disk.store(*range(20))
            shutil.copytree(place / "kv", second / "kv")
            unmount(place)
            for _ in range(2):
                await disk.backend.tick()
            assert disk.count("blocks_lost_with_the_folder") == 20
            assert await disk.store(50) == [Outcome.FAILED]
            assert list(place.iterdir()) == [], "it is not made below the mount point"
            mount("--bind", second, place)
            await disk.backend.tick()
            assert await disk.store(51) == [Outcome.DONE]
            assert await disk.load(51) == [Outcome.DONE]
            assert disk.count("folder_came_back") == 1
            # From here on this is its filesystem: the folder may go and be made anew there.
            (place / "kv").rename(place / "away")
            for _ in range(2):
                await disk.backend.tick()
            assert await disk.store(52) == [Outcome.DONE]


@needs("mount")
async def test_another_folder_on_another_filesystem_is_left_alone(tmp_path: Path) -> None:
    with two_filesystems(tmp_path) as (place, second):
        async with open_disk(second / "kv") as other:
            await other.store(*range(10))
        async with open_disk(place / "kv") as disk:
            await disk.store(1)
            unmount(place)
            mount("--bind", second, place)
            for _ in range(3):
                await disk.backend.tick()
            assert await disk.store(2) == [Outcome.FAILED]
        async with open_disk(second / "kv") as other:
            assert await other.found(range(10)) == list(range(10))


@needs("mount")
async def test_a_disk_taken_away_under_a_store_has_no_segment_below_its_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next round sees that it is gone, and each segment has a GiB."""
    monkeypatch.setattr(claim, "SEGMENT_BYTES_USUAL", 1)  # a region each, so that many are opened
    place = tmp_path / "kv"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", place)
    device = place.stat().st_dev
    async with open_disk(place) as disk:
        await disk.store(1)
        await disk.come_to_rest()
        unmount(place)
        for first in range(60):
            await disk.store(*range(first, first + 9))
        assert list(place.iterdir()) == []
        for _ in range(2):
            await disk.backend.tick()
        assert await disk.store(2) == [Outcome.FAILED]
        # It can be detached, once the calls that were under way have ended.
        await until_true(lambda: not open_on(device), lambda: open_on(device))
    assert list(place.iterdir()) == []


# --- what is no file ---


def make_link(path: Path) -> None:
    target = path.parent.parent / "target"
    target.write_bytes(b"somebody's")
    path.symlink_to(target)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder_descriptor = os.open(path.parent, os.O_PATH)
        try:  # the path itself may be too long for a socket
            server.bind(f"/proc/self/fd/{folder_descriptor}/{path.name}")
        finally:
            os.close(folder_descriptor)


def make_device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))  # as /dev/null


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "somebody's").write_bytes(b"file")


ODD = [
    make_link,
    make_fifo,
    make_socket,
    make_folder,
    pytest.param(make_device, marks=needs("mount")),
]


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("capacity_bytes", [2 << 20, 1 << 20], ids=["as before", "smaller"])
async def test_what_lies_in_the_place_of_a_segment_is_replaced(
    make: Callable[[Path], None], capacity_bytes: int, tmp_path: Path
) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(20))
    segment = tmp_path / "kv" / "segment-00000.kv"
    segment.unlink()
    make(segment)
    with anyio.fail_after(PATIENCE_S):
        async with open_disk(tmp_path / "kv", capacity_bytes=capacity_bytes) as disk:
            assert await disk.found(range(20)) == []
            assert await disk.store(*range(20)) == [Outcome.DONE] * 20
            assert await disk.found(range(20)) == list(range(20))
    assert segment.is_file()
    assert not segment.is_symlink()
    target = tmp_path / "target"
    assert not target.exists() or target.read_bytes() == b"somebody's"


@pytest.mark.parametrize("make", ODD)
async def test_what_takes_a_segments_place_under_an_engine_is_replaced(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        make(tmp_path / "kv" / "segment-00000.kv")
        with anyio.fail_after(PATIENCE_S):
            assert await disk.store(*range(20)) == [Outcome.DONE] * 20
            assert await disk.found(range(20)) == list(range(20))


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", ["superblock", "lock"])
async def test_what_is_no_file_is_refused_by_name(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1)
    (tmp_path / "kv" / name).unlink()
    make(tmp_path / "kv" / name)
    kind = make.__name__.removeprefix("make_").replace("fifo", "FIFO")
    with pytest.raises(ConfigError, match=f"{name} is a {kind}, not a file.*Remove it"):
        make_disk(tmp_path / "kv")


@pytest.mark.parametrize("name", ["superblock", "lock"])
async def test_tools_wait_for_no_fifo(name: str, tmp_path: Path) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1)
    (tmp_path / "kv" / name).unlink()
    os.mkfifo(tmp_path / "kv" / name)
    with pytest.raises((ConfigError, OSError), match=f"{name} is a FIFO"):
        user_of(str(tmp_path / "kv")), Folder(str(tmp_path / "kv"))


async def test_what_lies_where_a_superblock_is_prepared_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(0o700)
    os.mkfifo(tmp_path / "kv" / "superblock.new")
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.store(1) == [Outcome.DONE]


# --- what is written down ---


@pytest.mark.parametrize("now_s", [-1.0, -1e10, 2.0**32, 1e12], ids=str)
async def test_a_clock_that_is_far_off_fails_no_store(now_s: float, tmp_path: Path) -> None:
    """Before 1970, and after 2106: ages and ``ttl_s`` mean little then, and blocks are blocks."""
    backend = make_disk(tmp_path / "kv", clock=lambda: now_s, ttl_s=60)
    await backend.open()
    await backend.close()
    async with open_disk(tmp_path / "kv") as disk:
        disk.clock.now_s = now_s
        for first in range(0, 300, 10):
            await disk.remove(*range(first - 100, first - 90))
            assert await disk.store(*range(first, first + 10)) == [Outcome.DONE] * 10
        await disk.backend.tick()
        assert await disk.load(299) == [Outcome.DONE]
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.load(299) == [Outcome.DONE]


@pytest.mark.parametrize("sequence", [2**64 - 1, 2**64 - 2, 2**63, 2**63 + 1, 2**63 - 1])
async def test_a_planted_sequence_fails_no_store(sequence: int, tmp_path: Path) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(40))
    plan = read_superblock(str(tmp_path / "kv"))
    path = tmp_path / "kv" / "segment-00000.kv"
    with path.open("r+b") as file:
        header = decode_header_untrusted(file.read(PAGE_BYTES))
        assert plan.segment_regions > 1
        file.seek(0)
        file.write(encode_header(replace(header, sequence=sequence)))
    for _ in range(2):
        async with open_disk(tmp_path / "kv") as disk:
            await disk.remove(*range(400))  # what was found leaves room
            for first in range(100, 400, 10):
                await disk.remove(*range(first - 100, first - 90))
                assert await disk.store(*range(first, first + 10)) == [Outcome.DONE] * 10
            assert await disk.found(range(390, 400)) == list(range(390, 400))
