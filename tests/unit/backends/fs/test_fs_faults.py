"""Real faults of a real filesystem: full, read-only, out of descriptors, killed writers."""

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
from tests.support.fuse_folder import FuseFolder, fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until_true
from tests.unit.backends._media import fill_with_files, mount, start_python, tmpfs
from tests.unit.backends.fs._fs import key_of, make_fs, open_fs

pytestmark = pytest.mark.anyio


def child(call: str, root: Path, **options: Any) -> subprocess.Popen[str]:
    return start_python("-m", "tests.unit.backends.fs._fs_child", call, root, **options)


@needs("mount")
async def test_a_full_disk_is_full_and_keeps_nothing_unfinished(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "256k") as root:
        async with open_fs(root) as fs:
            outcomes = [await fs.store(number) for number in range(20)]
            full = outcomes.index(Outcome.FULL)
            assert 5 < full < 16
            assert set(outcomes[:full]) == {Outcome.DONE}
            assert set(outcomes[full:]) == {Outcome.FULL}
            assert fs.temporaries() == []
            for number in range(full):
                assert await fs.load(number) is Outcome.DONE
            for number in range(full, 20):
                assert await fs.load(number) is Outcome.ABSENT
            assert fs.count("stores_full") == 20 - full
        async with open_fs(root) as fs:  # a full disk is no reason not to start
            assert await fs.load(0) is Outcome.DONE
            fs.path(0).unlink()
            assert await fs.store(50) is Outcome.DONE


@needs("mount")
async def test_a_filesystem_without_inodes_is_full_once_and_takes_stores_again(
    tmp_path: Path,
) -> None:
    """Nor is it a reason not to start: there was none for the marker."""
    with tmpfs(tmp_path / "small", "16m", inodes=40) as root, capture_logs() as lines:
        async with open_fs(root) as fs:
            outcomes = [await fs.store(number) for number in range(20)]
            assert outcomes == sorted(outcomes), "first all DONE, then all FULL"
            assert set(outcomes) == {Outcome.DONE, Outcome.FULL}
            assert fs.count("stores_full") == outcomes.count(Outcome.FULL)
            assert fs.temporaries() == []
        fill_with_files(root)
        async with open_fs(root) as fs:
            assert await fs.load(0) is Outcome.DONE
            assert await fs.store(30) is Outcome.FULL
            for number in (0, 1):
                shutil.rmtree(fs.path(number).parents[1])
            assert await fs.store(31) is Outcome.DONE
            assert len(list(Path(fs.backend.place).glob("*/writers/*"))) == 1
    reasons = [line["reason"] for line in lines if line.get("kind") == "stores_full"]
    assert len(reasons) == 2, "of each engine"
    assert all("full since" in each and "no inodes are left" in each for each in reasons)


async def test_a_quota_that_is_used_up_is_full_once_and_takes_stores_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exceed(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    async with open_fs(tmp_path / "kv") as fs:
        with monkeypatch.context() as used_up, capture_logs() as lines:
            used_up.setattr(os, "pwritev", exceed)
            assert [await fs.store(number) for number in range(3)] == [Outcome.FULL] * 3
        (reason,) = [line["reason"] for line in lines]
        assert "full since" in reason
        assert os.strerror(errno.EDQUOT) in reason
        assert fs.temporaries() == []
        assert await fs.store(1) is Outcome.DONE


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


@needs("fuse")
async def test_a_disk_that_turns_read_only_fails_stores_and_serves_loads(tmp_path: Path) -> None:
    """As the kernel does after an error; nobody else can, while an engine has it open."""
    with fuse_folder(tmp_path) as folder:
        async with open_fs(folder.path / "kv") as fs:
            await fs.store(1)
            await fs.store(2)
            os.truncate(fs.path(2), 10)
            writing = ("create", "mkdir", "write", "rename", "unlink", "truncate", "utimens")
            folder.fail(*writing, error=errno.EROFS)
            assert await fs.store(3) is Outcome.FAILED
            assert await fs.load(1) is Outcome.DONE
            assert await fs.load(2) is Outcome.DAMAGED
            assert fs.count("removes_failed") == 1
            folder.heal()
            assert await fs.store(3) is Outcome.DONE


@needs("fuse")
@pytest.mark.parametrize("operation", ["open", "read"])
async def test_a_block_that_another_host_has_removed_is_a_miss(
    tmp_path: Path, operation: str
) -> None:
    """NFS says ESTALE then, and a few of them opened the breaker of loads.

    The better the eviction of others worked, the less was loaded.
    """
    with fuse_folder(tmp_path) as folder:
        async with open_fs(folder.path / "kv") as fs:
            await fs.store(1)
            folder.fail(operation, error=errno.ESTALE)
            assert await fs.load(1) is Outcome.ABSENT
            assert fs.count("loads_failed") == 0
            folder.heal()
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
        with pytest.raises(ConfigError, match="Give this user the right to write"):
            make_fs(root)


@needs("mount")
async def test_what_this_user_may_not_read_fails_and_stays(tmp_path: Path) -> None:
    """EACCES says nothing of the copy. Root ignores modes, so the user id changes for real."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        path = fs.path(1)
        path.chmod(0)
        for folder in path.parents:
            if tmp_path in folder.parents:
                folder.chmod(0o755)
        for folder in tmp_path.parents:
            if folder.stat().st_uid == 0 and "pytest" in folder.name:
                folder.chmod(0o755)
        tmp_path.chmod(0o755)
        # Only the effective user of all threads changes what an open may do.
        os.seteuid(65534)
        try:
            assert await fs.load(1) is Outcome.FAILED
            assert await fs.store(2) is Outcome.FAILED
            assert await fs.probe(1)
        finally:
            os.seteuid(0)
        assert fs.count("loads_failed") == 1
        assert await fs.load(1) is Outcome.DONE


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
