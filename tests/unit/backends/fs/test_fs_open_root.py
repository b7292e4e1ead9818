"""The fs tier writes below the folder that it opened, or nowhere. Mounts here are real."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs import open_root
from tests.support.fuse_folder import FuseFolder
from tests.support.needs import needs
from tests.support.patience import looks
from tests.unit.backends._media import (
    descriptors_left,
    mount,
    open_files,
    open_on,
    tmpfs,
    unmount,
)
from tests.unit.backends.fs._fs import FILE_BYTES, key_of, make_fs, open_fs

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from tests.unit.backends.fs._fs import Fs

pytestmark = pytest.mark.anyio
DONE, FAILED, ABSENT, DAMAGED = Outcome.DONE, Outcome.FAILED, Outcome.ABSENT, Outcome.DAMAGED


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_root, "CHECK_PAUSE_S", 0.0)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem that can be taken away, and put back with ``mount_again``."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "mounted").mkdir(mode=0o700)
    mount_again(tmp_path)
    yield tmp_path / "mounted"
    while os.path.ismount(tmp_path / "mounted") or is_mounted(tmp_path / "mounted"):
        unmount(tmp_path / "mounted")


def mount_again(parent: Path) -> None:
    mount("--bind", parent / "real", parent / "mounted")


def is_mounted(path: Path) -> bool:
    """Tell it of a bind mount too, which has its parent's device number."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split(" ")[1] == str(path) for line in lines)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def kinds(lines: Sequence[MutableMapping[str, object]]) -> list[object]:
    return [line["kind"] for line in lines]


async def expect_nothing_works(fs: Fs) -> None:
    """All fail, and quickly."""
    assert await fs.store(2) is FAILED
    assert await fs.load(1) is FAILED
    assert not await fs.probe(1)
    await fs.backend.remove([key_of(1)])
    assert await fs.store(3) is FAILED


async def expect_all_works(fs: Fs) -> None:
    assert await fs.probe(1)
    assert await fs.load(1) is DONE
    assert await fs.store(4) is DONE
    assert await fs.load(4) is DONE


@needs("mount")
@pytest.mark.parametrize("below", [".", "cache/kv"])
@pytest.mark.parametrize("layout", ["kvtier", "vllm"])
async def test_nothing_is_written_into_a_bare_mount_point(
    mounted: Path, below: str, layout: str
) -> None:
    """Once the filesystem is gone, what is written would fill another disk, unseen."""
    async with open_fs(mounted / below, layout=layout) as fs:
        assert await fs.store(1) is DONE
        with capture_logs() as lines:
            unmount(mounted)
            await expect_nothing_works(fs)
            await expect_nothing_works(fs)
            assert files_in(mounted) == []
            mount_again(mounted.parent)
            await expect_all_works(fs)
        assert kinds(lines) == ["folder_lost", "folder_lost"], "that it is lost and that it is back"
        assert [line["log_level"] for line in lines] == ["warning", "info"]
        assert lines[1]["count"] == 10
        assert "unmounted" in str(lines[0]["reason"])
        assert fs.count("folder_lost") == 10
    assert fs.temporaries() == []


async def test_a_folder_that_changes_while_it_is_checked_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the path and the folders that are made there lie some calls."""
    root = tmp_path / "kv"
    async with open_fs(root) as fs:
        assert await fs.store(1) is DONE

        def swap(_place: open_root.OpenRoot, _layout: object) -> bool:
            """The right folder's namespace is incomplete; then another folder is there."""
            if not (tmp_path / "aside").exists():
                root.rename(tmp_path / "aside")
                root.mkdir(mode=0o700)
            return False

        with monkeypatch.context() as patched:
            patched.setattr(open_root.OpenRoot, "stands_below", swap)
            await expect_nothing_works(fs)
            assert files_in(root) == []
        root.rmdir()
        (tmp_path / "aside").rename(root)
        await expect_all_works(fs)


