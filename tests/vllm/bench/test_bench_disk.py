"""``stress.bench disk``: what it compares and how it reports. Never how fast anything is."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.slot_memory import SlotMemory
from stress.bench.__main__ import main
from tests.support.threads_left import ending_threads
from tests.vllm.bench.bench_process import Bench, start_bench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from stress.bench import disk_page_cache, disk_raw
    from stress.bench.disk import (
        KINDS,
        LOAD,
        STORE,
        DiskBenchOptions,
        DiskMeasured,
        Round,
        measure,
    )
    from stress.bench.disk_figures import gb_per_s, job_ms, ratios
    from stress.bench.disk_fio import FIO, Fio, FioFailed
    from stress.bench.disk_legs import DiskLeg, play
    from stress.bench.disk_lmcache import LMCACHE, LMCacheSide
    from stress.bench.disk_raw import RAW, RawSide
    from stress.bench.disk_sides import (
        ENCRYPTED,
        KVTIER_FS,
        DiskSetup,
        DiskSide,
        FsSide,
        Job,
        KVTierSide,
        VLLMSide,
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
    FsSide,
    KVTierSide,
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
    return DiskSetup(tmp_path, memory, memoryview(slot_map).cast("B", (SLOTS, BLOCK_BYTES)), 4)


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
    before = bytes(setup.view)
    play(side, side.store, jobs(), in_flight=2, busy=False)
    setup.view.cast("B")[:] = bytes(len(before))
    play(side, side.load, jobs()[::-1], in_flight=2, busy=True)
    assert bytes(setup.view) == before


def test_a_raw_job_of_several_calls_ends_once_with_the_last_of_them(
    setup: DiskSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_raw, "CALL_BYTES", 3 * setup.memory.block_bytes)
    calls: list[int] = []
    move = disk_raw._move

    def counted(call: Any, descriptor: int, views: list[memoryview], at: int) -> None:
        calls.append(len(views))
        move(call, descriptor, views, at)

    monkeypatch.setattr(disk_raw, "_move", counted)
    side = RawSide(setup)
    keys, slots = tuple(make_keys(1, 8)), tuple(range(8))
    side.store(Job(1, keys, slots))
    ended: list[int] = []

    def has_ended() -> bool:
        ended.extend(side.ended())
        return bool(ended)

    until(has_ended)
    side.close()
    assert (ended, sorted(calls)) == ([1], [2, 3, 3])


def test_a_load_of_what_was_never_stored_is_no_figure(setup: DiskSetup) -> None:
    """Else a tier that finds nothing would be the fastest."""
    for make in (VLLMSide, KVTierSide, LMCacheSide):
        side = make(setup)
        try:
            with pytest.raises(StoreFault, match="its log says why"):
                play(side, side.load, jobs(), in_flight=2, busy=False)
        finally:
            side.close()


def test_kvtiers_folder_takes_more_legs_than_fit_and_has_the_last(setup: DiskSetup) -> None:
    side = KVTierSide(setup)
    try:
        for first in range(1, 60, 10):
            play(side, side.store, jobs(first=first), in_flight=4, busy=False)
            play(side, side.load, jobs(first=first), in_flight=4, busy=False)
    finally:
        side.close()
    assert side.counters()["bytes_stored"] >= 6 * setup.leg_bytes
    assert sum(path.stat().st_size for path in side.folder.iterdir()) <= 2.5 * setup.leg_bytes


def test_what_vllm_has_stored_takes_no_room_after_a_round_and_its_files_stay(
    setup: DiskSetup,
) -> None:
    """To delete them would slow down those that are made next, for minutes."""
    side = VLLMSide(setup)
    try:
        play(side, side.store, jobs(), in_flight=2, busy=False)
        files = list(side.folder.rglob("*.bin"))
        assert len(files) == SLOTS
        side.forget()
        assert [path.stat().st_size for path in files] == [0] * SLOTS
    finally:
        side.close()


class SlowSide(DiskSide):
    """Ends one job at each second call, and notes how many were under way."""

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__("slow", setup)
        self.under_way: list[int] = []
        self.most = 0
        self.steps = 0
        self.submitted_in_step: list[int] = [0]

    def store(self, job: Job) -> None:
        self.under_way.append(job.number)
        self.most = max(self.most, len(self.under_way))
        self.submitted_in_step[-1] += 1

    def load(self, job: Job) -> None:
        self.store(job)

    def ended(self) -> Sequence[int]:
        return [self.under_way.pop(0)] if self.under_way and self.steps % 2 else []

    def end_step(self) -> None:
        self.steps += 1
        self.submitted_in_step.append(0)

    @property
    def is_direct(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("busy", [False, True])
def test_a_leg_keeps_so_many_jobs_under_way_until_all_have_ended(
    busy: bool, setup: DiskSetup
) -> None:
    side = SlowSide(setup)
    leg = play(side, side.store, jobs(size=2), in_flight=3, busy=busy)
    assert side.most == 3
    assert side.under_way == []
    assert len(leg.job_seconds) == SLOTS // 2
    assert 0 < max(leg.job_seconds) <= leg.seconds
    assert 0 < leg.longest_pause_s <= leg.seconds


def test_a_busy_thread_submits_one_job_an_iteration(setup: DiskSetup) -> None:
    """As steps bring them: many at once would be the thread's own pause."""
    idle, busy = SlowSide(setup), SlowSide(setup)
    play(idle, idle.store, jobs(size=2), in_flight=3, busy=False)
    play(busy, busy.store, jobs(size=2), in_flight=3, busy=True)
    assert max(idle.submitted_in_step) == 3
    assert max(busy.submitted_in_step) == 1


