"""``stress.bench disk``: what a disk tier gives, all sides in one run, in turns leg by leg.

A *leg* stores, or loads, each slot of the primary tier once, on one side. All
sides run the same leg one after the other, then all run the next; their order
is drawn by lot each time, for a disk gives less to who writes right after
another one has. Disks give more for a moment than they do for long, and other
users come and go, so ratios are taken within a round, and the median of these
is what is reported.

Every loaded byte is compared with what was stored, after the clock has stopped.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import shutil
import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
from vllm.utils.gc_utils import freeze_gc_heap

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.sizes import read_bytes
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tools.bench.call_legs import KINDS, LOAD, STORE
from kvtier.tools.bench.percentile import percentile
from kvtier.tools.bench.tier_command import block_sizes, shown_size
from kvtier.tools.held_signals import HeldSignals
from kvtier.tools.terminal import progress, table
from stress.bench.disk_beside import FIO, LMCACHE, Fio, FioFailed, LMCacheSide, lmcache_version
from stress.bench.disk_sides import (
    CAPACITY_LEGS,
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
    empty_files,
    fs_side,
    longest_pause_without_io_s,
    play,
)
from stress.bench.harness import (
    PATH,
    ROUNDS,
    SEED,
    Option,
    Report,
    orders,
    own_folder,
    ratio,
    ratio_cells,
)
from stress.bench.sides import KVTIER, VLLM, make_keys

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

OPTIONS: Final = (
    PATH,
    Option("--block-bytes", "64KiB,256KiB,1MiB,2MiB,4MiB,8MiB", "sizes, one after the other"),
    Option("--bytes", "512MiB", "bytes that each side moves in one leg"),
    ROUNDS,
    Option("--encryption", default=False, help="measure the encrypted disk tier as well"),
    Option(
        "--beside",
        None,
        "measure LMCache's raw_block adapter as well, if LMCache is installed",
        choices=(LMCACHE,),
    ),
)

THREADS: Final = 16  #: of each side, and the queue depth of fio
JOBS_IN_FLIGHT: Final = 2 * THREADS  #: so that no thread waits for the scheduler
BUSY_SIDES: Final = (VLLM, KVTIER, ENCRYPTED)
"""A busy thread's pauses are compared between tiers; the disk by itself has none."""

WARM_UP_ROUNDS: Final = 3  #: kvtier's folder is full after them
WITHOUT_IO_S: Final = 1.0

BESIDE_VLLM_MIN: Final = {
    (64 << 10, STORE): 4.0,
    (64 << 10, LOAD): 1.2,
    (1 << 20, STORE): 1.5,
    (1 << 20, LOAD): 1.0,
}
"""How many times vLLM's GB/s is promised, by block size and kind."""

BESIDE_FIO_MIN: Final = 0.85
LARGE_BYTES: Final = 1 << 20  #: blocks of the models that people serve have this size and more
FS_BESIDE_VLLM_MIN: Final = 1.0  #: of large blocks
OF_BEST_MIN: Final = 0.95  #: of large blocks
PAUSE_BESIDE_VLLM_MAX: Final = 0.25
RIVALS: Final = {VLLM: "vLLM's", LMCACHE: "LMCache's", RAW: "raw's"}
BEST: Final = "best"  #: of the rivals, in each round

DIGITS: Final = {
    "GB/s": 2,
    "job p50, ms": 1,
    "job p99, ms": 1,
    "CPU s a GB": 2,
    "GB/s, thread busy": 2,
    "longest pause, ms": 1,
}
SHOWN_AS: Final = {VLLM: "vLLM fs", KVTIER: "kvtier disk", LMCACHE: "LMCache raw_block"}

