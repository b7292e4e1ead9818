"""What a killed writer has left is found without a walk over all folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs import temporary, unfinished
from kvtier_backends.fs.temporary import (
    BATCH_S_MAX,
    FOREIGN_AGE_S_MAX,
    WriterProcess,
    this_writer,
)
from kvtier_backends.fs.unfinished import FOLDERS_MAX, Unfinished, folders_untrusted
from tests.support.patience import until_true
from tests.unit.backends._media import start_python
from tests.unit.backends.fs._fs import open_fs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio


def marker(path: Path) -> Unfinished:
    return Unfinished(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def markers(root: Path) -> list[Path]:
    return list(root.glob("*/writers/*"))


def kill_a_writer(root: Path) -> None:
    """Have another process store, and kill it in the midst of that."""
    with start_python(
        "-m", "tests.unit.backends.fs._fs_child", "store_for_ever", root, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 64:
            pass
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("_", range(3))
async def test_a_killed_writer_leaves_whole_blocks_and_a_marker_that_names_what_is_unfinished(
    _: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes at any moment: a file is unfinished in about every second run."""
    root = tmp_path / "kv"
    kill_a_writer(root)
    (path,) = markers(root)
    named = folders_untrusted(path.read_bytes())
    assert named, "it has stored"
    left = list(root.rglob("*.tmp"))
    assert {"/".join(path.parts[-3:-1]) for path in left} <= named
    monkeypatch.setattr("kvtier_backends.fs.temporary.sweep", pytest.fail)
    async with open_fs(root) as fs:
        outcomes = [await fs.load(number) for number in range(400)]
        assert set(outcomes) <= {Outcome.DONE, Outcome.ABSENT}
        assert outcomes[:64] == [Outcome.DONE] * 64
        await until_true(lambda: len(markers(root)) == 1)
        assert list(root.rglob("*.tmp")) == []
    assert markers(root) == []


async def test_only_the_folders_that_are_named_are_listed(tmp_path: Path) -> None:
    """So a start over a million folders lists a few of them, and nothing waits for the others."""
    async with open_fs(tmp_path / "kv") as fs:
        for number in range(50):
            await fs.store(number)
        base = fs.path(0).parents[2]
        folders = ["/".join(fs.path(number).parts[-3:-1]) for number in range(50)]
        paths = [fs.path(number) for number in range(50)]
    dead = WriterProcess(this_writer().host, 1, 12)
    marker(base / "writers" / str(dead)).note(frozenset(folders[:3]))
    for path in paths:
        Path(f"{path}.{dead}-1.tmp").write_bytes(b"half")
    (base / f"config.json.{dead}-0.tmp").write_bytes(b"half")
    async with open_fs(tmp_path / "kv") as fs:
        await until_true(lambda: len(markers(tmp_path / "kv")) == 1)
        assert fs.count("temporaries_swept") == 1 + len(set(folders[:3]))