def test_ctrl_c_does_not_strike_within_a_side(setup: DiskSetup) -> None:
    """There it could keep a lock of vLLM's pool taken for ever; nobody could close it then."""

    class InterruptedSide(SlowSide):
        def store(self, job: Job) -> None:
            signal.raise_signal(signal.SIGINT)
            super().store(job)

    side = InterruptedSide(setup)
    with pytest.raises(KeyboardInterrupt):
        play(side, side.store, jobs(size=2), in_flight=3, busy=True)
    assert side.under_way == [jobs(size=2)[0].number]


def measured(
    rounds: Sequence[dict[str, float]], *, block_bytes: int = BLOCK_BYTES, pause: float = 1.0
) -> DiskMeasured:
    """Return figures in which a side took so many seconds for everything in each round.

    kvtier's longest pause is ``pause``, all others' are 10.
    """

    def legs(seconds: dict[str, float]) -> dict[str, dict[str, DiskLeg]]:
        return {
            kind: {
                side: DiskLeg(each, [each], pause if side == KVTIER else 10.0, 0.0)
                for side, each in seconds.items()
            }
            for kind in KINDS
        }

    return DiskMeasured(
        block_bytes=block_bytes,
        leg_bytes=10**9,
        job_blocks=32,
        jobs_in_flight=8,
        sides=list(rounds[0]),
        rounds=[Round(legs(each), legs(each), 0.001) for each in rounds],
        direct={},
        page_cache_bytes={},
        counters={},
        fio="",
    )


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    """A disk that slows down for all sides alike changes none of them."""
    found = measured(
        [
            {VLLM: 8.0, KVTIER_FS: 8.0, KVTIER: 2.0, RAW: 2.0},
            {VLLM: 50.0, KVTIER_FS: 50.0, KVTIER: 10.0, RAW: 10.0},
            {VLLM: 6.0, KVTIER_FS: 6.0, KVTIER: 2.0, RAW: 2.0},
        ]
    )
    (store,) = [each for each in ratios(found) if each.name == "store, times vLLM's GB/s"]
    assert list(store.of_rounds) == [4.0, 5.0, 3.0]
    assert store.median == 4.0
    assert store.holds is True
    assert gb_per_s(found, STORE, KVTIER, busy=False) == [0.5, 0.1, 0.5]
    assert job_ms(found, LOAD, KVTIER, 50) == 2000.0


def test_bars_are_those_of_the_block_size() -> None:
    seconds = {VLLM: 1.1, KVTIER_FS: 1.1, KVTIER: 1.0, RAW: 1.0}
    small = {each.name: each for each in ratios(measured([seconds]))}
    large = {each.name: each for each in ratios(measured([seconds], block_bytes=1 << 20))}
    other = {each.name: each for each in ratios(measured([seconds], block_bytes=2 << 20))}
    name = "load, times vLLM's GB/s"
    assert (small[name].at_least, small[name].holds) == (1.2, False)
    assert (large[name].at_least, large[name].holds) == (1.0, True)
    assert (other[name].at_least, other[name].holds) == (None, None)