@needs("mount")
async def test_a_bare_mount_point_with_an_older_cache_is_not_taken_for_the_mounted_one(
    mounted: Path,
) -> None:
    """Before the filesystem was mounted, an engine may have written there: with this config."""
    unmount(mounted)
    make_fs(mounted)
    before = files_in(mounted)
    mount_again(mounted.parent)
    async with open_fs(mounted) as fs:
        assert await fs.store(1) is DONE
        unmount(mounted)
        await expect_nothing_works(fs)
        assert files_in(mounted) == before
        mount_again(mounted.parent)
        await expect_all_works(fs)


@needs("mount")
async def test_another_filesystem_in_its_place_is_left_alone(mounted: Path) -> None:
    async with open_fs(mounted) as fs:
        assert await fs.store(1) is DONE
        mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", mounted)
        await expect_nothing_works(fs)
        assert files_in(mounted) == []
        unmount(mounted)
        await expect_all_works(fs)


@needs("mount")
async def test_the_same_folder_under_another_device_number_is_taken_up(
    tmp_path: Path, mounted: Path
) -> None:
    """As after a remount, or a move to another disk: it is known by its config."""
    async with open_fs(mounted) as fs:
        assert await fs.store(1) is DONE
        unmount(mounted)
        mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", mounted)
        subprocess.run(["cp", "-a", f"{tmp_path / 'real'}/.", mounted], check=True)
        before = files_in(tmp_path / "real")
        await expect_all_works(fs)
        assert files_in(tmp_path / "real") == before


async def test_a_folder_is_given_up_once_the_reason_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads raise it at once: they said that nothing had been stored there yet."""
    reasons: list[str] = []

    def set_attribute(handle: open_root.RootHandle, name: str, value: object) -> None:
        if name == "_place" and value is None:
            reasons.append(handle._why)
        object.__setattr__(handle, name, value)

    async with open_fs(tmp_path / "kv") as fs:
        assert await fs.store(1) is DONE
        (tmp_path / "kv").rename(tmp_path / "aside")
        with monkeypatch.context() as patched:
            patched.setattr(open_root.RootHandle, "__setattr__", set_attribute)
            await expect_nothing_works(fs)
    assert reasons[0].startswith("it is no longer there")


@needs("mount")
async def test_an_open_tier_keeps_its_filesystem_busy_and_a_closed_one_does_not(
    tmp_path: Path,
) -> None:
    with tmpfs(tmp_path / "own", "8m") as folder:
        async with open_fs(folder / "kv") as fs:
            assert await fs.store(1) is DONE
            refused = subprocess.run(["umount", folder], capture_output=True, check=False)
            assert refused.returncode != 0
            assert b"busy" in refused.stderr
        subprocess.run(["umount", folder], check=True)
        mount("-t", "tmpfs", "tmpfs", folder)  # there is one to take away


@needs("mount")
@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 64 * FILE_BYTES}], ids=str)
async def test_a_tier_lets_go_of_a_filesystem_that_was_taken_away(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """With the first calls after ``umount -l``: the device must become free."""
    with tmpfs(tmp_path / "own", "8m") as folder:
        device = folder.stat().st_dev
        async with open_fs(folder, **options) as fs:
            for _ in looks():  # a bounded folder is counted first
                if await fs.store(1) is DONE:
                    break
            assert open_on(device)
            unmount(folder)
            for _ in looks(lambda: open_on(device)):
                await fs.probe(1)
                if not open_on(device):
                    break
            mount("-t", "tmpfs", "tmpfs", folder)  # there is one to take away


@needs("fuse")
async def test_a_filesystem_that_died_and_was_mounted_again_is_used_again(tmp_path: Path) -> None:
    """Of the folders that were open nothing can be asked any more, ever."""
    source, path = tmp_path / "source", tmp_path / "mounted"
    source.mkdir(mode=0o700)
    path.mkdir(mode=0o700)
    first = FuseFolder(source, path)
    try:
        first.wait_until_mounted()
        async with open_fs(path / "kv") as fs:
            assert await fs.store(1) is DONE
            first.vanish()
            await expect_nothing_works(fs)
            assert files_in(path) == []
            second = FuseFolder(source, path)
            try:
                second.wait_until_mounted()
                await expect_all_works(fs)
                second.fail(error=errno.EIO)
                assert await fs.load(1) is FAILED
                second.heal()
                await expect_all_works(fs)
            finally:
                second.vanish()
    finally:
        first.vanish()


async def test_a_root_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "kv", tmp_path / "etc"
    elsewhere.mkdir(mode=0o700)
    async with open_fs(root) as fs:
        assert await fs.store(1) is DONE
        root.rename(tmp_path / "moved")
        root.symlink_to(elsewhere)
        await expect_nothing_works(fs)
        assert files_in(elsewhere) == []
        root.unlink()
        root.symlink_to(tmp_path / "moved")
        await expect_all_works(fs)
    assert files_in(elsewhere) == []


async def test_a_link_at_the_start_is_the_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    async with open_fs(tmp_path / "kv") as fs:
        assert await fs.store(1) is DONE
        assert await fs.load(1) is DONE
    assert list((tmp_path / "real").rglob("*.kv"))


@pytest.mark.parametrize("state", ["moved", "deleted", "there"])
@pytest.mark.parametrize("count", range(5))
async def test_a_folder_that_could_not_be_opened_is_used_once_it_can(
    count: int, state: str, tmp_path: Path
) -> None:
    """Whichever file or folder can't be opened."""
    async with open_fs(tmp_path / "kv") as fs:
        assert await fs.store(1) is DONE
        if state == "moved":
            (tmp_path / "kv").rename(tmp_path / "moved")
            await expect_nothing_works(fs)
            (tmp_path / "moved").rename(tmp_path / "kv")
        elif state == "deleted":
            shutil.rmtree(tmp_path / "kv")
        files = len(open_files())
        for number in range(2, 5):
            with descriptors_left(count):
                await fs.store(number)
                await fs.load(1)
        assert len(open_files()) <= files + 4  # the root, and those below it
        assert await fs.store(1) is DONE
        await expect_all_works(fs)


