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
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
from vllm.utils.gc_utils import freeze_gc_heap

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.sizes import read_bytes
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tools.bench.call_legs import KINDS, STORE
from kvtier.tools.bench.tier_command import block_sizes
from kvtier.tools.held_signals import HeldSignals
from kvtier.tools.terminal import progress
from stress.bench.disk_figures import DiskRounds, figures, show_figures, show_ratios, shown_size
from stress.bench.disk_fio import FIO, Fio, FioFailed
from stress.bench.disk_legs import (
    DiskLeg,
    DiskSetup,
    DiskSide,
    Job,
    longest_pause_without_io_s,
    play,
)
from stress.bench.disk_lmcache import LMCACHE, LMCacheSide, lmcache_version
from stress.bench.disk_sides import (
    CAPACITY_LEGS,
    ENCRYPTED,
    RawSide,
    VLLMSide,
    disk_side,
    empty_files,
    fs_side,
)
from stress.bench.harness import PATH, ROUNDS, SEED, Option, Report, orders, own_folder
from stress.bench.sides import KVTIER, VLLM, make_keys

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stress.bench.disk_figures import Legs

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