def test_large_blocks_are_held_against_the_best_of_the_others_in_each_round() -> None:
    rounds = [
        {VLLM: 2.0, KVTIER_FS: 2.0, KVTIER: 2.0, RAW: 1.0},
        {VLLM: 1.0, KVTIER_FS: 1.0, KVTIER: 2.0, RAW: 2.0},
        {VLLM: 3.0, KVTIER_FS: 3.1, KVTIER: 2.0, RAW: 2.0},
    ]
    name = "store, share of the best of vLLM's and raw's GB/s"
    assert name not in {each.name for each in ratios(measured(rounds))}
    large = {each.name: each for each in ratios(measured(rounds, block_bytes=1 << 20))}
    assert list(large[name].of_rounds) == [0.5, 0.5, 1.0]
    assert (large[name].at_least, large[name].holds) == (0.95, False)
    assert large["store, kvtier fs, times vLLM's GB/s"].holds is True


def test_lmcache_is_one_of_the_others_where_it_is_measured() -> None:
    seconds = {VLLM: 2.0, KVTIER_FS: 2.0, KVTIER: 2.0, LMCACHE: 1.0, RAW: 4.0}
    found = {each.name: each for each in ratios(measured([seconds], block_bytes=1 << 20))}
    name = "store, share of the best of vLLM's and LMCache's and raw's GB/s"
    assert list(found[name].of_rounds) == [0.5]
    assert list(found["load, times LMCache's GB/s"].of_rounds) == [0.5]


def test_lmcache_that_is_not_there_is_said_at_the_door(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lmcache_rust_raw_block_io", None)
    assert main(["disk", "--beside", "lmcache"]) == 2
    assert "pip install lmcache lmcache-rust-raw-block-io" in capsys.readouterr().err


def test_what_lmcache_has_is_forgotten_after_each_round(setup: DiskSetup) -> None:
    """Its file has room for one leg, and nothing makes room by itself."""
    side = LMCacheSide(setup)
    try:
        for first in (1, 11, 21):
            play(side, side.store, jobs(first=first), in_flight=2, busy=False)
            play(side, side.load, jobs(first=first), in_flight=2, busy=False)
            side.forget()
    finally:
        side.close()


def test_the_share_of_fio_has_the_bar_and_raw_has_it_only_without_fio() -> None:
    with_fio = ratios(measured([{VLLM: 4.0, KVTIER_FS: 4.0, KVTIER: 2.0, RAW: 1.0, FIO: 1.8}]))
    without = ratios(measured([{VLLM: 4.0, KVTIER_FS: 4.0, KVTIER: 2.0, RAW: 1.0}]))
    bars = {each.name: each.holds for each in with_fio}
    assert bars["store, share of fio's GB/s"] is True
    assert bars["store, share of raw's GB/s"] is None
    assert {each.name: each.holds for each in without}["store, share of raw's GB/s"] is False


@pytest.mark.parametrize(("pause", "holds"), [(2.5, True), (2.6, False)])
def test_a_pause_may_be_a_quarter_of_vllms(pause: float, holds: bool) -> None:
    found = ratios(measured([{VLLM: 1.0, KVTIER_FS: 1.0, KVTIER: 1.0, RAW: 1.0}], pause=pause))
    (store,) = [each for each in found if each.name == "store, longest pause, share of vLLM's"]
    assert store.holds is holds


def test_what_is_dropped_is_no_longer_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    (tmp_path / "empty").touch()
    path.read_bytes()
    assert disk_page_cache.resident_bytes(tmp_path) == 1 << 20
    disk_page_cache.drop(tmp_path)
    assert disk_page_cache.resident_bytes(tmp_path) == 0


def make_fio(folder: Path) -> Fio:
    return Fio(folder, leg_bytes=1 << 20, block_bytes=BLOCK_BYTES, depth=4, direct=False)


def test_fio_moves_a_legs_bytes_where_there_is_one(tmp_path: Path) -> None:
    if shutil.which("fio") is None:  # not kvtier's to install: the benchmark goes on without
        with pytest.raises(FioFailed, match="fio not found"):
            make_fio(tmp_path)
        return
    fio = make_fio(tmp_path)
    fio.run(is_write=True)
    fio.run(is_write=False)
    assert (fio.folder / "file").stat().st_size == 1 << 20


def test_without_fio_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FioFailed, match=r"fio not found\. Install it"):
        make_fio(tmp_path)


