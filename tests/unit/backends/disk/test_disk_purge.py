"""What is purged is found by nobody again, and its bytes are gone; the rest is as it was."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk import backend as backend_module
from kvtier_backends.disk import format as fmt
from kvtier_backends.disk.log.regions import RegionState
from kvtier_backends.disk.offline import purge_requests, purging, region_files
from kvtier_backends.disk.offline.fsck import Checker
from kvtier_backends.disk.offline.inspection import Folder
from kvtier_backends.disk.offline.purge_requests import NotAnswered, ask_engine
from kvtier_backends.disk.offline.purging import Purged, RegionSelection, purge_folder
from tests.support.patience import until_true
from tests.support.patient_backends import NEVER_S
from tests.unit.backends.disk._disk import (
    CAPACITY_BYTES,
    CONTEXT,
    OTHER_CONTEXT,
    data_of,
    folder_bytes,
    key_of,
    key_options,
    make_disk,
    open_disk,
)

if TYPE_CHECKING:
    from kvtier_backends.disk.log.block_log import BlockLog

pytestmark = pytest.mark.anyio
OWN, OTHER = fmt.namespace_digest(CONTEXT), fmt.namespace_digest(OTHER_CONTEXT)
ALL = RegionSelection(1 << 40, all_of_it=True)
DAMAGED_ANSWERS = [b"\x9c", b'{"error": "\x9c"}', b"[" * 60_000, b"{}", b""]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine looks for requests by itself, and soon."""
    monkeypatch.setattr(backend_module, "TICK_S", 0.01)


async def fill(path: Path, numbers: range, stored_s: int, **options: Any) -> None:
    async with open_disk(path, **options) as disk:
        disk.clock.now_s = stored_s
        for number in numbers:
            assert await disk.store(number) == [Outcome.DONE]


def purge(path: Path, selection: RegionSelection, *, dry: bool = False) -> int:
    """Purge a folder that nobody uses; returns how many blocks went."""
    with Folder(str(path), writable=not dry) as folder:
        purged = purge_folder(folder, folder.files.numbers(), selection, lambda: None, dry=dry)
    assert purged.regions_failed == 0
    return count(purged)


def count(purged: Purged) -> int:
    return sum(keys.count() for keys in purged.kinds.values())


def bytes_of(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.glob("segment-*.kv")))


def on_disk(path: Path, numbers: range) -> list[int]:
    """Return the blocks whose bytes or keys are in the files. Those of block 0 are zeros."""
    raw = bytes_of(path)
    return [n for n in numbers if key_of(n) in raw or (n and data_of(n) in raw)]


def check_sound(path: Path) -> int:
    with Folder(str(path)) as folder:
        checked = Checker(folder, None, repair=False).run(folder.files.numbers(), lambda: None)
    assert checked.problems == []
    return checked.blocks + checked.blocks_unverified


# --- a folder that nobody uses ---


@pytest.mark.parametrize("kind", ["plain", "encrypted, without the key", "no holes here"])
async def test_purge_by_age_takes_the_old_blocks_and_their_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    options = key_options(tmp_path, *["11" * 32] * kind.startswith("encrypted"))
    if kind == "no holes here":  # then zeros are written
        no_holes = OSError(errno.EOPNOTSUPP, kind)
        monkeypatch.setattr(region_files, "punch_hole", lambda *_: no_holes)
    await fill(path, range(30), 1000, **options)
    await fill(path, range(30, 70), 2000, **options)
    assert purge(path, RegionSelection(1001), dry=True) == 30
    assert len(on_disk(path, range(70))) == 70
    assert purge(path, RegionSelection(1001)) == 30
    assert on_disk(path, range(70)) == list(range(30, 70))
    assert check_sound(path) == 40
    async with open_disk(path, **options) as disk:
        assert await disk.found(range(70)) == list(range(30, 70))
        assert disk.lost == []
    assert purge(path, RegionSelection(1001)) == 0


async def test_purge_of_all_leaves_no_byte_and_gives_the_disk_space_back(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, range(100), 1000)
    with (path / "segment-00000.kv").open("r+b") as file:
        file.write(b"a header that nobody can read")
    purge(path, ALL)
    assert set(bytes_of(path)) == {0}
    assert (path / "segment-00000.kv").stat().st_blocks == 0
    async with open_disk(path) as disk:
        assert await disk.found(range(100)) == []
        assert await disk.store(1) == [Outcome.DONE]
        assert await disk.load(1) == [Outcome.DONE]


