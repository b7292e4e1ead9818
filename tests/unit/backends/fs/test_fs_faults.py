"""Real faults of a real filesystem: folders that go, no descriptors, killed writers."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs import temporary
from kvtier_backends.fs.files import BlockFiles
from kvtier_backends.fs.temporary import WriterProcess, parse_temporary_untrusted, this_writer
from tests.support.fuse_folder import FuseFolder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until_true
from tests.unit.backends._media import mount, start_python, tmpfs
from tests.unit.backends.fs._fs import key_of, make_fs, open_fs

pytestmark = pytest.mark.anyio


def child(call: str, root: Path, **options: Any) -> subprocess.Popen[str]:
    return start_python("-m", "tests.unit.backends.fs._fs_child", call, root, **options)


async def test_a_folder_that_goes_under_a_store_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner removes empty ones where there is no room, and so do cron jobs."""
    real, gone = os.rename, list[str]()

    def rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if not gone:
            gone.append(target)
            shutil.rmtree(Path(f"/proc/self/fd/{dst_dir_fd}").readlink())
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    async with open_fs(tmp_path / "kv") as fs:
        monkeypatch.setattr(os, "rename", rename)
        assert await fs.store(1) is Outcome.DONE
        assert gone
        assert await fs.load(1) is Outcome.DONE


async def test_a_folder_whose_handle_is_stale_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is on NFS after another host has removed a folder and made it again."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        held, real = fs.backend._files.current_place(), os.open

        def stale(name: Any, *rest: Any, dir_fd: int | None = None, **named: Any) -> int:
            if dir_fd == held.blocks:
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(name, *rest, dir_fd=dir_fd, **named)

        def fstat(descriptor: int) -> os.stat_result:
            if descriptor in (held.base, held.blocks):
                raise OSError(errno.ESTALE, "Stale file handle")
            return real_fstat(descriptor)

        real_fstat = os.fstat
        monkeypatch.setattr(os, "open", stale)
        monkeypatch.setattr(os, "fstat", fstat)
        assert await fs.load(1) is Outcome.ABSENT
        assert await fs.load(1) is Outcome.DONE
        assert fs.backend._files.current_place() is not held
        assert await fs.store(2) is Outcome.DONE


@needs("mount")
def test_a_read_only_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as root:
        make_fs(root)
        mount("-o", "remount,ro", root)
        with pytest.raises(ConfigError, match="Mount it for writing"):
            make_fs(root)


@pytest.mark.parametrize("call", ["run_out_of_descriptors", "hit_the_file_size_limit"])
def test_a_limit_of_the_process_is_an_outcome(tmp_path: Path, call: str) -> None:
    """The assertions are in the child, whose limits they are about."""
    with child(call, tmp_path / "kv") as process:
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("ahead_h", [0, 6, -6, 48, -48])
async def test_only_dead_writers_temporaries_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_h: int
) -> None:
    """However far this host's clock is ahead of the server's."""
    me = this_writer()
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        block = fs.path(1)
    old, recent = time.time() - temporary.FOREIGN_AGE_S_MAX - 60, time.time()
    cases = [  # writer, age, swept
        (WriterProcess(me.host, ended.pid, 12), recent, True),
        (WriterProcess(me.host, me.pid, me.started - 1), recent, True),  # its number was given away
        (me, old, False),
        (WriterProcess("0" * 12, me.pid, me.started), recent, False),
        (WriterProcess("0" * 12, me.pid, me.started), old, True),
    ]
    files = []
    for writer, modified, _ in cases:
        path = Path(temporary.temporary_path(str(block), writer))
        assert parse_temporary_untrusted(path.name) == writer
        path.write_bytes(b"half")
        os.utime(path, (modified, modified))
        files.append(path)
    foreign = block.with_name(block.name + "_123456.tmp")  # vLLM's way of naming them
    foreign.write_bytes(b"half")
    markers = block.parents[2] / "writers"
    (markers / str(cases[0][0])).write_bytes(b"")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * ahead_h)
    async with open_fs(tmp_path / "kv") as fs:
        await no_markers_but(fs.backend.place, 1)
        assert [path.exists() for path in files] == [not swept for _, _, swept in cases]
        assert foreign.exists()
        assert await fs.load(1) is Outcome.DONE
        assert fs.count("temporaries_swept") == 3


