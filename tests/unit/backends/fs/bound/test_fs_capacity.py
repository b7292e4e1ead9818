"""The fs backend with ``capacity_bytes``: what its engines store, lose, hear and say."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Outcome, StoreBlock, block_digest
from kvtier_backends.fs.bound import folder_bound as keeper_module
from kvtier_backends.fs.bound.protocol import REMOVED, SPACE, TERMS
from kvtier_backends.fs.bound.removals import Removals, RemovalsReader
from kvtier_backends.fs.bound.small_files import DaemonExecutor, SmallFiles
from kvtier_backends.fs.temporary import WriterProcess
from tests.support.folder_files import files_of
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, looks, pause, until_true
from tests.unit.backends._media import fill_with_files, tmpfs
from tests.unit.backends.fs._fs import (
    BLOCK_BYTES,
    CONTEXT,
    FILE_BYTES,
    ODD_NAMES,
    Fs,
    key_of,
    make_fs,
    open_fs,
)
from tests.unit.backends.fs.bound._timing import QUICK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio
BLOCKS = 64
CAPACITY = BLOCKS * FILE_BYTES
MAY_HANG = (
    "fstat",
    "listdir",
    "mkdir",
    "open",
    "rename",
    "rmdir",
    "scandir",
    "stat",
    "unlink",
    "utime",
)
STORES_BETWEEN_USES = 8
"""Far fewer than there is room for: what has just been used is none of the oldest then."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "Timing", lambda: QUICK)


@asynccontextmanager
async def bounded(root: Path, context: BackendContext = CONTEXT) -> AsyncIterator[Fs]:
    backend = make_fs(root, context, capacity_bytes=CAPACITY)
    await backend.open()
    try:
        yield Fs(backend)
    finally:
        await backend.close()


async def store_all(fs: Fs, numbers: range) -> None:
    """Store these, each again until there is room for it."""
    for number in numbers:
        for _ in looks():
            if await fs.store(number) is Outcome.DONE:
                break
            await anyio.to_thread.run_sync(pause)


def folder_bytes(root: Path) -> int:
    return sum(each.st_size for each in files_of(root, ".kv"))


async def test_a_folder_holds_no_more_than_its_capacity(tmp_path: Path) -> None:
    async with bounded(tmp_path / "kv") as fs:
        for number in range(3 * BLOCKS):
            await store_all(fs, range(number, number + 1))
            assert folder_bytes(tmp_path / "kv") <= CAPACITY
        assert folder_bytes(tmp_path / "kv") > CAPACITY // 2
        assert fs.count("blocks_evicted") >= 2 * BLOCKS
        assert await fs.load(3 * BLOCKS - 1) is Outcome.DONE