async def test_older_copies_and_removed_blocks_go_too(tmp_path: Path) -> None:
    """A restart would find them again: removing only forgets."""
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        disk.clock.now_s = 1000
        await disk.store(*range(30))
        await disk.remove(*range(20))
        await disk.store(*range(10))
    assert purge(path, RegionSelection(1001)) == 30
    assert on_disk(path, range(30)) == []
    async with open_disk(path) as disk:
        assert await disk.found(range(30)) == []


async def test_bytes_of_the_time_before_go_as_well(tmp_path: Path) -> None:
    """A region that was opened anew still has blocks that no table names any more."""
    path = tmp_path / "kv"
    await fill(path, range(10), 1000)
    with Folder(str(path), writable=True) as folder:
        folder.files.write(0, 0, bytes(4096))
    await fill(path, range(50, 53), 2000, context=OTHER_CONTEXT)
    assert on_disk(path, range(10))
    assert purge(path, RegionSelection(1500)) == 0
    assert on_disk(path, range(10)) == []
    async with open_disk(path, OTHER_CONTEXT) as disk:
        assert await disk.found(range(60)) == [50, 51, 52]


# --- a folder that an engine uses ---


async def ask(path: Path, selection: RegionSelection) -> int:
    """Ask the engine, and return how many blocks went."""
    answer = await asyncio.to_thread(ask_engine, str(path), selection, lambda: None)
    assert answer is not None
    rows, failed = answer
    assert failed == 0
    return sum(row[3] for row in rows)


