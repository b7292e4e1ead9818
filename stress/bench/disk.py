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
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xxhash
from vllm.utils.gc_utils import freeze_gc_heap

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.sizes import read_bytes
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tools.bench.call_legs import KINDS, LOAD, STORE
from kvtier.tools.bench.percentile import percentile
from kvtier.tools.bench.tier_command import block_sizes
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
    spread,
    yes_or_no,
)
from stress.bench.sides import KVTIER, VLLM, make_keys

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stress.bench.disk_sides import DiskLeg

OPTIONS: Final = (
    PATH,
    Option("--block-bytes", "64KiB,256KiB,1MiB,2MiB,4MiB,8MiB", "sizes, one after the other"),
    Option("--bytes", "512MiB", "bytes that each side moves in one leg"),
    ROUNDS,
    # vLLM's tier wants one at least that reads, and one that writes.
    Option("--threads", 16, "threads of each side, and the queue depth of fio", least=2),
    Option("--encryption", default=False, help="measure the encrypted disk tier as well"),
    Option(
        "--beside",
        None,
        "measure LMCache's raw_block adapter as well, if LMCache is installed",
        choices=(LMCACHE,),
    ),
)

BUSY_SIDES: Final = (VLLM, KVTIER, ENCRYPTED)
"""A busy thread's pauses are compared between tiers; the disk by itself has none."""

