"""``stress.bench disk``: what it compares and how it reports. Never how fast anything is."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
import warnings
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tools.bench.call_legs import KINDS, LOAD, STORE
from tests.support.threads_left import ending_threads
from tests.vllm.bench.bench_process import printed_bench, run_bench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from stress.bench import disk_sides
    from stress.bench.disk import Legs, drop_from_page_cache, figures, measure_size, ratios
    from stress.bench.disk_beside import FIO, LMCACHE, Fio, FioFailed, LMCacheSide
    from stress.bench.disk_sides import (
        ENCRYPTED,
        KVTIER_FS,
        RAW,
        DiskLeg,
        DiskSetup,
        DiskSide,
        Job,
        RawSide,
        VLLMSide,
        disk_side,
        fs_side,
        play,
    )
    from stress.bench.sides import KVTIER, VLLM, make_keys
from tests.support.patience import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BLOCK_BYTES = 64 << 10
SLOTS = 32
MAKERS: list[Callable[[DiskSetup], DiskSide]] = [
    VLLMSide,
    fs_side,
    disk_side,
    LMCacheSide,
    RawSide,
]


@pytest.fixture
def setup(tmp_path: Path) -> DiskSetup:
    """Slots of bytes that differ from one another."""
    slot_map = mmap.mmap(-1, SLOTS * BLOCK_BYTES)
    memory = SlotMemory(memoryview(slot_map), SLOTS, BLOCK_BYTES)
    for slot in range(SLOTS):
        memory.view(slot)[:] = bytes([slot + 1]) * BLOCK_BYTES
    return DiskSetup(tmp_path, memory, 4)


@pytest.fixture(params=MAKERS, ids=[VLLM, KVTIER_FS, KVTIER, LMCACHE, RAW])
def side(request: pytest.FixtureRequest, setup: DiskSetup) -> Iterator[DiskSide]:
    """Each side in turn."""
    built = request.param(setup)
    yield built
    built.close()


def jobs(*, size: int = 8, first: int = 1) -> list[Job]:
    """Return jobs over all slots, under keys of their own."""
    return [
        Job(
            first + start // size,
            tuple(make_keys(100 * first + start, size)),
            tuple(range(start, start + size)),
        )
        for start in range(0, SLOTS, size)
    ]


def test_a_side_brings_back_what_it_stored(side: DiskSide, setup: DiskSetup) -> None:
    before = bytes(setup.memory.buffer)
    play(side, STORE, jobs(), in_flight=2, busy=False)
    setup.memory.buffer[:] = bytes(len(before))
    play(side, LOAD, jobs()[::-1], in_flight=2, busy=True)
    assert bytes(setup.memory.buffer) == before


def test_a_raw_job_of_several_calls_ends_once_with_the_last_of_them(
    setup: DiskSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_sides, "CALL_BYTES", 3 * setup.memory.block_bytes)
    calls: list[int] = []
    move = disk_sides._move

    def counted(call: Any, descriptor: int, views: list[memoryview], at: int) -> None:
        calls.append(len(views))
        move(call, descriptor, views, at)

    monkeypatch.setattr(disk_sides, "_move", counted)
    side = RawSide(setup)
    keys, slots = tuple(make_keys(1, 8)), tuple(range(8))
    side.submit(STORE, Job(1, keys, slots))
    ended: list[int] = []

    def has_ended() -> bool:
        ended.extend(side.ended())
        return bool(ended)

    until(has_ended)
    side.close()
    assert (ended, sorted(calls)) == ([1], [2, 3, 3])


def test_a_load_of_what_was_never_stored_is_no_figure(setup: DiskSetup) -> None:
    """Else a tier that finds nothing would be the fastest."""
    for make in (VLLMSide, disk_side, LMCacheSide):
        side = make(setup)
        try:
            with pytest.raises(StoreFault, match="its log says why"):
                play(side, LOAD, jobs(), in_flight=2, busy=False)
        finally:
            side.close()


def test_kvtiers_folder_takes_more_legs_than_fit_and_has_the_last(setup: DiskSetup) -> None:
    side = disk_side(setup)
    try:
        for first in range(1, 60, 10):
            play(side, STORE, jobs(first=first), in_flight=4, busy=False)
            play(side, LOAD, jobs(first=first), in_flight=4, busy=False)
    finally:
        side.close()
    assert side.counters()["bytes_stored"] >= 6 * setup.leg_bytes
    assert sum(path.stat().st_size for path in side.folder.iterdir()) <= 2.5 * setup.leg_bytes


class SlowSide(DiskSide):
    """Ends one job at each second call, and notes how many were under way."""

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__("slow", setup)
        self.under_way: list[int] = []
        self.most = 0
        self.steps = 0
        self.submitted_in_step: list[int] = [0]

    def submit(self, kind: str, job: Job) -> None:
        self.under_way.append(job.number)
        self.most = max(self.most, len(self.under_way))
        self.submitted_in_step[-1] += 1

    def ended(self) -> Sequence[int]:
        return [self.under_way.pop(0)] if self.under_way and self.steps % 2 else []

    def end_step(self) -> None:
        self.steps += 1
        self.submitted_in_step.append(0)

    def close(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("busy", [False, True])
def test_a_leg_keeps_so_many_jobs_under_way_until_all_have_ended(
    busy: bool, setup: DiskSetup
) -> None:
    """A busy thread submits them as steps bring them: many at once would be its own pause."""
    side = SlowSide(setup)
    leg = play(side, STORE, jobs(size=2), in_flight=3, busy=busy)
    assert (side.most, side.under_way) == (3, [])
    assert max(side.submitted_in_step) == (1 if busy else 3)
    assert len(leg.job_seconds) == SLOTS // 2
    assert 0 < max(leg.job_seconds) <= leg.seconds
    assert 0 < leg.longest_pause_s <= leg.seconds


def measured(*rounds: dict[str, float]) -> Legs:
    """Return legs in which a side took so many seconds for everything in each round.

    kvtier's longest pause is 1, all others' are 10.
    """
    return {
        kind: {
            side: [
                DiskLeg(each[side], [each[side]], 1.0 if side == KVTIER else 10.0, 0.0)
                for each in rounds
            ]
            for side in rounds[0]
        }
        for kind in KINDS
    }


def ratios_of(found: Legs, block_bytes: int = BLOCK_BYTES) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in ratios(found, found, block_bytes)}


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    """A disk that slows down for all sides alike changes none of them."""
    found = measured(
        {VLLM: 8.0, KVTIER_FS: 8.0, KVTIER: 2.0, RAW: 2.0},
        {VLLM: 50.0, KVTIER_FS: 50.0, KVTIER: 10.0, RAW: 10.0},
        {VLLM: 6.0, KVTIER_FS: 6.0, KVTIER: 2.0, RAW: 2.0},
    )
    store = ratios_of(found)["store, times vLLM's GB/s"]
    assert store["of_runs"] == [4.0, 5.0, 3.0]
    assert (store["ratio"], store["holds"]) == (4.0, True)
    shown = figures(found[STORE][KVTIER], [], 10**9)
    assert (shown["GB/s"], shown["job p50, ms"], shown["GB/s, thread busy"]) == (0.5, 2000.0, None)


ONE = {VLLM: 4.0, KVTIER_FS: 4.0, KVTIER: 2.0, RAW: 1.0}
LARGE = 1 << 20


@pytest.mark.parametrize(
    ("rounds", "block_bytes", "name", "ratio", "bar", "holds"),
    [
        ([ONE], BLOCK_BYTES, "load, times vLLM's GB/s", 2.0, ">= 1.20", True),
        ([ONE], BLOCK_BYTES, "store, times vLLM's GB/s", 2.0, ">= 4.00", False),
        ([ONE], 2 * LARGE, "store, times vLLM's GB/s", 2.0, "", None),
        ([ONE], LARGE, "store, kvtier fs, times vLLM's GB/s", 1.0, ">= 1.00", True),
        ([ONE], BLOCK_BYTES, "store, share of raw's GB/s", 0.5, ">= 0.85", False),
        ([ONE | {FIO: 1.8}], BLOCK_BYTES, "store, share of raw's GB/s", 0.5, "", None),
        ([ONE | {FIO: 1.8}], BLOCK_BYTES, "load, share of fio's GB/s", 0.9, ">= 0.85", True),
        ([ONE | {LMCACHE: 1.0}], LARGE, "load, times LMCache's GB/s", 0.5, "", None),
        (
            # The best of each round, whoever that is.
            [ONE | {VLLM: 4.0}, ONE | {VLLM: 1.0, RAW: 4.0}, ONE | {VLLM: 4.0, RAW: 2.0}],
            LARGE,
            "store, share of the best of vLLM's and raw's GB/s",
            0.5,
            ">= 0.95",
            False,
        ),
        (
            [ONE | {LMCACHE: 0.5}],
            LARGE,
            "store, share of the best of vLLM's and LMCache's and raw's GB/s",
            0.25,
            ">= 0.95",
            False,
        ),
        ([ONE], BLOCK_BYTES, "store, longest pause, share of vLLM's", 0.1, "<= 0.25", True),
    ],
)
def test_bars_are_those_of_the_block_size_and_of_who_was_measured(
    rounds: list[dict[str, float]],
    block_bytes: int,
    name: str,
    ratio: float,
    bar: str,
    holds: bool | None,
) -> None:
    found = ratios_of(measured(*rounds), block_bytes)[name]
    assert (found["ratio"], found["bar"], found["holds"]) == (pytest.approx(ratio), bar, holds)


def test_what_lmcache_has_is_forgotten_after_each_round(setup: DiskSetup) -> None:
    """Its file has room for one leg, and nothing makes room by itself."""
    side = LMCacheSide(setup)
    try:
        for first in (1, 11, 21):
            play(side, STORE, jobs(first=first), in_flight=2, busy=False)
            play(side, LOAD, jobs(first=first), in_flight=2, busy=False)
            side.forget()
    finally:
        side.close()


def test_the_files_of_a_folder_are_dropped_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a load of what was opened without O_DIRECT would be measured from memory."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(bytes(4096))
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments[-1]))
    drop_from_page_cache(tmp_path)
    assert advised == [os.POSIX_FADV_DONTNEED]


def test_fio_moves_a_legs_bytes_where_there_is_one(setup: DiskSetup) -> None:
    if shutil.which("fio") is None:  # not kvtier's to install: the benchmark goes on without
        with pytest.raises(FioFailed, match="fio not found"):
            Fio(setup)
        return
    fio = Fio(setup)
    fio.run(STORE)
    fio.run(LOAD)
    assert (fio.folder / "file").stat().st_size == setup.leg_bytes


ASKED = Namespace(rounds=1, encryption=True, beside=None)


def test_all_sides_run_every_leg_and_leave_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without fio
    threads = ending_threads()
    found = measure_size(ASKED, tmp_path, 4 << 20, BLOCK_BYTES)
    for kind in KINDS:
        rows = found["figures"][kind]
        assert list(rows) == [VLLM, KVTIER_FS, KVTIER, ENCRYPTED, RAW]
        busy = [side for side, row in rows.items() if row["GB/s, thread busy"]]
        assert busy == [VLLM, KVTIER, ENCRYPTED]
        assert all(row["GB/s"] > 0 and row["job p50, ms"] > 0 for row in rows.values())
    assert found["fio"].startswith("fio not found")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0
    until(lambda: ending_threads() <= threads, threading.enumerate)


def test_bytes_that_were_not_stored_are_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = RawSide.submit

    def loads_nothing(side: RawSide, _kind: str, job: Job) -> None:
        submit(side, STORE, job)

    monkeypatch.setattr(RawSide, "submit", loads_nothing)
    with pytest.raises(StoreFault, match="raw: a load brought other bytes"):
        measure_size(ASKED, tmp_path, 2 << 20, BLOCK_BYTES)


@pytest.mark.one_release
@pytest.mark.slow
def test_the_command_reports_figures_and_bars(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    place = tmp_path / "place"
    place.mkdir()
    printed = printed_bench("explanation/disk-cost.md", "disk")
    options = ["--path", str(place), "--bytes", "4MiB", "--rounds", "1"]
    sizes = ["--block-bytes", "64KiB,128KiB"]
    shown = run_bench(tmp_path, *printed, *options, *sizes, "--json", str(report))
    assert list(place.iterdir()) == []
    data = json.loads(report.read_text())
    assert [size["block_bytes"] for size in data["sizes"]] == [64 << 10, 128 << 10]
    lines = ("store, GB/s", "load, job p99, ms", "opened with O_DIRECT", ">= 4.00")
    assert all(line in shown for line in lines)
    assert ("fio not found" in shown) is (shutil.which("fio") is None)