async def test_what_a_sweep_raises_is_counted_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As once with names that came without types: nothing was swept, and no log said so."""

    def fail(*_: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(BlockFiles, "sweep", fail)
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        markers = fs.path(1).parents[2] / "writers"
    (markers / str(WriterProcess(this_writer().host, 1, 12))).write_bytes(b"")
    with capture_logs() as lines:
        async with open_fs(tmp_path / "kv") as fs:
            await until_true(lambda: fs.count("upkeep_failed") == 1)
    assert "unhandled exception in kvtier thread" in {line["event"] for line in lines}


async def test_a_tier_opens_without_a_thread_to_sweep_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        markers = fs.path(1).parents[2] / "writers"
    (markers / str(WriterProcess(this_writer().host, 1, 12))).write_bytes(b"")
    real = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("-look"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with open_fs(tmp_path / "kv") as fs:
        assert fs.count("upkeep_failed") == 1
        assert await fs.load(1) is Outcome.DONE


@needs("fuse")
@pytest.mark.parametrize("fails", [False, True])
def test_a_filesystem_that_lists_names_alone_is_swept_too(tmp_path: Path, fails: bool) -> None:
    """Each name's type is asked for; where that fails, the file is left to the next sweep."""
    source, path = tmp_path / "source", tmp_path / "mounted"
    for each in (source, path, source / "fan-out"):
        each.mkdir(mode=0o700)
    me = this_writer()
    dead = Path(temporary.temporary_path("block", me._replace(started=me.started - 1))).name
    (source / "fan-out" / dead).write_bytes(b"half")
    fuse = FuseFolder(source, path)
    try:
        fuse.wait_until_mounted()
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if fails:
            fuse.fail("getattr", error=errno.EIO)
        swept = list(temporary.sweep(folder, me, time.time(), lambda: True))
        os.close(folder)
    finally:
        fuse.vanish()
    assert swept == ([] if fails else [dead])
    assert (source / "fan-out" / dead).exists() == fails


async def test_without_a_dead_writer_nothing_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over a million folders is not the price of every start."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
    monkeypatch.setattr("kvtier_backends.fs.temporary.sweep", pytest.fail)
    async with open_fs(tmp_path / "kv") as fs:
        assert await fs.load(1) is Outcome.DONE


async def no_markers_but(place: str, count: int) -> None:
    """Wait until the sweep has taken the markers of dead writers away."""
    with anyio.fail_after(PATIENCE_S):
        while len(list(Path(place).glob("*/writers/*"))) != count:
            await anyio.lowlevel.checkpoint()


async def test_a_folder_that_vanished_takes_no_room(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        shutil.rmtree(tmp_path / "kv")
        assert not await fs.probe(1)
        assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("call", ["exists", "load", "store", "remove"])
async def test_what_may_hang_is_not_called_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """On a quick disk nobody would notice, and on one that hangs the whole tier would."""
    real, threads = getattr(BlockFiles, call), []

    def noted(files: BlockFiles, asked: Any) -> Any:
        threads.append(threading.get_ident())
        return real(files, asked)

    monkeypatch.setattr(BlockFiles, call, noted)
    async with open_fs(tmp_path / "kv") as fs:
        assert await fs.store(1) is Outcome.DONE
        assert await fs.probe(1)
        assert await fs.load(1) is Outcome.DONE
        await fs.backend.remove([key_of(1)])
        assert not await fs.probe(1)
    assert threads
    assert threading.get_ident() not in threads