async def test_a_live_engine_forgets_tells_and_never_finds_them_again(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        disk.clock.now_s = 1000
        await disk.store(*range(30))
        disk.clock.now_s = 2000
        await disk.store(*range(30, 60))
        assert await ask(path, RegionSelection(1001)) == 30
        assert sorted(disk.lost) == sorted(key_of(n) for n in range(30))
        assert disk.count("blocks_purged") == 30
        assert await disk.found(range(60)) == list(range(30, 60))
        assert on_disk(path, range(60)) == list(range(30, 60))
        assert {file.name for file in path.iterdir()} == {"lock", "superblock", "segment-00000.kv"}
        assert await disk.store(*range(20)) == [Outcome.DONE] * 20
        assert await disk.found(range(60)) == [*range(20), *range(30, 60)]
    async with open_disk(path) as disk:
        assert await disk.found(range(60)) == [*range(20), *range(30, 60)]


async def test_a_live_engine_purges_another_ones_blocks(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, range(40, 60), 1000, context=OTHER_CONTEXT)
    async with open_disk(path) as disk:
        await disk.store(*range(20))
        assert await ask(path, RegionSelection(1 << 40, OTHER)) == 20
        assert disk.lost == []
        assert await disk.found(range(60)) == list(range(20))
        assert on_disk(path, range(60)) == list(range(20))


async def test_stores_and_loads_go_on_while_all_is_purged_again_and_again(tmp_path: Path) -> None:
    """Only blocks that were purged may be missed, and none may come back."""
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        capacity = disk.capacity
        resident: set[int] = set()
        number = purges = 0
        asking: asyncio.Task[int] | None = None
        while purges < 6 or number < 3 * capacity:
            if asking is None or asking.done():
                purges += 1
                asking = asyncio.ensure_future(ask(path, ALL._replace(all_of_it=False)))
            numbers = range(number, number + 8)
            number += 8
            excess = max(0, len(resident) + 8 - capacity)
            gone = sorted(resident)[:excess]
            await disk.remove(*gone)
            stored = await disk.store(*numbers)
            resident = (resident | set(numbers)) - set(gone)
            lost = set(disk.lost)
            resident = {n for n in resident if key_of(n) not in lost}
            loaded = await disk.load(*numbers)
            assert set(loaded) <= {Outcome.DONE, Outcome.ABSENT}, "erased while it was read"
            missed = {n for n, o in zip(numbers, loaded, strict=True) if o is not Outcome.DONE}
            assert set(stored) <= {Outcome.DONE, Outcome.FULL}
            full = {n for n, o in zip(numbers, stored, strict=True) if o is Outcome.FULL}
            assert {key_of(n) for n in missed - full} <= set(disk.lost)
            if asking.done():  # otherwise its files come and go
                assert folder_bytes(path) <= CAPACITY_BYTES
        await asyncio.gather(*([asking] if asking else []))
        assert await ask(path, ALL) >= 0
        assert await disk.found(range(number)) == []
        assert set(bytes_of(path)) == {0}
    check_sound(path)
    async with open_disk(path) as disk:
        assert await disk.found(range(number)) == []


def begin_reclaim(log: BlockLog) -> int:
    """Begin to reclaim a region, which is read meanwhile; returns it."""
    region = log.regions.victim()
    assert region is not None
    log.regions.begin_reclaim(region)
    log.regions.pin(region)
    return region


async def test_a_block_that_is_reinserted_meanwhile_goes_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read before the purge, and would be written after it: the purge waits or repeats."""
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        log = disk.log
        disk.clock.now_s = 1000
        await disk.store(*range(40))
        await disk.come_to_rest()
        region = begin_reclaim(log)
        real, looks = log.regions.count_in, 0

        def count_in(state: RegionState) -> int:
            nonlocal looks
            looks += state is RegionState.RECLAIMING
            return real(state)

        monkeypatch.setattr(log.regions, "count_in", count_in)
        asking = asyncio.ensure_future(ask(path, RegionSelection(1001)))
        await until_true(lambda: looks > 3 or asking.done())  # one more each time it has waited
        assert not asking.done(), "a region is being reclaimed"
        assert disk.lost == []
        log.lose(log.index.keys_of(region), "blocks_dropped")
        log.regions.unpin(region)
        assert log.regions.state(region) is RegionState.FREE
        assert await asking == 40
        assert on_disk(path, range(40)) == []


async def test_a_log_that_never_rests_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "QUIET_WAIT_S_MAX", 0.05)
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(40))
        begin_reclaim(disk.log)
        with pytest.raises(NotAnswered, match="did not come to rest"):
            await ask(tmp_path / "kv", ALL)
        assert await disk.load(1) == [Outcome.DONE]


async def test_a_purge_keeps_the_folder_claimed_until_its_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would erase what the next engine puts there."""
    entered, release = threading.Event(), threading.Event()
    real = purging.purge_region

    def hang(*arguments: Any, dry: bool) -> None:
        entered.set()
        release.wait()
        real(*arguments, dry=dry)

    monkeypatch.setattr(purging, "purge_region", hang)
    monkeypatch.setattr(backend_module, "CLOSE_TIMEOUT_S_MAX", 0.01)
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1)
        asking = asyncio.get_running_loop().run_in_executor(
            None, ask_engine, str(tmp_path / "kv"), ALL, lambda: None
        )
        await asyncio.to_thread(entered.wait)
        await disk.backend.close()
        with pytest.raises(ConfigError, match="in use"):
            make_disk(tmp_path / "kv")
        release.set()
        assert await asking is None, "it cannot answer any more"
    for thread in threading.enumerate():
        if thread.name.endswith("-release"):
            await asyncio.to_thread(thread.join)
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.store(2) == [Outcome.DONE]


# --- requests ---


async def test_requests_that_make_no_sense_are_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "TICK_S", NEVER_S)  # the test ticks
    path = tmp_path / "kv"
    good = {"before_s": 1 << 40, "namespace": None, "all_of_it": False, "until_s": 1 << 40}
    bad: list[Any] = [
        {},
        [],
        {**good, "more": 1},
        {**good, "before_s": "1"},
        {**good, "before_s": -1},
        {**good, "namespace": "../x"},
        {**good, "until_s": 1},
    ]
    async with open_disk(path) as disk:
        await disk.store(1)
        for place, request in enumerate(bad):
            write(path / f"purge-{place:032x}.json", json.dumps(request))
        write(path / f"purge-{100:032x}.json", "{" * 100_000)
        write(path / f"purge-{101:032x}.json", json.dumps(good), mode=0o666)
        (path / f"purge-{105:032x}.json").write_bytes(b'{"before_s": "\x9c')
        (path / f"purge-{105:032x}.json").chmod(0o600)
        (path / f"purge-{102:032x}.json").symlink_to(path / "elsewhere")
        os.mkfifo(path / f"purge-{103:032x}.json")
        write(path / "purge-me.json", json.dumps(good))
        await disk.backend.tick()
        assert [file.name for file in path.glob("purge-*")] == ["purge-me.json"]
        answers = list(path.glob("purged-*"))
        assert len(answers) == len(bad) + 5, "whoever asked must not wait for ever"
        for void in answers:
            assert "came too late" in json.loads(void.read_text())["error"]
            void.unlink()
        assert await disk.load(1) == [Outcome.DONE]
        write(path / f"purge-{104:032x}.json", json.dumps(good))
        await disk.backend.tick()
        assert await disk.load(1) == [Outcome.ABSENT]
        (answer,) = path.glob("purged-*")
        assert stat.S_IMODE(answer.stat().st_mode) == 0o600
        os.utime(answer, (1, 1))
        await disk.backend.tick()
        assert not answer.exists(), "nobody wanted it"