WARM_UP_ROUNDS: Final = 3  #: kvtier's folder is full after them
WITHOUT_IO_S: Final = 1.0
JOBS_PER_THREAD: Final = 2  #: under way at once, so that no thread waits for the scheduler


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Measure one block size after the other."""
    sizes = block_sizes(asked.block_bytes)
    leg_bytes = read_bytes(asked.bytes, "--bytes")
    for size in sizes:
        least = _blocks_of_a_job(size) * size
        if leg_bytes < least:
            raise Misuse(
                f"--bytes {leg_bytes} is less than one job of {_blocks_of_a_job(size)} blocks of "
                f"{shown_size(size)}. Give {shown_size(least)} or more."
            )
    beside = {"beside": lmcache_version()} if asked.beside else {}
    with own_folder(asked.path) as folder:
        _check_room(asked, folder, leg_bytes)
        for size in sizes:
            found = measure_size(asked, folder, leg_bytes, size)
            report |= {**beside, "sizes": [*report.get("sizes", []), found]}


def show(report: Report) -> None:
    """Print the tables."""
    options = report["options"]
    for size in report["sizes"]:
        show_figures(size, options["rounds"], options["threads"])
    show_ratios(report["sizes"])


def measure_size(
    asked: argparse.Namespace, folder: Path, leg_bytes: int, block_bytes: int
) -> dict[str, Any]:
    """Measure one block size. ``leg_bytes`` is rounded down to whole jobs."""
    label = f"blocks of {shown_size(block_bytes)}"
    with _open_bed(asked, folder, leg_bytes, block_bytes) as bed:
        total = WARM_UP_ROUNDS * bed.legs(busy=False)
        total += asked.rounds * (bed.legs(busy=False) + bed.legs(busy=True))
        with progress(label, total) as shown:
            for _ in range(WARM_UP_ROUNDS):
                bed.run_legs({}, busy=False, on_leg=shown.advance)
            rounds = DiskRounds({}, {}, [])
            for _ in range(asked.rounds):
                bed.run_legs(rounds.idle, busy=False, on_leg=shown.advance)
                bed.run_legs(rounds.busy, busy=True, on_leg=shown.advance)
                rounds.pauses_without_io_s.append(longest_pause_without_io_s(WITHOUT_IO_S))
        counters = {name: dict(side.counters()) for name, side in bed.sides.items()}
        return {
            "block_bytes": block_bytes,
            "leg_bytes": bed.setup.leg_bytes,
            "job_blocks": bed.job_blocks,
            "jobs_in_flight": bed.in_flight,
            **figures(rounds, bed.setup.leg_bytes, block_bytes),
            "direct": {
                name: side.is_direct and "direct_refused" not in counters[name]
                for name, side in bed.sides.items()
            },
            "counters": {name: each for name, each in counters.items() if each},
            "fio": bed.fio_note,
        }


def _blocks_of_a_job(block_bytes: int) -> int:
    return 32 if block_bytes < 1 << 20 else 16


def _check_room(asked: argparse.Namespace, folder: Path, leg_bytes: int) -> None:
    others = 4 + bool(asked.beside)  # both fs tiers, raw and fio
    needed = int(((1 + asked.encryption) * CAPACITY_LEGS + others) * leg_bytes)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Misuse(
            f"{folder.parent} has {free >> 20} MiB free, and needs {needed >> 20} MiB. "
            "Name another folder with --path, or give fewer --bytes."
        )


@contextmanager
def _open_bed(
    asked: argparse.Namespace, place: Path, leg_bytes: int, block_bytes: int
) -> Iterator[_Bed]:
    """Set all sides up on fresh slots; at the end nothing takes room any more, but files stay."""
    job_blocks = _blocks_of_a_job(block_bytes)
    slots = max(1, leg_bytes // (job_blocks * block_bytes)) * job_blocks
    folder = place / f"{block_bytes}"
    folder.mkdir()
    setup = DiskSetup(folder, SlotMemory.anonymous(slots, block_bytes), asked.threads)
    makers: list[Callable[[DiskSetup], DiskSide]] = [VLLMSide, fs_side, disk_side]
    if asked.encryption:
        makers.append(partial(disk_side, key_file=_make_key_file(folder)))
    makers += [LMCacheSide, RawSide] if asked.beside else [RawSide]
    sides = []
    with ExitStack() as stack:
        stack.callback(empty_files, folder)
        with HeldSignals():  # so that a side that has been made is closed
            for make in makers:
                sides.append(make(setup))
                stack.callback(sides[-1].close)
        bed = _Bed(setup, sides, job_blocks)
        freeze_gc_heap()  # as vLLM's engine core does when it has started
        stack.callback(gc.unfreeze)
        yield bed


def _make_key_file(folder: Path) -> Path:
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return path


class _Bed:
    """The slots, and all sides on them."""

    def __init__(self, setup: DiskSetup, sides: Sequence[DiskSide], job_blocks: int) -> None:
        self.setup = setup
        self.job_blocks = job_blocks
        self.in_flight = JOBS_PER_THREAD * setup.threads
        self.sides = {side.name: side for side in sides}
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
        names = [*self.sides, *([FIO] if self._fio else [])]
        self._names = {False: names, True: [name for name in names if name in BUSY_SIDES]}
        self._orders = {busy: orders(names) for busy, names in self._names.items()}

    def legs(self, *, busy: bool) -> int:
        """Return how many legs a round has."""
        return len(KINDS) * len(self._names[busy])

    def run_legs(self, legs: Legs, *, busy: bool, on_leg: Callable[[], object]) -> None:
        """Have all sides store the same new blocks, then load them in the same order.

        So the blocks that kvtier evicts as least recently used are also those that lie
        together, and no block of theirs has to be written a second time.
        """
        jobs = self._new_jobs()
        for kind in KINDS:
            of_kind = legs.setdefault(kind, {name: [] for name in self._names[busy]})
            for name in next(self._orders[busy]):
                os.sync()  # what the side before has left to be written is not this one's
                of_kind[name].append(self._run_leg(name, kind, jobs, busy=busy))
                on_leg()
        for side in self.sides.values():
            side.forget()

    def _run_leg(self, name: str, kind: str, jobs: Sequence[Job], *, busy: bool) -> DiskLeg:
        if name == FIO:
            assert self._fio is not None
            return self._fio.run(kind)
        side = self.sides[name]
        if kind == STORE:
            return play(side, kind, jobs, in_flight=self.in_flight, busy=busy)
        drop_from_page_cache(side.folder)
        self._bytes[:] = 0
        leg = play(side, kind, jobs, in_flight=self.in_flight, busy=busy)
        if self._slot_digests() != self._digests:
            raise StoreFault(f"{name}: a load brought other bytes than were stored")
        return leg

    def _new_jobs(self) -> list[Job]:
        """Return jobs over all slots, under keys that no leg has had before."""
        size, count = self.job_blocks, len(self._slots)
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
        memory = self.setup.memory
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


# --- What legs say: medians, percentiles, and the ratios that are held against a bar.


Legs = dict[str, dict[str, "list[DiskLeg]"]]  #: by kind, then by side: one a round

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

ROWS: Final = (
    ("GB/s", "gb_per_s", 2),
    ("job p50, ms", "job_p50_ms", 1),
    ("job p99, ms", "job_p99_ms", 1),
    ("CPU s a GB", "cpu_s_per_gb", 2),
    ("GB/s, thread busy", "gb_per_s_busy", 2),
    ("longest pause, ms", "longest_pause_ms", 1),
)
SHOWN_AS: Final = {VLLM: "vLLM fs", KVTIER: "kvtier disk", LMCACHE: "LMCache raw_block"}
NOTHING: Final = "-"


class DiskRounds(NamedTuple):
    """The legs of one block size, with the thread idle and busy."""

    idle: Legs
    busy: Legs
    pauses_without_io_s: list[float]


def figures(rounds: DiskRounds, leg_bytes: int, block_bytes: int) -> dict[str, Any]:
    """Return all figures of one block size, by kind and side: one a round, or one of all jobs."""

    def each(legs: Legs, figure: Callable[[list[DiskLeg]], Any]) -> dict[str, dict[str, Any]]:
        return {kind: {side: figure(legs[kind][side]) for side in legs[kind]} for kind in KINDS}

    def gb_per_s(legs: list[DiskLeg]) -> list[float]:
        return [leg_bytes / leg.seconds / 1e9 for leg in legs]

    def job_ms(legs: list[DiskLeg], percent: float) -> float | None:
        seconds = [s for leg in legs for s in leg.job_seconds]
        return percentile(seconds, percent) * 1e3 if seconds else None

    def cpu_s_per_gb(legs: list[DiskLeg]) -> list[float] | None:
        known = [leg.cpu_seconds for leg in legs if leg.cpu_seconds is not None]
        return [seconds / leg_bytes * 1e9 for seconds in known] or None

    return {
        "gb_per_s": each(rounds.idle, gb_per_s),
        "gb_per_s_busy": each(rounds.busy, gb_per_s),
        "job_p50_ms": each(rounds.idle, lambda legs: job_ms(legs, 50)),
        "job_p99_ms": each(rounds.idle, lambda legs: job_ms(legs, 99)),
        "cpu_s_per_gb": each(rounds.idle, cpu_s_per_gb),
        "longest_pause_ms": each(
            rounds.busy, lambda legs: [leg.longest_pause_s * 1e3 for leg in legs]
        ),
        "longest_pause_without_io_ms": [pause * 1e3 for pause in rounds.pauses_without_io_s],
        "ratios": ratios(rounds, block_bytes),
    }


def ratios(rounds: DiskRounds, block_bytes: int) -> list[dict[str, Any]]:
    """Return all that is promised of a block size, and what belongs beside it.

    Each is one side's figure over another's, round by round.
    """
    found = []
    is_large = block_bytes >= LARGE_BYTES
    for kind in KINDS:
        idle, busy = (
            {side: [leg.seconds for leg in each] for side, each in legs[kind].items()}
            for legs in (rounds.idle, rounds.busy)
        )
        rivals = [side for side in RIVALS if side in idle]
        best = f"share of the best of {' and '.join(RIVALS[side] for side in rivals)} GB/s"
        if is_large:
            idle[BEST] = [min(each) for each in zip(*(idle[s] for s in rivals), strict=True)]
        on_vllm = BESIDE_VLLM_MIN.get((block_bytes, kind))
        on_raw = None if FIO in idle else BESIDE_FIO_MIN
        fs_on_vllm = FS_BESIDE_VLLM_MIN if is_large else None
        found += [
            _ratio(f"{kind}, {name}", seconds[other], seconds[side], at_least=bar)
            for name, seconds, side, other, bar in (
                ("times vLLM's GB/s", idle, KVTIER, VLLM, on_vllm),
                ("thread busy, times vLLM's GB/s", busy, KVTIER, VLLM, None),
                ("share of raw's GB/s", idle, KVTIER, RAW, on_raw),
                ("share of fio's GB/s", idle, KVTIER, FIO, BESIDE_FIO_MIN),
                ("encrypted, share of kvtier's own GB/s", idle, ENCRYPTED, KVTIER, None),
                ("kvtier fs, times vLLM's GB/s", idle, KVTIER_FS, VLLM, fs_on_vllm),
                ("times LMCache's GB/s", idle, KVTIER, LMCACHE, None),
                (best, idle, KVTIER, BEST, OF_BEST_MIN),
            )
            if side in seconds and other in seconds
        ]
    for kind in KINDS:
        ours, theirs = (
            [leg.longest_pause_s for leg in rounds.busy[kind][side]] for side in (KVTIER, VLLM)
        )
        name = f"{kind}, longest pause, share of vLLM's"
        found.append(_ratio(name, ours, theirs, at_most=PAUSE_BESIDE_VLLM_MAX))
    return found


def _ratio(
    name: str,
    over: Sequence[float],
    under: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    of_rounds = [one / other for one, other in zip(over, under, strict=True)]
    median = statistics.median(of_rounds)
    holds = None
    if at_least is not None:
        holds = median >= at_least
    elif at_most is not None:
        holds = median <= at_most
    return {
        "name": name,
        "median": median,
        "of_rounds": of_rounds,
        "at_least": at_least,
        "at_most": at_most,
        "holds": holds,
    }


def show_figures(size: dict[str, Any], rounds: int, threads: int) -> None:
    """Print the figures of one block size."""
    sides = list(size["gb_per_s"][STORE])
    rows = [
        [f"{kind}, {name}", *(_cell(size[key][kind].get(side), digits) for side in sides)]
        for kind in KINDS
        for name, key, digits in ROWS
    ]
    columns = ["", *(SHOWN_AS.get(side, side) for side in sides)]
    table(f"{shown_size(size['block_bytes'])} blocks", columns, rows)
    buffered = [side for side, is_direct in size["direct"].items() if not is_direct]
    notes = [
        ["jobs", f"{size['job_blocks']} blocks each, {size['jobs_in_flight']} at once"],
        ["threads of each side", f"{threads}"],
        ["bytes of a leg", f"{shown_size(size['leg_bytes'])}, medians of {rounds} rounds"],
        [
            "longest pause of the same busy thread without I/O, ms",
            _cell(size["longest_pause_without_io_ms"], 1),
        ],
        ["opened with O_DIRECT", f"all but {', '.join(buffered)}" if buffered else "all"],
        ["fio", size["fio"]],
    ]
    table("", ["", ""], notes)


def show_ratios(sizes: Sequence[dict[str, Any]]) -> None:
    """Print the ratios of all block sizes, and their bars."""
    rows = [
        [
            f"{shown_size(size['block_bytes'])}: {ratio['name']}",
            f"{ratio['median']:.2f}",
            spread(ratio["of_rounds"], 2),
            _bar(ratio),
            yes_or_no(ratio["holds"]),
        ]
        for size in sizes
        for ratio in size["ratios"]
    ]
    table("kvtier disk", ["", "ratio", "of rounds", "bar", "holds"], rows)


def _cell(values: list[float] | float | None, digits: int) -> str:
    """Show a figure, or the median of one a round."""
    if values is None:
        return NOTHING
    value = statistics.median(values) if isinstance(values, list) else values
    return f"{value:,.{digits}f}"


def _bar(ratio: dict[str, Any]) -> str:
    if ratio["at_least"] is not None:
        return f">= {ratio['at_least']:.2f}"
    return "" if ratio["at_most"] is None else f"<= {ratio['at_most']:.2f}"


def shown_size(count: int) -> str:
    """Write a size as people do, without rounding it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