@pytest.mark.parametrize("what", ["the root", "what is in it", "the blocks"])
@pytest.mark.parametrize("by", ["the tier", "the operator", "another engine"])
@pytest.mark.parametrize("layout", ["kvtier", "vllm"])
async def test_what_was_deleted_is_made_again(
    tmp_path: Path, what: str, by: str, layout: str
) -> None:
    """It was the same place, and is empty now: people clear caches like that."""
    root = tmp_path / "kv"
    async with open_fs(root, layout=layout) as fs:
        assert await fs.store(1) is DONE
        if what == "the root":
            shutil.rmtree(root)
        else:
            for path in root.iterdir():
                if what == "what is in it" or path == Path(fs.backend._files._layout.blocks):
                    shutil.rmtree(path)
        if by == "the operator":
            root.mkdir(mode=0o700, exist_ok=True)
        elif by == "another engine":
            async with open_fs(root, layout=layout) as other:
                assert await other.store(5) is DONE
                assert await fs.load(5) is DONE
        assert await fs.load(1) is ABSENT
        assert await fs.store(1) is DONE
        assert await fs.load(1) is DONE
        assert fs.path(1).exists()
        if by != "another engine":  # which is of this process, and has signed off
            assert len(list(root.glob("*/writers/*"))) == 1
    async with open_fs(root, layout=layout) as fs:
        assert await fs.load(1) is DONE


