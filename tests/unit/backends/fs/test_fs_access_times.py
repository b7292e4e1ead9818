"""A hit is to be seen by whoever cleans a folder by the times of its files."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs import access_times
from kvtier_backends.fs.access_times import PAUSE_S, AccessTimes
from tests.support.needs import needs
from tests.unit.backends._media import mount, tmpfs
from tests.unit.backends.fs._fs import open_fs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
HOUR_NS = 3600 * 10**9
LONG_AGO = (1_000_000_000, 1_500_000_000)  #: read, written


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@needs("mount")
@pytest.mark.parametrize("option", ["noatime", "relatime"])
@pytest.mark.parametrize("layout", ["kvtier", "vllm"])
async def test_the_oldest_by_access_is_what_nobody_has_read(
    layout: str, option: str, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "mounted", "8m") as mounted:
        mount("-o", f"remount,{option}", mounted)
        async with open_fs(mounted / "kv", layout=layout) as fs:
            before = {}
            for number in range(4):
                await fs.store(number)
                now_ns = fs.path(number).stat().st_mtime_ns
                before[number] = (now_ns - HOUR_NS, now_ns - 2 * HOUR_NS)
                # Read since it was written, and less than a day ago: relatime keeps that.
                os.utime(fs.path(number), ns=before[number])
            for number in (1, 3):
                assert await fs.load(number) is Outcome.DONE
            after = {number: fs.path(number).stat() for number in range(4)}
    for number, (read_ns, written_ns) in before.items():
        assert (after[number].st_atime_ns > read_ns) is (number in (1, 3))
        assert after[number].st_mtime_ns == written_ns


def test_a_files_time_is_set_once_a_minute_at_most(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "block"
    path.write_bytes(b"x")
    times = AccessTimes(clock)
    descriptor = os.open(path, os.O_RDONLY)

    def is_set() -> bool:
        os.utime(path, LONG_AGO)
        times.note_hit("block", descriptor)
        return path.stat().st_atime > LONG_AGO[0]

    assert is_set()
    clock.now_s += PAUSE_S / 2
    assert not is_set()
    clock.now_s += PAUSE_S / 2
    assert is_set(), "hits in between do not put it off"
    os.close(descriptor)


@pytest.mark.parametrize("ahead_s", [0, PAUSE_S / 2, -2 * PAUSE_S, 2 * PAUSE_S])
def test_a_time_that_is_set_is_left_as_it_is(ahead_s: float, tmp_path: Path) -> None:
    """But not one that lies in the future, as another clock sees it."""
    path = tmp_path / "block"
    path.write_bytes(b"x")
    given_ns = time.time_ns() + int(ahead_s * 1e9)
    os.utime(path, ns=(given_ns, 0))
    descriptor = os.open(path, os.O_RDONLY)
    AccessTimes(Clock()).note_hit("block", descriptor)
    os.close(descriptor)
    assert (path.stat().st_atime_ns == given_ns) is (abs(ahead_s) < PAUSE_S)


@pytest.mark.parametrize("ahead_h", [6, -6])
def test_a_hit_is_as_recent_as_what_the_server_writes_then(
    ahead_h: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleaners would remove it before what was stored after it, or keep it for hours longer."""
    path, other = tmp_path / "block", tmp_path / "other"
    path.write_bytes(b"x")
    os.utime(path, LONG_AGO)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
    now_ns = time.time_ns() + ahead_h * HOUR_NS
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    AccessTimes(Clock()).note_hit("block", descriptor)
    other.touch()
    os.close(descriptor)
    assert abs(path.stat().st_atime_ns - other.stat().st_mtime_ns) < HOUR_NS
    assert path.stat().st_mtime == LONG_AGO[1]


def test_only_so_many_files_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_times, "FILES_MAX", 8)
    times = AccessTimes(Clock())
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for number in range(100):
        times.note_hit(str(number), descriptor)
    assert len(times._last_set) == 8
    os.close(descriptor)


def test_a_file_whose_time_cannot_be_set_is_read_all_the_same() -> None:
    AccessTimes().note_hit("gone", -1)