async def test_what_another_engine_has_used_stays(tmp_path: Path) -> None:
    """Victims are chosen by the uses of all engines, not by age alone."""
    used = range(8)
    async with bounded(tmp_path / "kv") as storing, bounded(tmp_path / "kv") as reading:
        await store_all(storing, range(BLOCKS // 2))
        for start in range(100, 100 + 2 * BLOCKS, STORES_BETWEEN_USES):
            for each in used:
                assert await reading.load(each) is Outcome.DONE, start
            drained = reading.backend._folder_bound._writer.uses
            await until_true(lambda drained=drained: not drained._used)
            terms = tmp_path / "kv" / SPACE / TERMS
            await until_true(lambda terms=terms: not list(terms.glob("*/uses-*")))
            await store_all(storing, range(start, start + STORES_BETWEEN_USES))
        assert storing.count("blocks_evicted") + reading.count("blocks_evicted") > BLOCKS


async def test_every_engine_that_announced_a_block_says_that_it_is_gone(tmp_path: Path) -> None:
    lost: dict[str, list[bytes]] = {"one": [], "other": []}
    async with bounded(tmp_path / "kv") as one, bounded(tmp_path / "kv") as other:
        one.backend.on_lost = lost["one"].extend
        other.backend.on_lost = lost["other"].extend
        await store_all(one, range(10))
        await store_all(other, range(10, 20))
        of_one, of_other = ({key_of(n) for n in part} for part in (range(10), range(10, 20)))
        # What the other stored may be heard of late, and then it is as recent as what follows.
        for start in range(100, 100 + 100 * BLOCKS, BLOCKS):
            await store_all(one, range(start, start + BLOCKS))
            if of_one <= {*lost["one"]} and of_other <= {*lost["other"]}:
                break
        await until_true(lambda: of_other <= {*lost["other"]})
        await until_true(lambda: of_one <= {*lost["one"]})
        assert not {*lost["other"]} & {key_of(n) for n in range(10)}, "announced by the other"


async def test_long_keys_are_lost_by_their_own_name(tmp_path: Path) -> None:
    """Their files have the name of a hash."""
    from kvtier_backends.fs.bound.removals import Announced
    from kvtier_backends.fs.layout import make_layout

    layout = make_layout("kvtier", str(tmp_path), CONTEXT)
    announced = Announced(layout)
    keys = [bytes(92), b"\1" * 64, b"\2" * 36]
    announced.add(keys)
    assert announced.of([layout.name(key) for key in keys]) == keys
    announced.forget(keys)
    assert announced.of([layout.name(key) for key in keys]) == []


async def test_a_folder_that_was_too_large_is_brought_within_its_bound(tmp_path: Path) -> None:
    backend = make_fs(tmp_path / "kv")
    fs = Fs(backend)
    await backend.open()
    await store_all(fs, range(2 * BLOCKS))
    await backend.close()
    async with bounded(tmp_path / "kv"):
        await until_true(lambda: folder_bytes(tmp_path / "kv") <= CAPACITY)


async def test_foreign_files_of_any_name_are_evicted(tmp_path: Path) -> None:
    """The name of one could once not be announced, and the engine never cleaned again."""
    async with bounded(tmp_path / "kv") as fs:
        await store_all(fs, range(1))
        leaf = fs.path(0).parent
    foreign = [leaf / os.fsdecode(name) for name in ODD_NAMES]
    for path in foreign:
        path.write_bytes(bytes(FILE_BYTES))
        os.utime(path, (1, 1))
    async with bounded(tmp_path / "kv") as fs:
        await store_all(fs, range(1, 2 * BLOCKS))
        assert not any(path.exists() for path in foreign)
        assert fs.count("space_failed") == 0
    (tmp_path / "space").mkdir()
    executor = DaemonExecutor(1, "names")
    space = SmallFiles(os.open(tmp_path / "space", os.O_RDONLY), executor, 0o700)
    removals, reader = Removals(), RemovalsReader()
    await removals.begin(space, 1)
    assert await reader.new(space) == []
    whole = [path.name for path in foreign if "\n" not in path.name]
    removals.note(whole)
    await removals.announce(space)
    assert await reader.new(space) == whole
    executor.shutdown()


async def test_namespaces_share_the_bound(tmp_path: Path) -> None:
    namespace = replace(CONTEXT.namespace, facts={"model_name": "org/other"})
    other_context = replace(CONTEXT, namespace=namespace)
    async with (
        bounded(tmp_path / "kv") as one,
        bounded(tmp_path / "kv", other_context) as other,
    ):
        for start in range(0, BLOCKS, 8):  # both together: twice what there is room for
            await store_all(one, range(start, start + 8))
            await store_all(other, range(start, start + 8))
            assert folder_bytes(tmp_path / "kv") <= CAPACITY


async def test_a_restarted_engine_stores_within_the_bound(tmp_path: Path) -> None:
    for life in range(3):
        async with bounded(tmp_path / "kv") as fs:
            await store_all(fs, range(life * BLOCKS, (life + 1) * BLOCKS))
            assert folder_bytes(tmp_path / "kv") <= CAPACITY


async def test_small_files_that_cannot_be_written_cost_stores_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file lies where the protocol's folder should be. It heals by itself."""
    monkeypatch.setattr(keeper_module, "ROOM_WAIT_S_MAX", 0.05)  # for room that does not come
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / SPACE).write_text("in the way")
    async with bounded(tmp_path / "kv") as fs:
        assert await fs.store(1) is Outcome.FULL
        assert await fs.load(1) is Outcome.ABSENT
        await until_true(lambda: fs.count("space_failed"))
        assert fs.count("stores_not_granted") == 1
        (tmp_path / "kv" / SPACE).unlink()
        monkeypatch.setattr(keeper_module, "ROOM_WAIT_S_MAX", PATIENCE_S)
        await store_all(fs, range(1, 2))
        assert await fs.load(1) is Outcome.DONE


@needs("mount")
async def test_a_filesystem_that_is_full_is_given_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the lease can be written then; the bound is larger than what is there.

    Its only engine leads again once its own lease has expired.
    """
    soon = replace(QUICK, lease_s=0.2, dead_s=0.3)
    monkeypatch.setattr(keeper_module, "Timing", lambda: soon)
    with tmpfs(tmp_path / "small", f"{CAPACITY // 2}") as small:
        async with bounded(small / "kv") as fs:
            there_is_room_for = BLOCKS // 2
            stored = there_is_room_for + there_is_room_for // 4
            await store_all(fs, range(stored))
            assert await fs.load(stored - 1) is Outcome.DONE
            assert fs.count("blocks_evicted") > 0


@needs("mount")
async def test_a_filesystem_without_inodes_is_given_some_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block takes up to three of them, for two are folders, which evictions leave behind."""
    soon = replace(QUICK, lease_s=0.2, dead_s=0.3)
    monkeypatch.setattr(keeper_module, "Timing", lambda: soon)
    with tmpfs(tmp_path / "small", "16m", inodes=2 * BLOCKS) as small:
        async with bounded(small / "kv") as fs:
            await store_all(fs, range(3 * BLOCKS))
            assert await fs.load(3 * BLOCKS - 1) is Outcome.DONE
            assert folder_bytes(small / "kv") > CAPACITY // 8


@needs("mount")
@pytest.mark.parametrize("was_bounded", [True, False])
async def test_an_engine_that_starts_without_inodes_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_bounded: bool
) -> None:
    """It can make no term, nor even the folder of the protocol, where there was no bound before."""
    soon = replace(QUICK, lease_s=0.2, dead_s=0.3)
    monkeypatch.setattr(keeper_module, "Timing", lambda: soon)
    with tmpfs(tmp_path / "small", "16m", inodes=2 * BLOCKS) as small:
        async with bounded(small / "kv") if was_bounded else open_fs(small / "kv") as fs:
            await store_all(fs, range(BLOCKS // 4))
        fill_with_files(small)
        async with bounded(small / "kv") as fs:
            await store_all(fs, range(100, 104))
            assert await fs.load(103) is Outcome.DONE
            assert fs.count("blocks_evicted") < BLOCKS // 4


async def test_a_quota_that_small_files_fit_in_makes_room_for_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease could be written all the time, and nothing else was asked whether there is room."""
    quota, real = CAPACITY // 2, os.pwritev

    def write(*given: Any) -> int:
        if folder_bytes(tmp_path / "kv") + FILE_BYTES > quota:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(*given)

    monkeypatch.setattr(os, "pwritev", write)
    async with bounded(tmp_path / "kv") as storing, bounded(tmp_path / "kv") as other:
        for start in range(0, BLOCKS // 2, 8):  # whoever of them cleans
            await store_all(storing, range(start, start + 8))
            await store_all(other, range(100 + start, 108 + start))
        assert await other.load(107 + start) is Outcome.DONE
        assert folder_bytes(tmp_path / "kv") > quota // 2


def is_removed(folder: Path) -> bool:
    """Remove what there is of a folder; tell whether that was all."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


async def test_a_folder_that_is_deleted_is_begun_anew(tmp_path: Path) -> None:
    async with bounded(tmp_path / "kv") as fs:
        await store_all(fs, range(4))
        (tmp_path / "kv" / SPACE).rename(tmp_path / "gone")
        # The engine's own account may be written just now, into the folder by its descriptor.
        await until_true(lambda: is_removed(tmp_path / "gone"))
        await store_all(fs, range(4, 8))
        assert await fs.load(7) is Outcome.DONE


class WatchedOs:
    """Notes the calls on files below a folder, each with whether the loop's thread made it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = set[tuple[str, bool]]()
        self._root = os.fspath(root)
        self._loops_thread = threading.get_ident()
        for name in MAY_HANG:
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name: str, real: Any, *given: Any, **named: Any) -> Any:
        if any(map(self._is_below, (*given, *named.values()))):
            self.calls.add((name, threading.get_ident() == self._loops_thread))
        return real(*given, **named)

    def _is_below(self, place: Any) -> bool:
        if isinstance(place, int):
            with suppress(OSError):
                place = os.fspath(Path(f"/proc/self/fd/{place}").readlink())
        return isinstance(place, str) and place.startswith(self._root)


async def test_rounds_wait_for_the_filesystem_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that hangs on the event loop delays every load: once one did, in each round."""
    async with bounded(tmp_path / "kv") as fs:
        watched = WatchedOs(tmp_path / "kv", monkeypatch)
        await store_all(fs, range(2 * BLOCKS))
        assert fs.count("blocks_evicted") > 0
        (tmp_path / "kv" / SPACE).rename(tmp_path / "kv" / "gone")
        await until_true(lambda: is_removed(tmp_path / "kv" / "gone"))
        watched.calls.clear()  # of the two lines above
        await store_all(fs, range(2 * BLOCKS, 3 * BLOCKS))
    assert {name for name, is_on_loop in watched.calls if is_on_loop} == set()
    assert {name for name, _ in watched.calls} >= {"fstat", "listdir", "open", "rename", "unlink"}


async def test_a_closed_engine_hands_its_room_and_its_term_over(tmp_path: Path) -> None:
    async with bounded(tmp_path / "kv") as one:
        await store_all(one, range(4))
    terms = tmp_path / "kv" / SPACE / TERMS
    (term,) = terms.iterdir()
    assert b'"released":true' in (term / "lease").read_bytes()
    assert all((grant / "receipt").exists() for grant in term.glob("grant-*"))


async def test_what_a_killed_cleaner_left_unfinished_goes_with_its_term(tmp_path: Path) -> None:
    """A manifest of a million blocks has 28 MB; each kill in the midst of one left as much."""
    async with bounded(tmp_path / "kv") as fs:
        await store_all(fs, range(1))
    space = tmp_path / "kv" / SPACE
    writer = WriterProcess("0" * 12, 1, 12)
    left = [
        space / f".manifest.{writer}-1.tmp",
        space / REMOVED / f".0000000001-0000000007.{writer}-2.tmp",
    ]
    command = space / REMOVED / f".0000000000-1234567890.{writer}-3.tmp"  # kvtier evict writes it
    for each in (*left, command):
        each.write_bytes(b"half")
    async with bounded(tmp_path / "kv") as fs:
        await until_true(lambda: not any(each.exists() for each in left))
        assert command.exists()


@pytest.mark.parametrize(
    "key", [b"h" * 32 + (10**5).to_bytes(4, "big"), b"h" + bytes(4)], ids=["group", "hash"]
)
async def test_a_block_whose_folder_has_no_number_costs_only_itself(
    key: bytes, tmp_path: Path
) -> None:
    """Its store once went on for ever: there was room, and no grant."""
    backend = make_fs(tmp_path / "kv", capacity_bytes=CAPACITY, layout="vllm")
    await backend.open()
    fs = Fs(backend)
    try:
        view = fs.view()
        good = StoreBlock(bytes(36), view, block_digest(bytes(36), view))
        bad = StoreBlock(key, view, block_digest(key, view))
        with anyio.fail_after(PATIENCE_S):
            while await backend.store([good]) != [Outcome.DONE]:
                await anyio.to_thread.run_sync(pause)
            assert await backend.store([good, bad, good]) == [
                Outcome.DONE,
                Outcome.FAILED,
                Outcome.DONE,
            ]
        assert fs.count("stores_failed") == 1
    finally:
        await backend.close()


def test_a_capacity_of_few_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"capacity_bytes=4096 is less than {BLOCKS} blocks"):
        make_fs(tmp_path / "kv", capacity_bytes=4096)
    assert BLOCK_BYTES < FILE_BYTES
    assert not (tmp_path / "kv").exists()


async def test_compressed_files_count_as_what_they_are(tmp_path: Path) -> None:
    """More of them have room, and never too many."""
    root = tmp_path / "kv"
    backend = make_fs(root, capacity_bytes=CAPACITY, compression="bitplane-zstd")
    await backend.open()
    try:
        fs = Fs(backend)
        for number in range(3 * BLOCKS):
            await store_all(fs, range(number, number + 1))
            assert folder_bytes(root) <= CAPACITY
        keeper = backend._folder_bound
        assert keeper is not None
        account = keeper.cleaner.account
        await until_true(lambda: account.manifest.bytes == folder_bytes(root))
        assert 5 * account.manifest.bytes == 4 * FILE_BYTES * len(
            account.manifest
        )  # 4 pages, not 5
        assert account.manifest.bytes > CAPACITY // 2
    finally:
        await backend.close()