def test_a_fio_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 1\n")
    program.chmod(0o700)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(FioFailed, match=r"none of io_uring, libaio.*no such engine"):
        make_fio(tmp_path / "work")


def test_all_sides_run_every_leg_and_leave_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # fio's own run is the command's test
    threads = ending_threads()
    advanced: list[int] = []
    options = DiskBenchOptions(tmp_path, 4 << 20, rounds=2, threads=4, encrypted=True)
    found = measure(options, BLOCK_BYTES, lambda: advanced.append(1))
    assert found.sides == options.sides == [VLLM, KVTIER_FS, KVTIER, ENCRYPTED, RAW]
    assert len(advanced) == options.legs
    assert len(found.rounds) == 2
    for each in found.rounds:
        assert all(sorted(each.idle[kind]) == sorted(found.sides) for kind in KINDS)
        assert all(sorted(each.busy[kind]) == sorted([VLLM, KVTIER, ENCRYPTED]) for kind in KINDS)
    assert found.fio.startswith("fio not found")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0
    until(lambda: ending_threads() <= threads, threading.enumerate)


def wait_for_blocks(bench: Bench) -> None:
    """Wait until a side has written blocks."""
    until(lambda: bench.has_ended() or any(bench.folder.rglob("*.bin")), bench.log)
    assert not bench.has_ended(), bench.log()


@pytest.mark.one_release
@pytest.mark.slow
def test_the_command_reports_figures_bars_and_the_page_cache(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--bytes", "4MiB", "--rounds", "1", "--threads", "4"]
    sizes = ["--block-bytes", "64KiB,128KiB"]
    with start_bench(tmp_path, "disk", *options, *sizes, "--json", str(report)) as bench:
        assert bench.wait() == 0, bench.log()
        shown = bench.log()
        bench.assert_nothing_is_left()
    data = json.loads(report.read_text())
    assert {"kvtier_version", "vllm_version", "options"} <= data.keys()
    assert [size["block_bytes"] for size in data["sizes"]] == [64 << 10, 128 << 10]
    for size in data["sizes"]:
        sides = [VLLM, KVTIER_FS, KVTIER, RAW, *([FIO] if shutil.which("fio") else [])]
        for kind in KINDS:
            assert list(size["gb_per_s"][kind]) == sides
            assert all(min(figures) > 0 for figures in size["gb_per_s"][kind].values())
            assert size["job_p50_ms"][kind][KVTIER] <= size["job_p99_ms"][kind][KVTIER]
            assert all(len(size["longest_pause_ms"][kind][each]) == 1 for each in (VLLM, KVTIER))
        assert (
            set(size["direct"]) == set(size["page_cache_bytes"]) == {VLLM, KVTIER_FS, KVTIER, RAW}
        )
        assert size["ratios"]
    lines = ("store, GB/s", "load, job p99, ms", "in the page cache as loads began", ">= 4.00")
    assert all(line in shown for line in lines)
    assert ("fio not found" in shown) is (shutil.which("fio") is None)


@pytest.mark.one_release
@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with start_bench(tmp_path, "disk", "--bytes", "64MiB", "--block-bytes", "64KiB") as bench:
        wait_for_blocks(bench)
        bench.assert_ctrl_c_ends_it()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--block-bytes", "1000"], "multiple of 4096"),
        (["--block-bytes", "4 parsecs"], "is not a size"),
        (["--bytes", "1MiB"], "less than one job"),
        (["--bytes", "900TB", "--block-bytes", "1MiB"], "MiB free"),
        (["--threads", "1"], "--threads"),
        (["--rounds", "0"], "--rounds"),
        (["--path", "nowhere/at/all"], "no folder"),
    ],
)
@pytest.mark.one_release
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = [] if "--path" in options else ["--path", str(tmp_path)]
    assert main(["disk", *folder, *options]) == 2
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