async def test_a_marker_of_an_older_kvtier_has_all_folders_walked(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        block = fs.path(1)
    dead = WriterProcess(this_writer().host, 1, 12)
    (block.parents[2] / "writers" / str(dead)).write_bytes(b"")
    Path(f"{block}.{dead}-1.tmp").write_bytes(b"half")
    async with open_fs(tmp_path / "kv") as fs:
        await until_true(lambda: len(markers(tmp_path / "kv")) == 1)
        assert fs.count("temporaries_swept") == 1


async def test_a_writer_that_was_idle_for_a_day_is_known_again_once_it_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host takes it for dead. Killed after that, it left unfinished files for ever."""
    root = tmp_path / "kv"
    async with open_fs(root) as idle:
        await idle.store(1)
        (own,) = markers(root)
        a_day_ago = own.stat().st_mtime - FOREIGN_AGE_S_MAX - BATCH_S_MAX - 60
        os.utime(own, (a_day_ago, a_day_ago))
        with monkeypatch.context() as elsewhere:
            other = this_writer()._replace(host="0" * 12)
            elsewhere.setattr("kvtier_backends.fs.files.this_writer", lambda: other)
            async with open_fs(root):
                await until_true(lambda: [path.name for path in markers(root)] == [str(other)])
        monkeypatch.setattr(unfinished, "LOOK_PAUSE_S", 0.0)
        await idle.store(2)
        assert folders_untrusted(own.read_bytes()) == {"/".join(idle.path(2).parts[-3:-1])}


def test_a_foreign_marker_stays_until_its_last_files_are_old_enough_too(tmp_path: Path) -> None:
    """They are younger than it by a batch: it once went first, and nobody swept them any more."""
    folder = os.open(tmp_path, os.O_RDONLY)
    me, gone = this_writer(), WriterProcess("0" * 12, 1, 12)
    os.close(temporary.add_marker(folder, me, 0o700, 0o600))
    own = tmp_path / "writers" / str(gone)
    marker(own).note(frozenset(["abc/de"]))
    (tmp_path / "abc" / "de").mkdir(parents=True)
    left = tmp_path / "abc" / "de" / f"block.{gone}-1.tmp"
    left.write_bytes(b"half")
    now_s = temporary.folder_time_s(folder, me)
    for batch_age_s in range(0, 30 * 3600, 30):
        for path, age_s in ((own, batch_age_s), (left, batch_age_s - 60)):
            os.utime(path, (now_s - age_s, now_s - age_s))
        dead = temporary.dead_markers(folder, me)
        if dead:
            break
    list(temporary.sweep_after(dead, folder, folder, me, lambda: True))
    os.close(folder)
    assert not left.exists()
    assert not own.exists()


async def test_an_unfinished_description_is_swept_where_blocks_have_a_folder_of_their_own(
    tmp_path: Path,
) -> None:
    async with open_fs(tmp_path / "kv", layout="vllm") as fs:
        assert (await fs.backend.probe([bytes(36)])) == [False]
    (described,) = (tmp_path / "kv").glob("*/config.json")
    dead = WriterProcess(this_writer().host, 1, 12)
    marker(described.parent / "writers" / str(dead)).note(frozenset(["abc/de"]))
    described.with_name(f"config.json.{dead}-0.tmp").write_bytes(b"half")
    async with open_fs(tmp_path / "kv", layout="vllm") as fs:
        await until_true(lambda: len(markers(tmp_path / "kv")) == 1)
        assert fs.count("temporaries_swept") == 1
        assert fs.temporaries() == []


async def test_a_writer_that_stores_again_while_others_sweep_keeps_its_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over a million folders takes minutes."""
    root = tmp_path / "kv"
    async with open_fs(root) as fs:
        await fs.store(1)
        base = fs.path(1).parents[2]
    woken, gone = WriterProcess("0" * 12, 1, 12), WriterProcess("0" * 12, 2, 12)
    for each in (woken, gone):
        marker(base / "writers" / str(each)).note(frozenset())
        os.utime(base / "writers" / str(each), (1e9, 1e9))
    real = temporary.sweep_only

    def walk(*given: Any) -> Iterator[str]:
        yield from real(*given)
        os.utime(base / "writers" / str(woken))

    monkeypatch.setattr("kvtier_backends.fs.temporary.sweep_only", walk)
    async with open_fs(root):
        await until_true(lambda: not (base / "writers" / str(gone)).exists())
        assert (base / "writers" / str(woken)).exists()


async def test_a_folder_that_is_made_anew_in_the_midst_of_a_batch_is_noted_there_too(
    tmp_path: Path,
) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        shutil.rmtree(tmp_path / "kv")
        await fs.store(2)
        (path,) = markers(tmp_path / "kv")
        assert folders_untrusted(path.read_bytes()) == {"/".join(fs.path(2).parts[-3:-1])}


def test_a_batch_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = marker(tmp_path / "marker")
    folders = frozenset(["012/34", "567/89"])
    written.note(folders)
    monkeypatch.setattr(unfinished.os, "pwrite", pytest.fail)
    for _ in range(3):
        written.note(folders)


def test_what_is_noted_is_read_back_and_what_is_over_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    written = marker(path)
    assert folders_untrusted(path.read_bytes()) == set()
    written.note(frozenset(["abc/de", "abc/de_g4294967295", "___/__"]))
    assert folders_untrusted(path.read_bytes()) == {"abc/de", "abc/de_g4294967295", "___/__"}
    written.note(frozenset(["012/34"]))
    assert folders_untrusted(path.read_bytes()) == {"012/34"}


def test_a_marker_that_cannot_tell_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "marker"
    written = marker(path)
    written.note(frozenset(f"{number:03x}/00" for number in range(FOLDERS_MAX + 1)))
    assert folders_untrusted(path.read_bytes()) is None
    written.note(frozenset(["012/34"]))
    assert folders_untrusted(path.read_bytes()) is None

    def write_half(*_: object) -> int:
        return 1  # the disk is full

    again = marker(path)
    assert folders_untrusted(path.read_bytes()) == set()
    with monkeypatch.context() as full:
        full.setattr(unfinished.os, "pwrite", write_half)
        again.note(frozenset(["012/34"]))
    assert folders_untrusted(path.read_bytes()) is None


@given(raw=strategies.binary(max_size=200), with_header=strategies.booleans())
def test_no_marker_leads_out_of_the_folders(raw: bytes, with_header: bool) -> None:
    found = folders_untrusted(unfinished._HEADER * with_header + raw)
    assert all(".." not in name and name.count("/") == 1 for name in found or ())