@pytest.mark.parametrize("ahead_h", [6, -6])
async def test_an_answer_waits_whatever_this_hosts_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_h: int
) -> None:
    """The filesystem may have a clock of its own. Hours behind, it had answers removed at once."""
    path, real = tmp_path / "kv", time.time
    async with open_disk(path) as disk:
        monkeypatch.setattr(time, "time", lambda: real() + 3600 * ahead_h)
        until_s = int(time.time()) + 60
        asked = {"before_s": 1, "namespace": None, "all_of_it": True, "until_s": until_s}
        write(path / f"purge-{1:032x}.json", json.dumps(asked))
        for _ in range(2):
            await disk.backend.tick()
        (answer,) = path.glob("purged-*")
        long_ago_s = answer.stat().st_mtime - purge_requests.LEFT_FOR_S_MAX - 60
        os.utime(answer, (long_ago_s, long_ago_s))
        await disk.backend.tick()
        assert not answer.exists(), "nobody wanted it"


def write(path: Path, text: str, mode: int = 0o600) -> None:
    unfinished = path.with_name("unfinished")
    unfinished.write_text(text)
    unfinished.chmod(mode)
    unfinished.replace(path)


@pytest.mark.parametrize(
    ("is_accepted", "answer", "said"),
    [
        (False, None, "did not accept the request"),
        (True, None, "accepted the request and has not reported"),
        *((True, text, "is damaged") for text in DAMAGED_ANSWERS),
    ],
)
async def test_an_engine_that_hangs_or_answers_what_makes_no_sense_is_reported_at_once(
    is_accepted: bool,
    answer: bytes | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(purge_requests, "ACCEPTED_WITHIN_S_MAX", 0.0)
    monkeypatch.setattr(purge_requests, "DONE_WITHIN_S_MAX", 0.0)
    path = tmp_path / "kv"
    backend = make_disk(path)  # claimed, and not open: nobody looks for requests

    def accept(request: str, _: object) -> None:
        if answer is not None:
            file = Path(request.replace("/purge-", "/purged-"))
            file.write_bytes(answer)
            file.chmod(0o600)

    if is_accepted:
        monkeypatch.setattr(purge_requests, "_write", accept)
    with pytest.raises(NotAnswered, match=f"process {os.getpid()} {said}"):
        await ask(path, ALL)
    assert list(path.glob("*purge*")) == [], "it was withdrawn"
    await backend.close()


async def test_an_engine_that_ends_instead_of_answering_is_no_error(tmp_path: Path) -> None:
    """The command does it itself then."""
    path = tmp_path / "kv"
    backend = make_disk(path)
    asked = threading.Event()
    asking = asyncio.get_running_loop().run_in_executor(None, ask_engine, str(path), ALL, asked.set)
    await asyncio.to_thread(asked.wait)
    await backend.close()
    assert await asking is None
    assert list(path.glob("*purge*")) == []


async def test_what_blocks_of_another_size_left_behind_the_last_slot_is_erased(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kv"
    async with open_disk(path, region_bytes=16 * fmt.PAGE_BYTES) as disk:
        await disk.store(1, 2)
    left = b"of another model" * 64
    with Folder(str(path), writable=True) as folder:
        report = folder.inspect(0)
        assert report.geometry is not None
        end = report.geometry.slot_at(report.geometry.slots)
        assert end + len(left) <= folder.files.region_bytes, "no room behind the last slot"
        folder.files.write(0, end, left)
    assert left in (path / "segment-00000.kv").read_bytes()
    with Folder(str(path), writable=True) as folder:
        purge_folder(folder, [0], RegionSelection(0), lambda: None, dry=False)
    assert left not in (path / "segment-00000.kv").read_bytes()
    async with open_disk(path, region_bytes=16 * fmt.PAGE_BYTES) as disk:
        assert await disk.found([1, 2]) == [1, 2]