async def test_a_root_that_anyone_may_write_to_is_not_taken_up(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        shutil.rmtree(tmp_path / "kv")
        (tmp_path / "kv").mkdir()
        (tmp_path / "kv").chmod(0o777)
        await expect_nothing_works(fs)
        assert files_in(tmp_path / "kv") == []
        (tmp_path / "kv").chmod(0o700)
        assert await fs.store(1) is DONE


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["namespace", "outer folder", "inner folder"])
async def test_a_folder_below_that_became_a_link_is_not_followed(
    tmp_path: Path, depth: int
) -> None:
    elsewhere = tmp_path / "elsewhere"
    async with open_fs(tmp_path / "kv") as fs:
        assert await fs.store(1) is DONE
        folder = [fs.path(1).parent, fs.path(1).parent.parent, fs.path(1).parent.parent.parent]
        shutil.move(folder[2 - depth], elsewhere)
        folder[2 - depth].symlink_to(elsewhere)
        before = files_in(elsewhere)
        fs.path(1).unlink()
        assert await fs.store(1) is FAILED
        await fs.backend.remove([key_of(1)])
        assert files_in(elsewhere) == before[:-1] if depth == 2 else len(before) - 1


MOVES = ("away", "back", "delete", "link elsewhere", "make", "file", "look", "store", "load")


@settings(
    max_examples=60,
    suppress_health_check=list(HealthCheck),
)
@given(moves=strategies.lists(strategies.sampled_from(MOVES), max_size=12))
def test_whatever_becomes_of_the_path_nothing_is_written_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str]
) -> None:
    """And once it is back, it works again."""
    parent = tmp_path_factory.mktemp("moves")
    anyio.run(_live_through, parent, moves)


class Story:
    """A tier, its path, and what the path names."""

    def __init__(self, parent: Path, fs: Fs) -> None:
        self.root, self.aside, self.elsewhere = (
            parent / name for name in ("kv", "aside", "elsewhere")
        )
        self.fs = fs
        self.is_ours = True  # what the path names is the place, or what may follow it
        self.is_held = True  # the tier has it open: it let go when it looked and it was away

    async def move(self, what: str) -> None:
        if what in ("store", "load", "look"):
            self.is_held = self.is_ours
        if what == "store":
            assert await self.fs.store(1) is (DONE if self.is_ours else FAILED)
        elif what == "load":
            assert await self.fs.load(1) in ((DONE, ABSENT) if self.is_ours else (FAILED,))
        elif what == "look":
            await self.fs.probe(1)
        elif what == "back":
            self.back()
        elif what in ("away", "delete"):
            self.take_away(what)
        elif not os.path.lexists(self.root):
            self.is_ours = self.is_ours and what == "make"
            put(self.root, what, self.elsewhere)
            if self.is_ours:
                await self.fs.probe(1)  # it is taken up; before, it would be nobody's

    def back(self) -> None:
        if self.aside.exists():
            clear(self.root)
            self.aside.rename(self.root)
            self.is_ours = True

    def take_away(self, how: str) -> None:
        if not self.is_ours or not self.root.is_dir():
            return
        if how == "delete":
            shutil.rmtree(self.root)
            self.is_ours = self.is_held  # else nobody knows that it was deleted, and not unmounted
        elif not self.aside.exists():
            self.root.rename(self.aside)
            self.is_ours = False


async def _live_through(parent: Path, moves: list[str]) -> None:
    (parent / "elsewhere").mkdir(mode=0o700)
    async with open_fs(parent / "kv") as fs:
        story = Story(parent, fs)
        for move in moves:
            await story.move(move)
            assert files_in(story.elsewhere) == []
            if not story.is_ours and story.root.is_dir():
                assert files_in(story.root) == []
        if story.aside.exists():
            story.back()
            assert await fs.store(1) is DONE


def clear(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def put(root: Path, what: str, elsewhere: Path) -> None:
    if what == "link elsewhere":
        root.symlink_to(elsewhere)
    elif what == "make":
        root.mkdir(mode=0o700)
    elif what == "file":
        root.write_text("")