Legs = dict[str, dict[str, list[DiskLeg]]]  #: by kind, then by side: one a round


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Measure one block size after the other."""
    sizes = block_sizes(asked.block_bytes)
    leg_bytes = read_bytes(asked.bytes, "--bytes")
    beside = {"beside": lmcache_version()} if asked.beside else {}
    with own_folder(asked.path) as folder:
        legs = (1 + asked.encryption) * CAPACITY_LEGS + 4 + bool(asked.beside)
        if shutil.disk_usage(folder).free < legs * leg_bytes:
            raise Misuse(f"{folder.parent} has less than {legs} times {asked.bytes} free.")
        for size in sizes:
            found = measure_size(asked, folder, leg_bytes, size)
            report |= {**beside, "sizes": [*report.get("sizes", []), found]}


def measure_size(
    asked: argparse.Namespace, place: Path, leg_bytes: int, block_bytes: int
) -> dict[str, Any]:
    """Measure one block size, on fresh slots; ``leg_bytes`` is rounded to whole jobs.

    At the end nothing takes room any more, but files stay.
    """
    job_blocks = 32 if block_bytes < 1 << 20 else 16
    slots = max(1, leg_bytes // (job_blocks * block_bytes)) * job_blocks
    folder = place / f"{block_bytes}"
    folder.mkdir()
    setup = DiskSetup(folder, SlotMemory.anonymous(slots, block_bytes), THREADS)
    makers: list[Callable[[DiskSetup], DiskSide]] = [VLLMSide, fs_side, disk_side]
    if asked.encryption:
        makers.append(partial(disk_side, key_file=_make_key_file(folder)))
    makers += [LMCacheSide, RawSide] if asked.beside else [RawSide]
    sides: list[DiskSide] = []
    with ExitStack() as stack:
        stack.callback(empty_files, folder)
        with HeldSignals():  # so that a side that has been made is closed
            for make in makers:
                sides.append(make(setup))
                stack.callback(sides[-1].close)
        bed = _Bed(setup, sides, job_blocks)
        freeze_gc_heap()  # as vLLM's engine core does when it has started
        stack.callback(gc.unfreeze)
        rounds = WARM_UP_ROUNDS + asked.rounds
        shown = stack.enter_context(progress(f"blocks of {shown_size(block_bytes)}", rounds))
        idle, busy, pauses_ms = bed.no_legs(), bed.no_legs(), []
        for number in range(rounds):
            is_measured = number >= WARM_UP_ROUNDS
            bed.run_legs(idle if is_measured else bed.no_legs(), busy=False)
            if is_measured:
                bed.run_legs(busy, busy=True)
                pauses_ms.append(longest_pause_without_io_s(WITHOUT_IO_S) * 1e3)
            shown.advance()
        refused = {side.name for side in sides if side.counters().get("direct_refused")}
        return {
            "block_bytes": block_bytes,
            "leg_bytes": setup.leg_bytes,
            "job_blocks": job_blocks,
            "figures": {
                kind: {
                    name: figures(legs, busy[kind][name], setup.leg_bytes)
                    for name, legs in idle[kind].items()
                }
                for kind in KINDS
            },
            "ratios": ratios(idle, busy, block_bytes),
            "longest_pause_without_io_ms": pauses_ms,
            "buffered": [side.name for side in sides if side.name in refused or not side.is_direct],
            "fio": bed.fio_note,
        }


def _make_key_file(folder: Path) -> Path:
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return path


class _Bed:
    """The slots, and all sides on them."""

    def __init__(self, setup: DiskSetup, sides: Sequence[DiskSide], job_blocks: int) -> None:
        self._setup = setup
        self._job_blocks = job_blocks
        self._sides = {side.name: side for side in sides}
        self._slots = list(range(setup.memory.slot_count))
        # Neighbours in a job are none in memory.
        random.Random(SEED).shuffle(self._slots)
        self._next_job = 1
        self._bytes = np.frombuffer(setup.memory.buffer, dtype=np.uint64)
        self._bytes[:] = np.random.default_rng(SEED).integers(
            1 << 64, size=len(self._bytes), dtype=np.uint64
        )
        self._digests = self._slot_digests()
        self._fio: Fio | None = None
        try:
            self._fio = Fio(setup)
            self.fio_note = str(self._fio)
        except FioFailed as problem:
            self.fio_note = str(problem)
        self._names = [*self._sides, *([FIO] if self._fio else [])]
        self._orders = {
            busy: orders([name for name in self._names if not busy or name in BUSY_SIDES])
            for busy in (False, True)
        }

    def no_legs(self) -> Legs:
        """Return lists for the legs of each kind and side."""
        return {kind: {name: [] for name in self._names} for kind in KINDS}

    def run_legs(self, legs: Legs, *, busy: bool) -> None:
        """Have all sides store the same new blocks, then load them in the same order.

        So the blocks that kvtier evicts as least recently used are also those that lie
        together, and no block of theirs has to be written a second time.
        """
        jobs = self._new_jobs()
        for kind in KINDS:
            for name in next(self._orders[busy]):
                os.sync()  # what the side before has left to be written is not this one's
                legs[kind][name].append(self._run_leg(name, kind, jobs, busy=busy))
        for side in self._sides.values():
            side.forget()

    def _run_leg(self, name: str, kind: str, jobs: Sequence[Job], *, busy: bool) -> DiskLeg:
        if name == FIO:
            assert self._fio is not None
            return self._fio.run(kind)
        side = self._sides[name]
        if kind == STORE:
            return play(side, kind, jobs, in_flight=JOBS_IN_FLIGHT, busy=busy)
        drop_from_page_cache(side.folder)
        self._bytes[:] = 0
        leg = play(side, kind, jobs, in_flight=JOBS_IN_FLIGHT, busy=busy)
        if self._slot_digests() != self._digests:
            raise StoreFault(f"{name}: a load brought other bytes than were stored")
        return leg

    def _new_jobs(self) -> list[Job]:
        """Return jobs over all slots, under keys that no leg has had before."""
        size, count = self._job_blocks, len(self._slots)
        keys = make_keys(self._next_job * size, count)
        jobs = [
            Job(
                self._next_job + start // size,
                tuple(keys[start : start + size]),
                tuple(self._slots[start : start + size]),
            )
            for start in range(0, count, size)
        ]
        self._next_job += len(jobs)
        return jobs

    def _slot_digests(self) -> list[int]:
        memory = self._setup.memory
        return [xxhash.xxh3_64_intdigest(memory.view(slot)) for slot in range(memory.slot_count)]


def drop_from_page_cache(folder: Path) -> None:
    """Have the kernel forget the files' pages. What is not on the disk yet stays: sync first."""
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def figures(
    idle: Sequence[DiskLeg], busy: Sequence[DiskLeg], leg_bytes: int
) -> dict[str, float | None]:
    """Return what one side's legs of one kind show: medians of the rounds; jobs of all of them."""
    job_ms = [1e3 * seconds for leg in idle for seconds in leg.job_seconds]
    gb = leg_bytes / 1e9
    return {
        "GB/s": _median([gb / leg.seconds for leg in idle]),
        "job p50, ms": percentile(job_ms, 50) if job_ms else None,
        "job p99, ms": percentile(job_ms, 99) if job_ms else None,
        "CPU s a GB": _median([leg.cpu_seconds / gb for leg in idle if leg.cpu_seconds]),
        "GB/s, thread busy": _median([gb / leg.seconds for leg in busy]),
        "longest pause, ms": _median([1e3 * leg.longest_pause_s for leg in busy]),
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def ratios(idle: Legs, busy: Legs, block_bytes: int) -> list[dict[str, Any]]:
    """Return all that is promised of a block size, and what belongs beside it.

    Each is one side's figure over another's, round by round.
    """
    found = []
    is_large = block_bytes >= LARGE_BYTES
    for kind in KINDS:
        idle_s, busy_s = (
            {name: [leg.seconds for leg in each] for name, each in legs[kind].items() if each}
            for legs in (idle, busy)
        )
        rivals = [name for name in RIVALS if name in idle_s]
        best = f"share of the best of {' and '.join(RIVALS[name] for name in rivals)} GB/s"
        if is_large:
            idle_s[BEST] = [min(each) for each in zip(*map(idle_s.get, rivals), strict=True)]
        on_vllm = BESIDE_VLLM_MIN.get((block_bytes, kind))
        on_raw = None if FIO in idle_s else BESIDE_FIO_MIN
        fs_on_vllm = FS_BESIDE_VLLM_MIN if is_large else None
        found += [
            _ratio(f"{kind}, {name}", seconds[other], seconds[side], at_least=bar)
            for name, seconds, side, other, bar in (
                ("times vLLM's GB/s", idle_s, KVTIER, VLLM, on_vllm),
                ("thread busy, times vLLM's GB/s", busy_s, KVTIER, VLLM, None),
                ("share of raw's GB/s", idle_s, KVTIER, RAW, on_raw),
                ("share of fio's GB/s", idle_s, KVTIER, FIO, BESIDE_FIO_MIN),
                ("encrypted, share of kvtier's own GB/s", idle_s, ENCRYPTED, KVTIER, None),
                ("kvtier fs, times vLLM's GB/s", idle_s, KVTIER_FS, VLLM, fs_on_vllm),
                ("times LMCache's GB/s", idle_s, KVTIER, LMCACHE, None),
                (best, idle_s, KVTIER, BEST, OF_BEST_MIN),
            )
            if side in seconds and other in seconds
        ]
    for kind in KINDS:
        ours, theirs = (
            [leg.longest_pause_s for leg in busy[kind][name]] for name in (KVTIER, VLLM)
        )
        name = f"{kind}, longest pause, share of vLLM's"
        found.append(_ratio(name, ours, theirs, at_most=PAUSE_BESIDE_VLLM_MAX))
    return found


def _ratio(
    name: str, over: Sequence[float], under: Sequence[float], **bar: float | None
) -> dict[str, Any]:
    return {"name": name, **ratio(over, under, **bar, run_by_run=True)}


def show(report: Report) -> None:
    """Print the tables."""
    for size in report["sizes"]:
        _show_figures(size, report["options"]["rounds"])
    rows = [
        [f"{shown_size(size['block_bytes'])}: {found['name']}", *ratio_cells(found)]
        for size in report["sizes"]
        for found in size["ratios"]
    ]
    table("kvtier disk", ["", "ratio", "of rounds", "bar", "holds"], rows)


def _show_figures(size: Mapping[str, Any], rounds: int) -> None:
    sides = list(size["figures"][STORE])
    rows = [
        [f"{kind}, {row}", *(_cell(size["figures"][kind][side][row], digits) for side in sides)]
        for kind in KINDS
        for row, digits in DIGITS.items()
    ]
    columns = ["", *(SHOWN_AS.get(side, side) for side in sides)]
    table(f"{shown_size(size['block_bytes'])} blocks", columns, rows)
    buffered = ", ".join(size["buffered"])
    notes = [
        ["jobs", f"{size['job_blocks']} blocks each, {JOBS_IN_FLIGHT} at once"],
        ["threads of each side", f"{THREADS}"],
        ["bytes of a leg", f"{shown_size(size['leg_bytes'])}, medians of {rounds} rounds"],
        [
            "longest pause of the same busy thread without I/O, ms",
            _cell(statistics.median(size["longest_pause_without_io_ms"]), 1),
        ],
        ["opened with O_DIRECT", f"all but {buffered}" if buffered else "all"],
        ["fio", size["fio"]],
    ]
    table("", ["", ""], notes)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
